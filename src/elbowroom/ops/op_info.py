"""Facts about an op that do not depend on its arguments, for the C++ extension."""

from __future__ import annotations

from typing import Any

import torch

from elbowroom.ops.replayable import STATISTICS, find_written, is_view, may_be_replayed, touches_tensors, uses_memory


def describe_op(name: str, overload: str) -> dict[str, Any]:
    """Return the extension's facts about an op, given its name ("aten::add") and overload ("Tensor")."""
    namespace, opname = name.split("::", 1)
    packet = getattr(getattr(torch.ops, namespace), opname)
    func = getattr(packet, overload or "default")
    is_replayable, has_conditions = may_be_replayed(func)
    arguments = [each.name for each in func._schema.arguments]
    written, is_traced = [index for index, _ in find_written(func)], touches_tensors(func)
    mean, variance, training = STATISTICS.get(func._opname, (-1, -1, -1))
    is_attention = has_conditions and "attention" in func._opname
    return {
        "name": str(func),
        "is_traced": is_traced,
        "is_idle": not written and mean < 0 and (is_view(func) or not is_traced),
        "uses_memory": uses_memory(func),
        "may_write": bool(written) or mean >= 0,
        "written": written,
        "is_replayable": is_replayable and (not is_attention or "dropout_p" in arguments),
        "is_random": torch.Tag.nondeterministic_seeded in func.tags,
        "is_source": not any("Tensor" in str(each.type) for each in func._schema.arguments),
        "is_convolution": func._opname == "convolution",
        # cuDNN takes another algorithm, with other last bits, where it is refused a workspace.
        "has_other_ways": "convolution" in func._opname,
        "uses_up": func._opname in ("_cudnn_rnn_backward", "miopen_rnn_backward"),  # the reserve of the forward pass
        # Not those with `out=`, which may be resized.
        "takes_nothing": func._opname.endswith("_")
        and (torch.Tag.pointwise in func.tags or func._opname in ("zero_", "fill_")),
        "dropout": arguments.index("dropout_p") if is_attention and "dropout_p" in arguments else -1,
        "statistics": [mean, variance, -1 if training is None else training],
    }

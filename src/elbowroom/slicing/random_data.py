"""Random arguments for a probe: the shapes, strides and dtypes of given tensors."""

from __future__ import annotations

import enum

import torch

from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.rule import SliceRule

_POSITIVE = frozenset(("running_var", "rstd", "save_invstd", "save_var", "total_weight"))


class Values(enum.Enum):
    """Distribution of the values of floating-point tensors."""

    NORMAL = "normal"
    EXTREME = "extreme"
    POSITIVE = "positive"


def fill_reads(
    call: OpCall, rule: SliceRule, values: Values, generator: torch.Generator, device: torch.device
) -> list[torch.Tensor]:
    """Return random tensors in place of a call's `reads`, without using PyTorch's own random state."""
    made = []
    for name, tensor in zip(call.names, call.reads, strict=True):
        end = rule.indices[name](call) if name in rule.indices else 2
        flat = torch.empty(_count_elements(tensor), dtype=tensor.dtype, device=device)
        _fill(flat, end, Values.POSITIVE if name in _POSITIVE else values, generator)
        made.append(flat.as_strided(tensor.shape, tensor.stride()))
    return made


def make_statistics(call: OpCall, device: torch.device) -> dict[str, torch.Tensor]:
    """Return ones in place of running statistics that the op updates."""
    return {name: torch.ones(call[name].shape, dtype=call[name].dtype, device=device) for name in call.statistics}


def _count_elements(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _fill(flat: torch.Tensor, end: int, values: Values, generator: torch.Generator) -> None:
    """Fill a tensor; integers are in [0, end)."""
    if not (flat.is_floating_point() or flat.is_complex()):
        flat.random_(0, max(end, 1), generator=generator)
        return
    flat.normal_(generator=generator)
    if values is Values.POSITIVE:
        flat.abs_().add_(0.1)
    elif values is Values.EXTREME:
        _make_extreme(flat)


def _make_extreme(flat: torch.Tensor) -> None:
    """Spread values over a large part of the dtype's range, and set some to 0 and -0."""
    largest = torch.finfo(flat.dtype).max
    for divisor, power in ((3, 0.3), (5, -0.3), (7, 0.0), (11, -0.0)):
        chosen = flat[::divisor]
        chosen.mul_(largest**power if power else power)

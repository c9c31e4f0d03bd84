"""Tells which ops may be replayed (run again to recompute their results), and which arguments an op writes.

An op may be replayed if the same inputs give the same bits and it has no side effects. Replays are recorded from the
running step, so scalars and tensors are always those of this step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

Fact = TypeVar("Fact")


def by_op(find: Callable[[OpOverload], Fact]) -> Callable[[OpOverload], Fact]:
    """Cache a function of an op. Keyed by identity, since hashing an op takes longer than the rest of the call."""
    known: dict[int, tuple[OpOverload, Fact]] = {}  # keeps the op alive, so that its id is not reused

    @functools.wraps(find)
    def remember(func: OpOverload) -> Fact:
        found = known.get(id(func))
        if found is None:
            found = known.setdefault(id(func), (func, find(func)))  # another thread may have come first
        return found[1]

    return remember


# On CUDA the order of additions in these ops varies from run to run.
_UNORDERED = frozenset(
    (
        *("bincount", "cumprod", "cumsum", "histc", "index_add", "index_add_", "index_copy", "index_put", "index_put_"),
        *("index_reduce", "kthvalue", "median", "put", "put_", "resize_", "scatter_add", "scatter_add_"),
        *("scatter_reduce", "scatter_reduce_", "set_"),
    )
)

STATISTICS: dict[str, tuple[int, int, int | None]] = {
    "native_batch_norm": (3, 4, 5),
    "_native_batch_norm_legit": (3, 4, 5),
    "cudnn_batch_norm": (3, 4, 5),
    "miopen_batch_norm": (3, 4, 5),
    "_batch_norm_with_update": (3, 4, None),
    # Composite ops, which reach watchers undecomposed in inference mode.
    "batch_norm": (3, 4, 5),
    "instance_norm": (3, 4, 5),
}
"""Positions of the running mean, the running variance and the training flag (None if the op is for training only).
Batch norm in training does not read its running statistics, but updates them, once. So a replay passes copies."""


def find_barrier(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return why an op must not be replayed; "" if it may be."""
    name = func._opname
    if func.namespace != "aten":
        return "not an ATen op: it may have side effects"
    if torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args, kwargs):
        return "draws random numbers"
    if name.startswith(("empty", "new_empty")):
        return "its contents are written by something else"
    if name in _UNORDERED:
        return "its order of additions may vary"
    if name == "convolution" and args[0].device.type == "cuda":
        if torch.backends.cudnn.benchmark:
            return "cuDNN may choose another algorithm"  # by timing, separately in each thread
        fixed = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
        if args[6] and not fixed:
            return "its order of additions may vary"  # a transposed convolution uses the backward algorithms
    return ""


def may_be_replayed(func: OpOverload) -> tuple[bool, bool]:
    """Return whether an op may be replayed at all, and whether that depends on its arguments (see `find_barrier`)."""
    has_conditions = func._opname == "convolution" or "attention" in func._opname
    return has_conditions or not find_barrier(func, (), {}), has_conditions


def _without_dropout(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an attention op, which is always tagged as random, has its dropout off."""
    if "attention" not in func._opname:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value == 0.0)
    return False


def find_statistics(func: OpOverload, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the positions of running statistics that an op updates without reading them."""
    entry = STATISTICS.get(func._opname)
    if entry is None:
        return ()
    mean, variance, training = entry
    return (mean, variance) if training is None or (len(args) > training and args[training]) else ()


@by_op
def find_written(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return (position, name) of the arguments that an op writes to: by its schema, or by name if it communicates."""
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or _is_received(func, argument)
    )


def _is_received(func: OpOverload, argument: Any) -> bool:
    """Tell whether an op of torch.distributed writes to an argument, which the schemas of these ops do not say.

    All but `send` write to `tensors` (`allreduce_`, `broadcast_`, `recv_`), and those with inputs to their outputs.
    """
    if "Tensor" not in str(argument.type) or func._opname in ("send", "isend"):
        return False
    if func.namespace == "c10d":
        return not argument.name.startswith(("input", "sparse"))
    if func.namespace == "fsdp":
        return func._opname == "all_gather_copy_in" and argument.name == "all_gather_output"
    return func.namespace == "_c10d_functional" and func._opname in ("irecv", "batch_p2p_ops")


@by_op
def is_view(func: OpOverload) -> bool:
    """Tell whether an op always returns a view of its argument.

    False for composite ops, which inference mode does not decompose: they may copy.
    """
    if not func.is_view or func._opname.startswith("lift"):
        return False  # the query below aborts the process for ops that the dispatcher does not know
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@by_op
def touches_tensors(func: OpOverload) -> bool:
    """Tell whether an op makes or changes tensors, unlike a query (of a device or strides).

    `alias` and `detach` do not count: whether autograd calls them depends on the watchers.
    """
    if func._opname in ("alias", "detach"):
        return False
    if func._opname == "allclose" or func.namespace == "elbowroom":
        return True  # it returns a bool, but allocates temporaries; ours mark a place among the ops
    return bool(find_written(func)) or any("Tensor" in str(result.type) for result in func._schema.returns)


_ASKING = frozenset(
    (
        "can_cast", "dense_dim", "dim", "get_device", "numel", "output_nr", "promote_types", "qscheme",
        "q_per_channel_axis", "result_type", "retains_grad", "size", "sparse_dim", "storage_offset", "stride",
        "_assert_tensor_metadata", "_debug_has_internal_overlap", "_dimI", "_dimV", "_fused_sdp_choice",
        "_has_compatible_shallow_copy_type", "_has_same_storage_numel", "_nested_get_ragged_idx", "_nnz", "_version",
    )
)  # fmt: skip
"""PyTorch's own ops that ask for what is known of tensors without their bytes."""


@by_op
def uses_memory(func: OpOverload) -> bool:
    """Tell whether an op may read or write the bytes of its tensors, whatever it returns."""
    if is_view(func) or func._opname in ("alias", "detach", "_unsafe_view", "narrow"):
        return False  # `narrow` is composite; the kernel of `split` calls it
    if func.namespace == "aten" and (func._opname.endswith("_like") or func._opname.startswith("new_")):
        return False  # only the shape counts
    if func.namespace != "aten" or touches_tensors(func) or func._opname in ("is_nonzero", "is_pinned"):
        return True
    return not (func._opname in _ASKING or func._opname.startswith(("is_", "_is_", "sym_")))


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results, in order, including those in lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from iterate_tensors(item)

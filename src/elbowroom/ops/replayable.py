"""Which ops may be replayed to compute their results again, and what each op writes.

An op may be replayed if the same inputs give the same bits and nothing else changes. Replays are recorded from the
step as it runs, so scalars and tensors are always those of this step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

Fact = TypeVar("Fact")


def by_op(find: Callable[[OpOverload], Fact]) -> Callable[[OpOverload], Fact]:
    """Remember what is found of each op. By identity: an op's own hash takes longer than all the rest."""
    known: dict[int, tuple[OpOverload, Fact]] = {}  # the op is kept, so that its identity is not used again

    @functools.wraps(find)
    def remember(func: OpOverload) -> Fact:
        found = known.get(id(func))
        if found is None:
            found = known.setdefault(id(func), (func, find(func)))  # another thread may have come first
        return found[1]

    return remember


# On CUDA these add in an order that varies from run to run.
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
    # Whole, as inference mode shows them.
    "batch_norm": (3, 4, 5),
    "instance_norm": (3, 4, 5),
}
"""Batch norm in training reads no running statistics: it updates them, once. (Positions: running mean, running
variance, and the training flag, or None where the op is for training only.) A replay gives it copies."""


def find_barrier(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why an op must not be replayed; "" if it may be."""
    name = func._opname
    if func.namespace != "aten":
        return "not an ATen op: it may do more than it says"
    if torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args, kwargs):
        return "draws random numbers"
    if name.startswith(("empty", "new_empty")):
        return "its contents are written by something else"
    if name in _UNORDERED:
        return "its order of additions may vary"
    if name == "convolution" and args[0].device.type == "cuda":
        if torch.backends.cudnn.benchmark:
            return "cuDNN may choose another algorithm"  # by the clock, and anew in each thread
        fixed = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
        if args[6] and not fixed:
            return "its order of additions may vary"  # a transposed one is the backward pass of another
    return ""


def may_be_replayed(func: OpOverload) -> tuple[bool, bool]:
    """Tell whether an op may be replayed, given the right arguments; and whether `find_barrier` has to check them."""
    has_conditions = func._opname == "convolution" or "attention" in func._opname
    return has_conditions or not find_barrier(func, (), {}), has_conditions


def _without_dropout(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """An attention op is tagged as random even where its dropout is off."""
    if "attention" not in func._opname:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value == 0.0)
    return False


def find_statistics(func: OpOverload, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Positions of arguments that are running statistics being updated, not read."""
    entry = STATISTICS.get(func._opname)
    if entry is None:
        return ()
    mean, variance, training = entry
    return (mean, variance) if training is None or (len(args) > training and args[training]) else ()


@by_op
def find_written(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that an op writes to, by its schema."""
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@by_op
def is_view(func: OpOverload) -> bool:
    """Tell whether an op always returns a view of its argument.

    By its schema, but for ops that are made of others and are seen whole in inference mode: they may copy.
    """
    if not func.is_view or func._opname.startswith("lift"):
        return False  # nor does PyTorch's dispatcher know of all ops, and it ends the process where it is asked
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@by_op
def touches_tensors(func: OpOverload) -> bool:
    """Tell whether an op makes or changes tensors. One that only asks (its device, its strides) is not part of a step.
    Nor is one that returns its tensor under another name: whether autograd calls those depends on who watches."""
    if func._opname in ("alias", "detach"):
        return False
    if func._opname == "allclose":
        return True  # the answer is no tensor, what it takes to find it are several
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
    if is_view(func) or func._opname in ("alias", "detach"):
        return False
    if func.namespace != "aten" or touches_tensors(func) or func._opname in ("is_nonzero", "is_pinned"):
        return True
    return not (func._opname in _ASKING or func._opname.startswith(("is_", "_is_", "sym_")))


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments or results, in order, through lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from iterate_tensors(item)

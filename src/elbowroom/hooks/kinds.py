"""What is known of an op whatever it is given: found once, and looked up for each op of every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from elbowroom.hooks.replayable import (
    by_op,
    find_written,
    has_statistics,
    is_view,
    list_written,
    may_be_replayed,
    touches_tensors,
)

_COUNTS: dict[str, Callable[[torch.Tensor], int]] = {
    "repeat_interleave": lambda repeats: int(repeats.sum()),
    "bincount": lambda values: int(values.max()) + 1 if values.numel() else 0,
}

_WANT_ROWS = {
    "_softmax",
    "_log_softmax",
    "_softmax_backward_data",
    "_log_softmax_backward_data",
    "embedding_dense_backward",
}
"""Their kernels copy what is not contiguous."""

_WANT_MATRICES = {"mm", "bmm", "addmm", "baddbmm", "mv", "addmv"}
"""Their kernels take rows or columns, and copy what lies otherwise."""


def _count_expanded(values: Sequence[Any]) -> int:
    """Bytes of those tensors, were they written out, whose elements stand for several each."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return sum(tensor.nbytes for tensor in tensors if 0 in tensor.stride() and tensor.numel() > 1)


def _count_scattered(values: Sequence[Any]) -> int:
    """Bytes of those tensors that are not contiguous."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_contiguous())


def _count_askew(values: Sequence[Any]) -> int:
    """Bytes of those matrices whose elements lie next to each other neither in rows nor in columns."""
    nbytes = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            strides = value.stride()
            if 0 in strides or 1 not in strides[-2:]:
                nbytes += value.nbytes
    return nbytes


class Kind:
    """One op overload.

    Attributes:
        func: the op itself, which lives as long as this, so that its identity is not used again.
        name: of the op, as traces have it.
        identity: of the op; to hash the op itself takes longer than all the rest.
        call: calls it; of most ops what their own `__call__` calls, which is a Python function around it.
        is_traced: whether a trace has it.
        is_idle: it only looks at its argument in another way, or asks: nothing is allocated or written to.
        makes_nothing: it allocates nothing.
        may_write: it writes to some of its arguments, or may update statistics.
        writes: (position, name) of the arguments that it writes to by its schema.
        is_replayable: whether it may be replayed, as far as that does not rest on its arguments.
        has_conditions: whether that rests on its arguments, too.
        is_convolution: of one kind or another, or its gradient.
        is_source: it makes what it returns of no tensors.
        count_copied: bytes of those of its arguments that its kernels do not take as they lie, and copy; None if there
            are none, or a rule of its own counts them (`cost.workspace`).
        count_results: elements of its results, which only the values of its first argument tell; None of most ops.
        mixes_scalars: it takes lists of numbers that may be of several types.
        has_statistics: whether some of its arguments are statistics that it may update.
    """

    __slots__ = (
        "call",
        "count_copied",
        "count_results",
        "func",
        "has_conditions",
        "has_statistics",
        "identity",
        "is_convolution",
        "is_idle",
        "is_replayable",
        "is_source",
        "is_traced",
        "makes_nothing",
        "may_write",
        "mixes_scalars",
        "name",
        "writes",
    )

    def __init__(self, func: OpOverload) -> None:
        self.func, self.identity, self.name = func, id(func), str(func)
        self.call: Callable[..., Any] = getattr(func, "_op", func) if type(func) is OpOverload else func
        self.writes = find_written(func)
        self.has_statistics = has_statistics(func)
        self.mixes_scalars = any("List[number]" in str(each.type) for each in func._schema.arguments)
        self.count_results = _COUNTS.get(func._opname)
        self.count_copied: Callable[[Sequence[Any]], int] | None = None
        self.is_convolution = "convolution" in func._opname
        if self.is_convolution:
            self.count_copied = _count_expanded
        elif func._opname in _WANT_MATRICES:
            self.count_copied = _count_askew
        elif func._opname in _WANT_ROWS:
            self.count_copied = _count_scattered
        self.is_source = not any("Tensor" in str(each.type) for each in func._schema.arguments)
        self.may_write = bool(self.writes) or self.has_statistics
        self.is_traced = touches_tensors(func)
        self.is_idle = not self.may_write and (is_view(func) or not self.is_traced)
        self.makes_nothing = is_view(func) or func._opname == "set_"
        self.is_replayable, self.has_conditions = may_be_replayed(func)

    def list_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that it writes to: by its schema, and statistics that it updates without saying so."""
        if len(self.writes) == 1 and not self.has_statistics:
            position, name = self.writes[0]
            value = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(value, torch.Tensor):
                return [value]
        return list_written(self.func, args, kwargs)


find_kind = by_op(Kind)

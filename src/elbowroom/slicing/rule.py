"""SliceRule: how one op can be cut, and the functions with which rules describe it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from elbowroom.ir.slicing import Loop, SlicePass
from elbowroom.slicing.op_call import OpCall

Alternatives = tuple[tuple[SlicePass, ...], ...]
"""Ways to cut an op, best first. Each is a sequence of passes that together compute all results."""


VECTOR_BYTES = 128
"""Bytes of the vectors that a kernel computes at a time, or a multiple of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class PartialRule:
    """Functions that compute a partial pass.

    Attributes:
        run: returns the tensors of a slice, given its arguments by name.
        combine: returns the op's results, given the tensors of all slices in order.
    """

    run: Callable[[Mapping[str, Any]], tuple[torch.Tensor, ...]]
    combine: Callable[[OpCall, Sequence[tuple[torch.Tensor, ...]]], tuple[torch.Tensor, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class SliceRule:
    """Description of the ways to cut one op.

    Attributes:
        find_passes: returns the ways to cut a call. The call's tensors may be fake: only their shapes, strides and
            dtypes are used.
        adapt: returns the arguments that are not tensors and differ for a slice, by name. It gets the whole call and
            the arguments with the slice's tensors. None: no such argument differs.
        view: returns the same call on views of its tensors that are easier to cut. None: the call itself.
        partial: computes passes that are partial, if the op has any.
        dtypes: returns the dtypes of results, by position, for which PyTorch's fake kernel may name another dtype than
            the real one returns. None: it names the real ones.
        indices: for tensor arguments that hold indices, a function that returns the end of their range, by name.
    """

    find_passes: Callable[[OpCall], Alternatives]
    adapt: Callable[[OpCall, Mapping[str, Any]], dict[str, Any]] | None = None
    view: Callable[[OpCall], OpCall] | None = None
    partial: PartialRule | None = None
    dtypes: Callable[[OpCall], dict[int, torch.dtype]] | None = None
    indices: Mapping[str, Callable[[OpCall], int]] = dataclasses.field(default_factory=dict)


def count_results(call: OpCall) -> int:
    """Return the number of tensors that a call returns."""
    return len(call.find_mask())


def make_loop(
    call: OpCall, length: int, reads: Mapping[str, int], writes: Mapping[int, int], *, multiple: int = 1
) -> Loop:
    """Describe a loop.

    Args:
        reads: dimension along which each tensor argument is narrowed, by name; a negative one counts from the last.
        writes: dimension along which each result is narrowed, by index.
    """
    dimensions = (
        reads[name] % call.reads[index].ndim if name in reads else None for index, name in enumerate(call.names)
    )
    return Loop(
        length=length,
        multiple=multiple,
        reads=tuple(dimensions),
        writes=tuple(writes.get(index) for index in range(count_results(call))),
    )


def make_pass(
    call: OpCall,
    loops: Sequence[Loop],
    *,
    unread: Iterable[str] = (),
    results: Sequence[int] | None = None,
    sums: bool = False,
) -> SlicePass:
    """Describe a pass.

    Args:
        unread: names of tensor arguments of which the pass uses the shapes only.
        results: indices of the results that it computes. Default: all.
    """
    without = set(unread)
    return SlicePass(
        loops=tuple(loops),
        reads=tuple(index for index, name in enumerate(call.names) if name not in without),
        results=tuple(range(count_results(call)) if results is None else results),
        sums=sums,
    )


def cut(
    call: OpCall,
    length: int,
    reads: Mapping[str, int],
    writes: Mapping[int, int],
    *,
    unread: Iterable[str] = (),
    results: Sequence[int] | None = None,
    sums: bool = False,
) -> SlicePass:
    """Describe a pass of one loop (see `make_loop` and `make_pass`)."""
    loop = make_loop(call, length, reads, writes)
    return make_pass(call, [loop], unread=unread, results=results, sums=sums)


def list_blocks(passes: Iterable[SlicePass], multiple: int) -> list[SlicePass]:
    """Return the same passes in slices that begin at multiples, where all loops have more than two of these."""
    return [
        dataclasses.replace(each, loops=tuple(dataclasses.replace(loop, multiple=multiple) for loop in each.loops))
        for each in passes
        if all(loop.length > 2 * multiple for loop in each.loops)
    ]


def find_broadcast(call: OpCall, name: str, dimension: int, length: int) -> dict[str, int]:
    """Return the dimension, counted from the last, along which an argument that may be broadcast is narrowed.

    Empty if the argument is not a tensor, or has one element or none along the dimension, so that it is read whole.
    """
    tensor = call[name]
    if tensor is None or -dimension > tensor.ndim or tensor.shape[dimension] != length:
        return {}
    return {name: dimension}

"""Bounds of slices: which elements of each tensor a slice covers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from elbowroom.ir.slicing import Bounds, Loop, SlicePass

Parts = int | Callable[[SlicePass], Sequence[int]]
"""Number of slices: the same for every loop, or a function that returns it for each loop of a pass."""


def count_parts(parts: Parts, slice_pass: SlicePass) -> tuple[int, ...]:
    """Return the number of slices of each loop of a pass."""
    if isinstance(parts, int):
        return (parts,) * len(slice_pass.loops)
    return tuple(parts(slice_pass))


def check_bounds(slice_pass: SlicePass, bounds: Bounds) -> None:
    """Check that a slice lies within the loops of a pass.

    Raises:
        ValueError: it does not, or it begins between two multiples.
    """
    if len(bounds) != len(slice_pass.loops):
        raise ValueError(f"a pass of {len(slice_pass.loops)} loops needs as many bounds, not {bounds}")
    for loop, (begin, end) in zip(slice_pass.loops, bounds, strict=True):
        if not 0 <= begin <= end <= loop.length:
            raise ValueError(f"a slice [{begin}, {end}) is not within a loop of {loop.length} elements")
        if begin % loop.multiple or (end % loop.multiple and end != loop.length):
            raise ValueError(f"a slice [{begin}, {end}) does not begin and end at multiples of {loop.multiple}")


def narrow(
    tensor: torch.Tensor, dimensions: Sequence[int | None], loops: Sequence[Loop], bounds: Bounds
) -> torch.Tensor:
    """Return the view of a tensor that a slice covers.

    Args:
        dimensions: for each loop, the dimension along which it narrows the tensor, or None.
    """
    for dimension, loop, (begin, end) in zip(dimensions, loops, bounds, strict=True):
        if dimension is not None:
            first, past = scale_range(tensor.shape[dimension], loop.length, begin, end)
            tensor = torch.ops.aten.slice.Tensor(tensor, dimension, first, past)  # a view, never a copy
    return tensor


def scale_range(size: int, length: int, begin: int, end: int) -> tuple[int, int]:
    """Return the elements of a dimension that a slice of a loop covers."""
    if not length:
        return 0, 0
    return begin * size // length, end * size // length


def narrow_read(tensor: torch.Tensor, index: int, slice_pass: SlicePass, bounds: Bounds) -> torch.Tensor:
    """Return the view of a tensor argument that a slice reads."""
    return narrow(tensor, [loop.reads[index] for loop in slice_pass.loops], slice_pass.loops, bounds)


def narrow_result(tensor: torch.Tensor, index: int, slice_pass: SlicePass, bounds: Bounds) -> torch.Tensor:
    """Return the view of a result that a slice writes."""
    return narrow(tensor, [loop.writes[index] for loop in slice_pass.loops], slice_pass.loops, bounds)


def is_summed(index: int, slice_pass: SlicePass) -> bool:
    """Tell whether a result is summed over the slices of the last loop."""
    return slice_pass.sums and slice_pass.loops[-1].writes[index] is None


def pack(view: torch.Tensor) -> torch.Tensor:
    """Return a copy without gaps in memory, its dimensions in the same order."""
    return view.clone(memory_format=torch.preserve_format)


def find_packed_strides(view: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a view's copy by `pack`, without an op on the view: its memory may be elsewhere."""
    return _pack_strides(tuple(view.shape), view.stride())


@functools.lru_cache(maxsize=4096)  # PyTorch computes on "meta" in Python, and each step has the same slices
def _pack_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    like = torch.empty_strided(shape, strides, device="meta")
    return torch.empty_like(like, memory_format=torch.preserve_format).stride()

"""Loop and SlicePass: how an op runs as a loop over slices of its tensors; OpCut: that it does, and in how many."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

Bounds = tuple[tuple[int, int], ...]
"""One slice of a pass: [begin, end) for each loop."""

BLOCK = 16
"""Least channels in a block of a weight's gradient, while that leaves several: kernels pad fewer to a vector."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A loop over slices along one dimension.

    A slice [begin, end) of the loop narrows a tensor whose size along its dimension is `size` to the elements
    [begin * size / length, end * size / length). Usually `size` equals `length`; a multiple of it occurs where the loop
    is over groups of channels or of attention heads.

    Attributes:
        length: elements along the loop's dimension.
        multiple: slices begin at multiples of it.
        reads: for each tensor argument of the op (as in `Op.reads`), the dimension along which a slice narrows it; None
            if each slice reads the whole tensor.
        writes: for each tensor result of the op (as in `Op.writes`), the dimension along which a slice narrows it; None
            if this loop does not narrow it.
    """

    length: int
    multiple: int
    reads: tuple[int | None, ...]
    writes: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SlicePass:
    """One pass over an op's tensors, which computes some of its results by nested loops over slices.

    A result that a loop does not narrow is the same for every slice of that loop, or is summed over the slices of the
    last loop if `sums` is true.

    Attributes:
        loops: outermost first. Without any, the pass computes its results at once.
        reads: indices of the tensor arguments whose elements the pass reads; it needs the others' shapes only.
        results: indices of the results that the pass computes.
        sums: results that the last loop does not narrow are summed over its slices, in order. The sum has the bits of
            gradient accumulation over the same parts, not those of the whole op.
        is_partial: a slice gives no results but small tensors from which they can be computed. The caller keeps those
            of all slices, and `combine_slices` returns the results.
    """

    loops: tuple[Loop, ...]
    reads: tuple[int, ...]
    results: tuple[int, ...]
    sums: bool = False
    is_partial: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class OpSlicing:
    """The ways in which one op of a trace can run in slices.

    Attributes:
        tick: of the op.
        alternatives: sequences of passes, each of which computes all results, best first.
        read_strides, write_strides: for each of `Op.reads` and `Op.writes`, in elements; () if unknown.
    """

    tick: int
    alternatives: tuple[tuple[SlicePass, ...], ...]
    read_strides: tuple[tuple[int, ...], ...]
    write_strides: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class OpCut:
    """Decision of a plan to run an op in slices.

    Attributes:
        tick: of the op.
        passes: one of its alternatives.
        parts: for each pass, the number of slices of each loop.
    """

    tick: int
    passes: tuple[SlicePass, ...]
    parts: tuple[tuple[int, ...], ...]


def iterate_slices(slice_pass: SlicePass, parts_per_loop: Sequence[int]) -> Iterator[Bounds]:
    """Yield the slices of a pass, the last loop innermost. Their sizes differ by at most one multiple.

    There are fewer than `parts_per_loop` if a loop is too short, and one empty slice if its length is 0.

    Raises:
        ValueError: the number of parts is not positive, or there is not one for each loop.
    """
    if len(parts_per_loop) != len(slice_pass.loops) or any(parts < 1 for parts in parts_per_loop):
        raise ValueError(f"{len(slice_pass.loops)} loops need as many positive numbers of parts, not {parts_per_loop}")
    return itertools.product(*map(_cut, slice_pass.loops, parts_per_loop))


def _cut(loop: Loop, parts: int) -> list[tuple[int, int]]:
    units = -(-loop.length // loop.multiple)
    parts = max(1, min(parts, units))
    edges = [min(units * index // parts * loop.multiple, loop.length) for index in range(parts + 1)]
    return list(itertools.pairwise(edges))


def count_parts(
    slice_pass: SlicePass, read_bytes: Sequence[int], result_bytes: Sequence[int], slice_bytes: int
) -> tuple[int, ...]:
    """Return the number of slices of each loop of a pass, so that the tensors of one take at most `slice_bytes`.

    Args:
        read_bytes, result_bytes: of the op's tensors, as in `Loop.reads` and `Loop.writes`.
    """
    loops = slice_pass.loops
    nbytes = [0] * len(loops)
    for index in slice_pass.reads:
        _add(nbytes, read_bytes[index], [loop.reads[index] for loop in loops])
    for index in slice_pass.results:
        _add(nbytes, result_bytes[index], [loop.writes[index] for loop in loops])
    counts = []
    for place, loop in enumerate(loops):
        wanted = max(2 if place == 0 else 1, math.ceil(len(loops) * nbytes[place] / slice_bytes))
        units = max(1, math.ceil(loop.length / loop.multiple))
        blocks = max(1, loop.length // max(BLOCK, loop.multiple)) if len(loops) > 1 else units
        counts.append(min(units, wanted if wanted > 4 * blocks else min(wanted, blocks)))
    return tuple(counts)


def _add(nbytes: list[int], tensor_bytes: int, dimensions: Sequence[int | None]) -> None:
    narrowed = [index for index, each in enumerate(dimensions) if each is not None]
    if narrowed:
        nbytes[narrowed[0]] += tensor_bytes


def count_whole_bytes(passes: Sequence[SlicePass], read_bytes: Sequence[int], result_bytes: Sequence[int]) -> int:
    """Return the most bytes that each slice of a pass reads or writes as a whole."""
    found = [0]
    for each in passes:
        whole = [read_bytes[index] for index in each.reads if all(loop.reads[index] is None for loop in each.loops)]
        whole += [
            result_bytes[index] for index in each.results if all(loop.writes[index] is None for loop in each.loops)
        ]
        found.append(sum(whole))
    return max(found)

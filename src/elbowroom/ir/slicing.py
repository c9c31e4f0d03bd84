"""Loop and SlicePass: how an op runs as a loop over slices of its tensors."""

from __future__ import annotations

import dataclasses


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

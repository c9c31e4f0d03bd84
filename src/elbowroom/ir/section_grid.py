"""SectionGrid: the sections into which slices of ops cut a storage."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from elbowroom.ir.slicing import Bounds, Loop
from elbowroom.ir.trace import View

ITEM_BYTES = {"64": 8, "32": 4, "16": 2, "128": 16, "int8": 1, "bool": 1, "8": 1}

Range = tuple[Fraction, Fraction]
"""Part of a storage along one axis, from 0 to 1."""


def count_item_bytes(dtype: str) -> int:
    """Return the bytes of one element."""
    return next((nbytes for ending, nbytes in ITEM_BYTES.items() if dtype.endswith(ending)), 1)


def count_view_bytes(view: View) -> int:
    """Return the bytes of all elements of a view."""
    return math.prod(view.shape) * count_item_bytes(view.dtype)


class SectionGrid:
    """Sections of one storage: cells of a grid of cuts along its axes.

    An axis is known by the bytes over which it extends (size times stride). A view has an axis of the storage if one of
    its dimensions extends over as many.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._edges: dict[int, set[Fraction]] = {}

    def add(self, extent: int, part: Range) -> None:
        """Cut an axis at both ends of a part, if the storage has such an axis."""
        if 0 < extent <= self.nbytes and self.nbytes % extent == 0:
            self._edges.setdefault(extent, {Fraction(0), Fraction(1)}).update(part)

    @functools.cached_property
    def _axes(self) -> list[tuple[int, list[Fraction]]]:
        return [(extent, sorted(self._edges[extent])) for extent in sorted(self._edges, reverse=True)]

    @property
    def is_whole(self) -> bool:
        """True if nothing cuts it."""
        return all(len(edges) <= 2 for _, edges in self._axes)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Bytes of each section."""
        widths = ([end - begin for begin, end in itertools.pairwise(edges)] for _, edges in self._axes)
        return [math.ceil(self.nbytes * math.prod(cell, start=Fraction(1))) for cell in itertools.product(*widths)]

    def find(self, parts: Mapping[int, Range]) -> list[int]:
        """Return the sections that a part of the storage overlaps, given by axis."""
        places = []
        for extent, edges in self._axes:
            begin, end = parts.get(extent, (Fraction(0), Fraction(1)))
            first = bisect.bisect_right(edges, begin) - 1
            places.append(range(max(first, 0), max(bisect.bisect_left(edges, end), first + 1)))
        counts = [len(edges) - 1 for _, edges in self._axes]
        found = []
        for place in itertools.product(*places):
            index = 0
            for each, count in zip(place, counts, strict=True):
                index = index * count + each
            found.append(index)
        return found


def find_parts(
    view: View, strides: Sequence[int], dimensions: Sequence[int | None], loops: Sequence[Loop], bounds: Bounds
) -> dict[int, Range]:
    """Return the part of a storage that a slice covers, by axis."""
    found = {}
    for dimension, loop, (begin, end) in zip(dimensions, loops, bounds, strict=True):
        if dimension is not None and dimension < len(strides) and loop.length:
            extent = view.shape[dimension] * strides[dimension] * count_item_bytes(view.dtype)
            found[extent] = (Fraction(begin, loop.length), Fraction(end, loop.length))
    return found

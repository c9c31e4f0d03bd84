"""SliceSizes: how large the slices of one op are; keys by which ops are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elbowroom.ir.slicing import SlicePass
from elbowroom.ops.replayable import iterate_tensors
from elbowroom.runtime.slice_choice import Cut
from elbowroom.slicing.op_call import OpCall

GROWTH = 8
"""Slices may be as many times larger if smaller ones are not exact: kernels choose other ways for few rows."""


class SliceSizes:
    """Sizes of slices to try: those of the last time, and smaller ones if there is no room.

    If there is no room for any, the same goes for the cuts that are left without those that were refused: they may have
    to read an argument as a whole that others read in slices.

    Attributes:
        slice_bytes: at most so many are to be in a slice.
        excluded: passes of cuts that were refused in every size.
        halvings: how many times the slices of a pass were halved in addition, where another pass had room.
        running: pass that runs; None if none has begun.
        cut: with which the op has run; None if it has not, or if there was no room for it since.
        overlaps: whether a slice is computed while the next is read and the last written.
    """

    def __init__(self, slice_bytes: int) -> None:
        self._first_bytes = self.slice_bytes = slice_bytes
        self._may_grow = True
        self._refused = set[tuple[SlicePass, ...]]()
        self.excluded = set[tuple[SlicePass, ...]]()
        self.halvings: dict[SlicePass, int] = {}
        self.running: SlicePass | None = None
        self.cut: Cut | None = None
        self.overlaps = True

    def list_all(self) -> list[int]:
        """Return sizes in the order in which they are tried if slices are not exact: larger ones, then smaller ones.

        Smaller ones lie closer together, since exactness may end between two of them.
        """
        sizes = [self.slice_bytes]
        while self._may_grow and 2 * sizes[-1] <= GROWTH * self._first_bytes:
            sizes.append(2 * sizes[-1])
        steps = range(1, 2 * self.slice_bytes.bit_length() - 1)
        return [*sizes, *(int(self.slice_bytes / 2 ** (step / 2)) for step in steps)]

    def begin_again(self, cut: Cut) -> None:
        """Begin with the cut that has run."""
        self.cut = cut
        self.running = None
        self._may_grow = True
        self._refused.clear()

    def go_on(self, cut: Cut) -> bool:
        """Choose the next size after a cut for which there was no room. Return False if there is none."""
        self.cut = None
        refused, self.running = self.running, None
        self._refused.add(cut.passes)
        if cut.is_larger:
            if self.overlaps:
                self.overlaps = False
                return True
            self._may_grow, self.overlaps = False, True
            return True
        self._may_grow = False
        if refused is not None and len(cut.passes) > 1:
            if not cut.is_finest(refused):
                self.halvings[refused] = self.halvings.get(refused, 0) + 1
                return True
        elif self.slice_bytes > 1 and not all(map(cut.is_finest, cut.passes)):
            self.slice_bytes //= 2
            return True
        if self.overlaps:
            self.overlaps = False
            return True
        return self.exclude()

    def exclude(self) -> bool:
        """Go on without the cuts that were refused. Return False if none was."""
        if not self._refused:
            return False
        self.excluded |= self._refused
        self._refused.clear()
        self.slice_bytes = self._first_bytes
        self._may_grow = self.overlaps = True
        self.halvings.clear()
        return True


def find_call_key(call: OpCall) -> tuple[Any, ...]:
    """Return the key of a call, whose tensors are those that `SlicedOps.wants` is given."""
    args, kwargs = call.order(call.values)
    return find_key(str(call.op), list(iterate_tensors((*args, *kwargs.values()))))


def find_key(name: str, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return the key of an op by its name, and the shapes and dtypes of its tensor arguments; bytes come second."""
    return (name, sum(each.nbytes for each in tensors), *((tuple(each.shape), each.dtype) for each in tensors))

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
    """Sizes of slices to try: those of the last time; larger ones while none is exact; and then smaller ones.

    If there is no room for any, the same goes for the cuts that are left without those that were refused: they may have
    to read an argument as a whole that others read in slices.

    Attributes:
        slice_bytes: at most so many are to be in a slice.
        excluded: passes of cuts that were refused in every size.
        are_known: whether the op has run in slices of this size.
        overlaps: whether a slice is computed while the next is read and the last written.
    """

    def __init__(self, slice_bytes: int) -> None:
        self._first_bytes = self.slice_bytes = slice_bytes
        self._may_grow = True
        self._refused = set[tuple[SlicePass, ...]]()
        self.excluded = set[tuple[SlicePass, ...]]()
        self.are_known = False
        self.overlaps = True

    def begin_again(self) -> None:
        """Begin with the size that was found."""
        self._may_grow = True
        self._refused.clear()
        self.are_known = True

    def go_on(self, cut: Cut, *, was_refused: bool) -> bool:
        """Choose the next size. Return False if there is none.

        Args:
            cut: with the present size.
            was_refused: whether there was no room for it; otherwise it is not exact.
        """
        if was_refused:
            self._refused.add(cut.passes)
        return self._change_size(cut, was_refused=was_refused) or self._exclude()

    def _exclude(self) -> bool:
        """Go on without the cuts that were refused. Return False if none was."""
        if not self._refused:
            return False
        self.excluded |= self._refused
        self._refused.clear()
        self.slice_bytes = self._first_bytes
        self._may_grow = self.overlaps = True
        return True

    def _change_size(self, cut: Cut, *, was_refused: bool) -> bool:
        if not was_refused and self._may_grow and self.slice_bytes < GROWTH * self._first_bytes:
            self.slice_bytes *= 2
            return True
        if was_refused and self.overlaps and self.slice_bytes > self._first_bytes:
            self.overlaps = False  # smaller ones are not exact
            return True
        if self._may_grow:
            self._may_grow = False
            self.overlaps = True
            self.slice_bytes = min(self.slice_bytes, self._first_bytes)
            if not was_refused:
                self.slice_bytes //= 2
                return True
        if not cut.is_finest:
            self.slice_bytes //= 2
            return self.slice_bytes > 0
        if was_refused and self.overlaps:
            self.overlaps = False
            return True
        return False


def find_call_key(call: OpCall) -> tuple[Any, ...]:
    """Return the key of a call, whose tensors are those that `SlicedOps.wants` is given."""
    args, kwargs = call.order(call.values)
    return find_key(str(call.op), list(iterate_tensors((*args, *kwargs.values()))))


def find_key(name: str, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return the key of an op by its name, and the shapes and dtypes of its tensor arguments; bytes come second."""
    return (name, sum(each.nbytes for each in tensors), *((tuple(each.shape), each.dtype) for each in tensors))

"""One pass of an op over slices: read, compute, write."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from elbowroom.errors import NO_ROOM, InternalError, TransferFailed
from elbowroom.ir.slicing import Bounds, SlicePass, iterate_slices
from elbowroom.runtime.copies import Copy
from elbowroom.runtime.sections import Section, Sections
from elbowroom.slicing.bounds import is_summed, narrow_read, narrow_result, pack
from elbowroom.slicing.calls import combine_slices, run_slice
from elbowroom.slicing.op_call import OpCall, find_targets

PageOut = Callable[[], bool]
"""Moves out large arguments. Returns whether more of them are away than before."""

PARTLY_WRITTEN = "{op} had begun to write, so what it updates is partly written: go on from a checkpoint"
"""Note on an error."""


@dataclasses.dataclass(slots=True)
class Results:
    """Results of an op, on the device or away.

    Attributes:
        tensors: in order.
        are_new: whether the op makes them; otherwise it is an in-place op.
        is_changed: whether an in-place op has begun to write where its argument is, so that it cannot begin again.
        rewritten: the copies that an in-place op writes to in place of its arguments', by the index of the result.
            Without one, it writes where the argument is.
    """

    tensors: list[torch.Tensor]
    rewritten: dict[int, Copy] = dataclasses.field(default_factory=dict)
    are_new: bool = True
    is_changed: bool = False
    is_finished: bool = False

    @classmethod
    def begin_rewriting(cls, sections: Sections, tensors: list[torch.Tensor]) -> Results:
        """Return arguments as results of an in-place op, with empty copies for those that are away."""
        results = cls(tensors, are_new=False)
        try:
            for index, tensor in enumerate(tensors):
                is_away = sections.find_away(tensor) is not None
                if is_away and (copy := sections.begin_rewriting(tensor)) is not None:
                    results.rewritten[index] = copy
        except BaseException:
            results.drop(sections)
            raise
        return results

    def finish(self, sections: Sections) -> None:
        """Put the copies that were written in the place of the former ones."""
        self.is_finished = True
        self._end_rewriting(sections, are_whole=True)

    def drop(self, sections: Sections) -> None:
        """Give up what was written, unless it is finished."""
        if self.is_finished:
            return
        if self.are_new:
            sections.forget(self.tensors)
        self._end_rewriting(sections, are_whole=False)

    def _end_rewriting(self, sections: Sections, *, are_whole: bool) -> None:
        pairs = [(self.tensors[index], copy) for index, copy in self.rewritten.items()]
        self.rewritten = {}
        sections.end_rewriting(pairs, are_whole=are_whole)


def run_pass(
    sections: Sections,
    call: OpCall,
    slice_pass: SlicePass,
    parts: Sequence[int],
    results: Results,
    page_out: PageOut,
    *,
    overlaps: bool,
    may_halve: bool,
) -> None:
    """Compute one pass of an op.

    Args:
        overlaps: whether a slice is computed while the next is read and the last written.
        may_halve: whether an in-place op that has begun may go on in smaller slices: each element is computed by
            itself, but not always in the same way (`slicing/vector_ends.py`).

    Raises:
        Infeasible, MemoryRefused: there is no room for a slice.
    """
    running = _Pass(sections, call, slice_pass, results, may_halve=may_halve)
    try:
        running.run(parts, page_out if find_targets(call) else None, overlaps=overlaps)
    finally:
        running.settle()


def finish(sections: Sequence[Section]) -> None:
    """Make later compute wait for the transfers of sections.

    Raises:
        TransferFailed: one of them failed; the others are over.
    """
    first: TransferFailed | None = None
    for section in sections:
        try:
            section.finish()
        except TransferFailed as error:
            first = first or error
    try:
        if first is not None:
            raise first
    finally:
        del first  # its frames include this one


class _Pass:
    def __init__(
        self, sections: Sections, call: OpCall, slice_pass: SlicePass, results: Results, *, may_halve: bool
    ) -> None:
        self._may_halve = may_halve
        self._sections = sections
        self._call = call
        self._args, self._kwargs = call.order(call.values)
        self._pass = slice_pass
        self._results = results
        self._targets = find_targets(call)
        self._last: dict[int, tuple[Bounds, torch.Tensor]] = {}
        self._reading: list[torch.Tensor | Section] = []
        self._ahead: Bounds | None = None  # the slice that is being read
        self._writing: list[Section] = []
        self._partial: list[tuple[torch.Tensor, ...]] = []

    def run(self, parts: Sequence[int], page_out: PageOut | None, *, overlaps: bool) -> None:
        """Compute the slices, and read each one ahead.

        Args:
            page_out: called if a slice of an in-place op has no room, which is halved if that does not help.
        """
        slices = list(iterate_slices(self._pass, parts))
        for index, bounds in enumerate(slices):
            following = slices[index + 1] if overlaps and index + 1 < len(slices) else None
            if page_out is None:
                self._compute(bounds, following)
                if not overlaps:
                    self.settle()
            else:
                self._compute_in_halves(bounds, page_out)
        if self._pass.is_partial:
            found = combine_slices(self._call.op, self._args, self._kwargs, self._partial)
            self._store(tuple((0, loop.length) for loop in self._pass.loops), found)

    def settle(self) -> None:
        """Finish all transfers, and drop what was read ahead."""
        reading = [each for each in self._reading if isinstance(each, Section)]
        self._reading, self._ahead = [], None
        self._last.clear()
        writing, self._writing = self._writing, []
        finish([*reading, *writing])

    def _compute(self, bounds: Bounds, following: Bounds | None) -> None:
        reading = self._reading if self._ahead == bounds else self._fetch(bounds)
        reads = self._arrive(reading, bounds)
        self._reading, self._ahead = [], None
        if following is not None:
            self._reading, self._ahead = self._fetch(following), following
        found = run_slice(self._call.op, self._args, self._kwargs, self._pass, bounds, reads)
        if self._pass.is_partial:
            self._partial.append(found)
        else:
            self._store(bounds, found)

    def _compute_in_halves(self, bounds: Bounds, page_out: PageOut) -> None:
        refusal = None
        try:
            self._compute(bounds, None)
        except NO_ROOM as error:
            refusal = error.with_traceback(None)  # its frames hold the slice's tensors
        if refusal is None:
            return
        self.settle()
        if page_out():
            self._compute_in_halves(bounds, page_out)
            return
        halves = self._halve(bounds) if self._may_halve else []
        if not halves:
            try:
                raise refusal
            finally:
                del refusal  # its frames include this one
        for half in halves:
            self._compute_in_halves(half, page_out)

    def _halve(self, bounds: Bounds) -> list[Bounds]:
        """Return two slices in place of one, along the loop with the most units left; none if they are single ones."""
        units = [
            -(-(end - begin) // loop.multiple) for loop, (begin, end) in zip(self._pass.loops, bounds, strict=True)
        ]
        if not units or max(units) < 2:
            return []
        place = units.index(max(units))
        begin, end = bounds[place]
        middle = begin + units[place] // 2 * self._pass.loops[place].multiple
        return [(*bounds[:place], half, *bounds[place + 1 :]) for half in ((begin, middle), (middle, end))]

    def _fetch(self, bounds: Bounds) -> list[torch.Tensor | Section]:
        """Begin to read what a slice reads."""
        found: list[torch.Tensor | Section] = []
        for index in self._pass.reads:
            last = self._last.get(index)
            if last is not None and last[0] == self._find_key(index, bounds):
                found.append(last[1])
                continue
            found.append(self._begin_read(narrow_read(self._call.reads[index], index, self._pass, bounds), index))
        return found

    def _begin_read(self, view: torch.Tensor, index: int) -> torch.Tensor | Section:
        """Begin to read a view. What a loop narrows is aligned and has no gaps; the rest is as the whole op reads it.

        That is how slices are probed (`slicing.calls.run_pass`): kernels choose the order of their sums by it.
        """
        is_written = index in self._targets
        is_whole = not is_written and all(loop.reads[index] is None for loop in self._pass.loops)
        is_packed = self._sections.is_packed(view)
        if is_whole and not is_packed:
            return view  # the slice's op brings it back
        section = None if self._sections.find_away(view) is None else self._sections.read(view)
        if section is not None:
            return section
        return view if is_packed and not is_written else pack(view)

    def _arrive(self, reading: Sequence[torch.Tensor | Section], bounds: Bounds) -> list[torch.Tensor]:
        """Return what a slice reads, once it is there."""
        finish([each for each in reading if isinstance(each, Section)])
        tensors = [each.tensor if isinstance(each, Section) else each for each in reading]
        if len(self._pass.loops) > 1:
            for index, tensor in zip(self._pass.reads, tensors, strict=True):
                self._last[index] = self._find_key(index, bounds), tensor
        return tensors

    def _find_key(self, index: int, bounds: Bounds) -> Bounds:
        """Return the bounds that tell what a slice reads of a tensor."""
        pairs = zip(self._pass.loops, bounds, strict=True)
        return tuple(each for loop, each in pairs if loop.reads[index] is not None)

    def _store(self, bounds: Bounds, found: Sequence[torch.Tensor]) -> None:
        """Store a slice's results, and wait for those of the slice before."""
        self._results.is_changed = len(self._results.rewritten) < len(self._targets)
        writing = []
        for index, tensor in zip(self._pass.results, found, strict=True):
            view = narrow_result(self._results.tensors[index], index, self._pass, bounds)
            if tensor.dtype != view.dtype:
                raise InternalError(f"{self._call.op} returns {tensor.dtype} where {view.dtype} was expected")
            if self._sections.find_away(view) is not None:
                section = self._sections.write(view, tensor, self._results.rewritten.get(index))
                assert section is not None
                writing.append(section)
            elif is_summed(index, self._pass) and bounds[-1][0] > 0:
                view.add_(tensor)
            else:
                view.copy_(tensor)
        former, self._writing = self._writing, writing
        finish(former)

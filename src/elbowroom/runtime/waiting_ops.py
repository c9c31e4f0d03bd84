"""Ops in slices that wait for the next one, to run together with it (`runtime/stretch.py`).

An op may wait if its results are away: until they are used, nobody can tell that they were not computed. What comes
next on the memory that it reads and writes has it run first, unless that joins it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from elbowroom.errors import NO_ROOM, DeviceFull, TierError
from elbowroom.hooks.exposed_memory import is_address_known, is_shared
from elbowroom.ir.slicing import SlicePass, iterate_slices
from elbowroom.native import library
from elbowroom.runtime.error_frames import clear_frames
from elbowroom.runtime.sections import Sections
from elbowroom.runtime.slice_choice import Cut, SliceChooser
from elbowroom.runtime.stretch import Reads, SlicedStretch, StretchOp
from elbowroom.slicing.op_call import OpCall, find_targets, is_over_lists
from elbowroom.slicing.registry import find_passes

SHARE = 0.75
"""Slices of all ops that run together take at most this share of the budget. If that is too much, they run one by
one."""


def may_join(call: OpCall) -> bool:
    """Tell whether an op may run together with others.

    Not if it is random, updates statistics, or takes lists. Nor if it reads memory that is not aligned: what it shares
    with others is.
    """
    if call.statistics or call.misalignments or is_over_lists(call.op):
        return False
    return torch.Tag.nondeterministic_seeded not in call.op.tags


class WaitingOps:
    """Ops of one room that wait.

    Args:
        sections: reads and writes parts of storages.
        chooser: knows which slices are exact.
    """

    def __init__(self, sections: Sections, chooser: SliceChooser) -> None:
        self._sections = sections
        self._chooser = chooser
        self._native = library.load()
        self._stretch: SlicedStretch | None = None
        self._stream: torch.cuda.Stream | None = None  # on which they run
        self._settings: Any = None  # with which they run
        self._has_begun = False  # to run, and has failed
        self._is_running = False  # an access to memory in the middle of it does not begin anew
        self._budget_bytes = 0
        self._apart: set[tuple[object, ...]] = set()  # ops that cannot run together, by `_find_key`

    def __bool__(self) -> bool:
        return self._stretch is not None

    def list_read(self) -> list[torch.Tensor]:
        """Return the arguments of the ops that wait."""
        return [] if self._stretch is None else self._stretch.list_read()

    def limit(self, budget_bytes: int) -> None:
        """Set the budget of the steps that follow."""
        if budget_bytes != self._budget_bytes:
            self._apart.clear()
        self._budget_bytes = budget_bytes

    def may_wait(self, call: OpCall) -> bool:
        """Tell whether an op may run later.

        Not if it would raise an error for what its arguments hold (indices, unless they come from the forward pass,
        which has checked them), or if others may write to these unnoticed.
        """
        has_indices = any(not each.is_floating_point() and each.dtype is not torch.bool for each in call.reads)
        if not may_join(call) or (has_indices and "backward" not in str(call.op)):
            return False
        return not any(map(self._may_change, call.reads))

    def _may_change(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return is_shared(storage) or is_address_known(storage) or self._sections.is_in_use(tensor)

    def begin(
        self, call: OpCall, cut: Cut, make_results: Callable[[], list[torch.Tensor]]
    ) -> list[torch.Tensor] | None:
        """Have an op wait. Return its results; None if it may not.

        Args:
            make_results: makes results that are away and not written yet.
        """
        (slice_pass,) = cut.passes
        if find_targets(call) or not _is_simple(slice_pass) or slice_pass.is_partial:
            return None
        if not self.may_wait(call):
            return None
        stretch = SlicedStretch(self._sections, len(list(iterate_slices(slice_pass, cut.parts[slice_pass]))))
        reads = stretch.find_reads(call, slice_pass)
        if reads is None:
            return None
        results = make_results()
        stretch.add(call, slice_pass, reads, results)
        self._stretch = stretch
        self._stream = _find_stream(call)
        self._settings = self._native.read_settings()
        self._note()
        return results

    def join(
        self, call: OpCall, described: Sequence[torch.Tensor], count: int
    ) -> tuple[Cut, SlicedStretch, Reads] | None:
        """Return how an op can run together with those that wait, which may have to be cut in another way; None if not.

        Args:
            described: results of the op, as they will be.
            count: number of slices in which it would run by itself.

        Returns:
            How the op is cut, a stretch of the ops that wait for `add`, and what the op reads.
        """
        stretch = self._stretch
        if stretch is None or not may_join(call) or _find_stream(call) != self._stream:
            return None
        if self._sections.lost_waiting:
            return None
        if self._native.read_settings() != self._settings:
            return None
        key = self._find_key(call)
        if key in self._apart:
            return None
        for each in sorted({stretch.count, max(count, stretch.count)}):
            for found in self._list_stretches(stretch.ops, each):
                for slice_pass in _list_passes(call):
                    reads = found.find_reads(call, slice_pass)
                    if reads is None or found.count_bytes(slice_pass, reads, described) > SHARE * self._budget_bytes:
                        continue
                    if (exactness := self._chooser.judge(call, slice_pass, each, self._budget_bytes)) is not None:
                        return Cut((slice_pass,), {slice_pass: (each,)}, exactness), found, reads
        self._apart.add(key)
        return None

    def add(self, call: OpCall, choice: tuple[Cut, SlicedStretch, Reads], results: Sequence[torch.Tensor]) -> None:
        """Add an op to those that wait."""
        cut, stretch, reads = choice
        stretch.add(call, cut.passes[0], reads, results)
        self._stretch = stretch
        self._note()

    def _list_stretches(self, ops: Sequence[StretchOp], count: int) -> Iterator[SlicedStretch]:
        """Yield stretches of ops in so many slices, by all passes that go together and are allowed."""
        if not ops:
            yield SlicedStretch(self._sections, count)
            return
        *former, last = ops
        for stretch in self._list_stretches(former, count):
            for slice_pass in dict.fromkeys((last.slice_pass, *_list_passes(last.call))):
                reads = None if slice_pass.is_partial else stretch.find_reads(last.call, slice_pass)
                if reads is None or self._chooser.judge(last.call, slice_pass, count, self._budget_bytes) is None:
                    continue
                found = SlicedStretch(self._sections, count, stretch.ops)
                found.add(last.call, slice_pass, reads, last.results)
                yield found

    def run(self) -> Exception | None:
        """Run what waits together. If there is no room, return the error; all of it waits on then.

        Raises:
            TierError: a section could not be read or written. All of it waits on; for ever, if an op of another thread
                has written to what it reads meanwhile, as that cannot be stopped.
        """
        refusals: list[Exception | None] = []
        if self._stretch is not None and not self._is_running:
            with self._as_before():
                self._native.run_waiting(lambda: refusals.append(self._run()), self._settings)
        return refusals[0] if refusals else None

    def _run(self) -> Exception | None:
        stretch = self._stretch
        assert stretch is not None
        if not stretch.find_needed():
            self._sections.forget(stretch.list_made())
            self.clear()
            return None
        if why := self._sections.lost_waiting:
            ops = ", ".join(str(op.call.op) for op in stretch.ops)
            raise TierError(
                f"the results of {ops} are lost: they were to be computed before an op of another thread overwrote the "
                f"arguments, which failed: {why}. Delete what refers to these results, and run the step again."
            )
        refusal: Exception
        self._begin_again()
        try:
            stretch.run()
        except (*NO_ROOM, DeviceFull, torch.OutOfMemoryError) as error:
            refusal = error
        else:
            self.clear()
            return None
        clear_frames(refusal)
        self._apart.add(self._find_key())
        return refusal.with_traceback(None)

    def run_each(self, run: Callable[[StretchOp], None]) -> None:
        """Run what waits one by one. If that fails, the rest waits on."""
        while self._stretch is not None:
            with self._as_before():
                self._native.run_waiting(lambda: self._run_first(run), self._settings)

    def _run_first(self, run: Callable[[StretchOp], None]) -> None:
        assert self._stretch is not None
        op = self._stretch.ops[0]
        self._begin_again()
        run(op)
        self.drop(op)

    def drop(self, op: StretchOp) -> None:
        """Forget an op that has run, or is not to run."""
        assert self._stretch is not None
        self._stretch.ops.remove(op)
        if self._stretch.ops:
            self._note()
        else:
            self.clear()

    def drop_last(self) -> None:
        """Forget the op that was added last."""
        assert self._stretch is not None
        self.drop(self._stretch.ops[-1])

    def clear(self) -> None:
        """Forget all of it."""
        self._stretch = None
        self._has_begun = False
        self._sections.note_waiting([], [])

    def _begin_again(self) -> None:
        """Forget what was written before an error, if there was one."""
        assert self._stretch is not None
        if self._has_begun:
            made = [each for op in self._stretch.ops if not find_targets(op.call) for each in op.results]
            self._sections.begin_again(made)
        self._has_begun = True

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        """Return a context in which ops run on the stream, and without the modes, of those that wait."""
        modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()
        stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        self._is_running = True
        try:
            with modes, stream:
                yield
        finally:
            self._is_running = False

    def _note(self) -> None:
        assert self._stretch is not None
        self._sections.note_waiting(self._stretch.list_read(), self._stretch.list_made())

    def _find_key(self, *following: OpCall) -> tuple[object, ...]:
        calls = [op.call for op in self._stretch.ops] if self._stretch is not None else []
        return tuple((str(each.op), *(tuple(tensor.shape) for tensor in each.reads)) for each in (*calls, *following))


def _find_stream(call: OpCall) -> torch.cuda.Stream | None:
    device = call.reads[0].device
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _list_passes(call: OpCall) -> list[SlicePass]:
    """Return the passes that compute all results in one simple loop."""
    alternatives = find_passes(call.op, *call.order(call.values), with_partial=True)
    return [each[0] for each in alternatives if len(each) == 1 and _is_simple(each[0])]


def _is_simple(slice_pass: SlicePass) -> bool:
    return len(slice_pass.loops) == 1 and not slice_pass.sums

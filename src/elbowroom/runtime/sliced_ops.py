"""Runs an op in slices if it has no room as a whole.

Arguments and results that are too large stay in the tier below; each slice is read, computed and written back:

    read      |1|2|3|4|
    compute     |1|2|3|4|
    write         |1|2|3|4|

If a slice has no room, the op's large arguments are moved out, and it begins again in slices of half the size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elbowroom.errors import NO_ROOM, DeviceFull, Infeasible, MemoryRefused, TierError, find_nearer
from elbowroom.hooks.ledger import Ledger
from elbowroom.native import library
from elbowroom.ops.replayable import iterate_tensors
from elbowroom.runtime.error_frames import clear_frames
from elbowroom.runtime.large_tensors import LargeTensors
from elbowroom.runtime.observer import OpRecorder
from elbowroom.runtime.slice_choice import Cut, SliceChooser, explain
from elbowroom.runtime.slice_figures import SliceFigures
from elbowroom.runtime.slice_pass import PARTLY_WRITTEN, Results, run_pass
from elbowroom.runtime.slice_sizes import SliceSizes, find_call_key, find_key
from elbowroom.runtime.state_pager import StatePager
from elbowroom.runtime.stretch import StretchOp
from elbowroom.runtime.waiting_ops import WaitingOps
from elbowroom.slicing.bounds import is_summed
from elbowroom.slicing.calls import make_results
from elbowroom.slicing.exactness_store import Exactness
from elbowroom.slicing.op_call import OpCall, bind, count_writes, find_targets
from elbowroom.slicing.registry import is_plain, list_rules
from elbowroom.slicing.vector_ends import find_telling

logger = logging.getLogger(__name__)

SLICE = 8
"""Tensors of one slice take at most this share of the budget, at first."""

NEVER = 1 << 60


class SlicedOps(TorchDispatchMode):
    """Runs ops of one room in slices.

    Args:
        pager: moves storages, and parts of them.
        ledger: frees memory after a device's allocator has refused a request.
        is_exact: whether only cuts are allowed that give the bits of the whole op.
        folder: of temporary files for probes. None for the system's.
        figures: of the ops that run in slices.

    Attributes:
        figures: as given.
        has_run: whether any ran in the current or last step.
    """

    def __init__(
        self,
        pager: StatePager,
        ledger: Ledger,
        is_exact: bool,
        folder: str | None,
        figures: SliceFigures,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pager = pager
        self._ledger = ledger
        self._was_refused = False  # the op that is about to run
        self._sections = pager.sections
        self._large = LargeTensors(pager)
        self._is_exact = is_exact
        self._chooser = SliceChooser(is_exact=is_exact, folder=folder)
        self._waiting = WaitingOps(pager.sections, self._chooser)
        pager.storages.unwritten.have_written(self.run_waiting)
        self._refusals: dict[tuple[Any, ...], Infeasible | MemoryRefused] = {}
        self._sizes: dict[tuple[Any, ...], SliceSizes] = {}  # by op and shapes: those that have no room as a whole
        self._lock: Any = contextlib.nullcontext()
        self._budget_bytes = 0
        self._recorder: OpRecorder | None = None
        self.figures = figures
        self.has_run = False

    def begin_step(
        self, budget_bytes: int, watcher: Any, table: Any, lock: Any, recorder: OpRecorder | None, *, has_plan: bool
    ) -> None:
        """Begin a step, whose watcher has ops run in slices from now on.

        Args:
            table: of the step's storages.
            lock: of the step, which making room takes. It is held while an op runs.
            recorder: is told of these ops; None if the step is not traced.
            has_plan: whether the step follows a plan, in which ops run as a whole.
        """
        if budget_bytes != self._budget_bytes or has_plan:
            self._sizes.clear()  # the step's ops have room as a whole, or show that they do not
        self._budget_bytes = budget_bytes
        self.has_run = False
        self._waiting.limit(budget_bytes)
        self._recorder = recorder
        self._large.begin_step(budget_bytes, table)
        self._lock = lock
        watcher.set_slicer(self, min((key[1] for key in self._sizes), default=NEVER))

    def stop_recording(self) -> None:
        """Let go of the recorder, which holds the modules of its step."""
        self._recorder = None

    def wants(self, name: str, tensors: Sequence[torch.Tensor], refusal: object) -> bool:
        """Tell whether an op is to run in slices.

        Args:
            name: of the overload.
            tensors: among its arguments.
            refusal: the error with which it failed as a whole; None if it has not run yet.
        """
        if name not in list_rules() or not all(map(is_plain, tensors)):
            return False
        key = find_key(name, tensors)
        if refusal is None:
            return (sizes := self._sizes.get(key)) is not None and sizes.cut is not None
        if not isinstance(refusal, NO_ROOM):
            return False
        self._was_refused = True
        refusal.__context__ = refusal.__cause__ = None  # their frames hold tensors, as its own do
        self._refusals[key] = refusal.with_traceback(None)
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def call() -> Any:
            return self._run(bind(func, args, kwargs or {}))

        if self._recorder is None:
            return call()
        tensors = list(iterate_tensors((*args, *(kwargs or {}).values())))
        whole_bytes = library.load().find_growth(str(func), tensors)
        return self._recorder.record_op(func, args, kwargs or {}, call, whole_bytes)

    def _run(self, call: OpCall) -> Any:
        former = len(self._ledger.refusals) - self._was_refused
        self._was_refused = False
        key = find_call_key(call)
        if (view := list_rules()[str(call.op)].view) is not None:
            call = view(call)
        misalignments = tuple(map(self._sections.find_misalignment, call.reads))
        if any(misalignments):
            call = dataclasses.replace(call, misalignments=misalignments)
        described = make_results(call.op, *call.order(call.values))
        statistics = {each: call[each].clone() for each in call.statistics}  # an op that begins again updates them anew
        with self._lock, self._sections.slicing, _restoring(call, statistics) as restore:
            found = self._join(call, described, key)
            if found is None:
                self.run_waiting()
                found = self._run_alone(call, described, key, restore)
        del self._ledger.refusals[former:]  # the program gets no error
        count_writes(call)
        return call.assemble(found)

    def _run_alone(
        self,
        call: OpCall,
        described: Sequence[torch.Tensor],
        key: tuple[Any, ...],
        restore: Callable[[], None],
        given: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Run an op in slices, or have it wait for the next one if its slices are known to fit.

        Args:
            restore: called before it begins again.
            given: tensors for its results, if they exist already. It does not wait then.
        """
        sizes = self._sizes.get(key) or self._make_sizes()
        targets = [call.reads[index] for index in find_targets(call)]
        self._large.page_out(targets)  # so that an error leaves what they hold
        page_out = self._large.watch([*call.reads, *self._waiting.list_read()])
        refusal: Infeasible | MemoryRefused | None = None
        found: list[torch.Tensor] | Infeasible | MemoryRefused | None = None
        while True:
            while (cut := self._choose(call, described, sizes, [sizes.slice_bytes])) is None and page_out():
                pass  # a probe may have had no room
            cut = cut or self._choose(call, described, sizes, sizes.list_all())
            if cut is None:
                if sizes.exclude():
                    continue
                if not self._large.include_next([*call.reads, *described]):
                    break
                sizes = self._make_sizes()
                continue
            if given is None and sizes.cut is not None and sizes.overlaps:
                waiting = self._have_wait(call, cut, described)
                if waiting is not None:
                    return waiting
            found = self._try(call, cut, described, given, sizes)
            if isinstance(found, list):
                self._sizes[key] = sizes
                sizes.begin_again(cut)
                if given is None:  # else it was noted when it began to wait
                    self._note(str(call.op), cut)
                return found
            refusal = find_nearer(refusal, found)
            if not page_out() and not sizes.go_on(cut):
                if not self._large.include_next([*call.reads, *described]):
                    break
                sizes = self._make_sizes()
            restore()
        explained = self._explain(key, call)
        if isinstance(refusal, Infeasible):
            refusal.op = str(call.op)  # not the request in the middle of a slice
            refusal.add(f"{call.op} runs in slices, and the smallest that may be used have no room.")
        try:
            raise refusal or explained
        finally:
            del refusal, explained, found  # the error's frames include this one

    def _make_sizes(self) -> SliceSizes:
        return SliceSizes(max(1, self._budget_bytes // SLICE))

    @property
    def has_waiting(self) -> bool:
        """True while ops wait, to run together with the next one."""
        return bool(self._waiting)

    def run_waiting(self) -> None:
        """Run the ops that wait. Called before what has to come after them, in any thread, and at the end of the step.

        Raises:
            Infeasible, MemoryRefused, TierError: they wait on.
        """
        with self._lock, self._sections.slicing:
            if self._waiting.run() is not None:
                self._waiting.run_each(self._run_waiting)

    def _run_waiting(self, op: StretchOp) -> None:
        described = make_results(op.call.op, *op.call.order(op.call.values))
        self._run_alone(op.call, described, find_call_key(op.call), lambda: None, op.results)

    def _have_wait(self, call: OpCall, cut: Cut, described: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Have an op wait, if that is possible. Return its results."""
        if self._recorder is not None or len(cut.passes) > 1 or not all(map(self._large.is_large, described)):
            return None
        found = self._waiting.begin(call, cut, lambda: self._make_results(call, cut, described).tensors)
        if found is not None:
            self._note(str(call.op), cut)
        return found

    def _join(self, call: OpCall, described: Sequence[torch.Tensor], key: tuple[Any, ...]) -> list[torch.Tensor] | None:
        """Run an op together with those that wait, or have it wait with them. Return its results; None if it cannot."""
        if not self._waiting or self._recorder is not None:
            return None
        sizes = self._sizes.get(key)
        count, choice = 1, None
        if sizes is not None and sizes.cut is not None:
            alone = self._choose(call, described, sizes, [sizes.slice_bytes])
            count = 1 if alone is None else max(alone.parts[alone.passes[0]], default=1)
        with contextlib.suppress(torch.OutOfMemoryError):  # a device has no room to try it
            choice = self._waiting.join(call, described, count)
        if choice is None:
            return None
        cut = choice[0]
        targets = [call.reads[index] for index in find_targets(call)]
        results = Results(targets, are_new=False) if targets else self._make_results(call, cut, described)
        self._waiting.add(call, choice, results.tensors)
        are_away = all(self._sections.find_away(each) is not None for each in results.tensors)
        if not are_away or cut.passes[0].is_partial or not self._waiting.may_wait(call):
            is_done = False
            try:
                is_done = self._waiting.run() is None
            finally:
                if not is_done:
                    self._waiting.drop_last()
                    results.drop(self._sections)
            if not is_done:
                return None
        self._note(str(call.op), cut)
        return results.tensors

    def _choose(
        self, call: OpCall, described: Sequence[torch.Tensor], sizes: SliceSizes, tried: Sequence[int]
    ) -> Cut | None:
        """Choose a cut. Where a device has no room to try it, the op's arguments leave first, and then others."""
        while True:
            try:
                return self._chooser.choose(
                    call, described, tried, self._budget_bytes,
                    former=sizes.cut, excluded=sizes.excluded, halvings=sizes.halvings,
                )  # fmt: skip
            except torch.OutOfMemoryError as error:
                clear_frames(error)
                if not self._large.page_out(call.reads) and not self._ledger.make_room():
                    raise

    def _explain(self, key: tuple[Any, ...], call: OpCall) -> Infeasible | MemoryRefused:
        """Return the error of an op that cannot run in slices. It is forgotten here: its frames will hold tensors."""
        self._sizes.pop(key, None)
        known = self._refusals.pop(key, None)  # an op that waited may fail again
        return explain(known or self._describe_refusal(call), call, is_exact=self._is_exact)

    def _describe_refusal(self, call: OpCall) -> Infeasible:
        """Return an error that does not say what is missing."""
        return Infeasible(
            needed_bytes=self._budget_bytes + 1, budget_bytes=self._budget_bytes, op=str(call.op), is_whole_step=False
        )

    def _note(self, name: str, cut: Cut) -> None:
        self.figures.counts[name] = self.figures.counts.get(name, 0) + 1
        self.has_run = True
        if cut.exactness is Exactness.INEXACT and name not in self.figures.inexact:
            self.figures.inexact.add(name)
            logger.warning(
                "%s runs in slices whose sums are added in another order: its results are those of gradient "
                "accumulation over the same parts, not the bits of the whole op", name,
            )  # fmt: skip

    def _try(
        self,
        call: OpCall,
        cut: Cut,
        described: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor] | None,
        sizes: SliceSizes,
    ) -> list[torch.Tensor] | Infeasible | MemoryRefused:
        """Run an op in slices. If there is no room, return the error; nothing has happened then.

        Args:
            given: tensors for its results, if they exist already.
            sizes: is told which pass runs.

        Raises:
            Infeasible, MemoryRefused: there is no room for the rest of an in-place op, whose argument is partly
                written.
        """
        results = None
        try:
            results = self._make_results(call, cut, described, given)
            for each in cut.passes:
                sizes.running = each
                run_pass(
                    self._sections, call, each, cut.parts[each], results, self._large.watch(call.reads),
                    overlaps=sizes.overlaps, may_halve=not self._is_exact or find_telling(call) is None,
                )  # fmt: skip
            results.finish(self._sections)
            return results.tensors
        except (*NO_ROOM, TierError, torch.OutOfMemoryError) as error:
            if results is not None and results.is_changed:
                error.add_note(PARTLY_WRITTEN.format(op=call.op))
                raise
            if isinstance(error, TierError) and not isinstance(error, DeviceFull):
                raise
            refusal = error
        finally:
            if results is not None:
                results.drop(self._sections)
        clear_frames(refusal)
        if isinstance(refusal, NO_ROOM):
            return refusal.with_traceback(None)
        return self._describe_refusal(call)  # of a device's allocator, which does not say what is missing

    def _make_results(
        self, call: OpCall, cut: Cut, described: Sequence[torch.Tensor], given: Sequence[torch.Tensor] | None = None
    ) -> Results:
        if targets := find_targets(call):
            return Results.begin_rewriting(self._sections, [call.reads[index] for index in targets])
        if given is not None:
            return Results(list(given), are_new=False)
        tensors = []
        for index, like in enumerate(described):
            is_sum = any(index in each.results and is_summed(index, each) for each in cut.passes)
            device = call.reads[0].device
            if self._large.is_large(like) and not is_sum:
                tensors.append(self._large.make(like, device))
            else:
                tensors.append(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device))
        return Results(tensors)


@contextlib.contextmanager
def _restoring(call: OpCall, statistics: Mapping[str, torch.Tensor]) -> Iterator[Callable[[], None]]:
    """Return a context that restores an op's running statistics if it fails; its value is a function that does so."""

    def restore() -> None:
        for name, former in statistics.items():
            call[name].copy_(former)

    try:
        yield restore
    except BaseException:
        restore()
        raise

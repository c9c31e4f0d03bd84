"""Watches the ops of a step that nobody knows beforehand: makes room before each, and writes down what it did."""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from elbowroom.errors import Infeasible
from elbowroom.hooks.estimates import Estimate, Estimates
from elbowroom.hooks.identity import PLAIN_TENSORS, get_any_storage, get_plain_storage, list_parts, make_test
from elbowroom.hooks.kinds import Kind
from elbowroom.hooks.lessons import Lessons
from elbowroom.hooks.meter import Meter
from elbowroom.hooks.replayable import find_barrier, find_statistics, iterate_tensors
from elbowroom.hooks.settings import Settings, read_settings
from elbowroom.hooks.stopwatch import Pace
from elbowroom.runtime.account import Account
from elbowroom.runtime.calls import Slot
from elbowroom.runtime.history import MOST_RUNS, Run
from elbowroom.runtime.residence import Geometry, Residence
from elbowroom.runtime.watcher import NO_NAMES, Watcher
from elbowroom.runtime.watcher import Run as Runner


class Host(Protocol):
    """Whoever owns the room."""

    def take_room(self, nbytes: int, func: Any) -> None:
        """Make room for what an op is about to allocate, and reserve it in the account until the op has run."""
        ...

    def stays_asleep(self, ops: int, func: Any, estimate: Estimate) -> bool:
        """Whether a step that is asleep has room for the last of its `ops` ops; it is awake now if not."""
        ...


Results = list[Residence]
"""Of the tensors that an op returns, in order."""

NOBODYS: Results = []
"""Stands for results that could not be told apart."""


NONE: Sequence[Residence] = ()
"""Residences that most ops write to."""

PLAIN = frozenset((bool, int, float, type(None)))
"""Of most arguments that are no tensors."""


class Historian(Watcher):
    """Records every op that may be replayed.

    Args:
        host: owns the room.
        account: of what is there.
        estimates: what ops take.
        device: ops elsewhere are let pass.
        before_write, on_write: as for a Watcher.
        is_recording: whether anything may have to be replayed; else room is all that is looked after.
        resting_bytes: ops that run while no more than this is there are not recorded.
        least_bytes: nor are ops that take less, which is too little to move. Where one lies on the way to something
            larger, that can be offloaded only; those that read no tensors, constants most of them, are recorded.

    Attributes:
        busy_seconds: ops took so long.

    Cost: a few microseconds an op; `benchmarks/op_overhead.py` measures it. What is done for each op is little, and
    flat; what only a search for a way needs is worked out there.
    """

    def __init__(
        self,
        host: Host,
        account: Account,
        estimates: Estimates,
        device: torch.device,
        before_write: Callable[[torch.Tensor], None],
        on_write: Callable[[torch.Tensor], None],
        *,
        is_recording: bool = True,
        resting_bytes: int = 0,
        least_bytes: int = 0,
    ) -> None:
        super().__init__(before_write, on_write)
        self._is_recording, self._resting_bytes, self._least_bytes = is_recording, resting_bytes, least_bytes
        self._host, self._account, self._estimates = host, account, estimates
        self._stopwatch = estimates.find_stopwatch(device)
        self._stopwatch.collect()
        self._device_type, self._is_here = device.type, make_test(device.type)
        self._places = itertools.count()  # several threads may run ops, and no two share a place
        self._geometries: dict[tuple[Any, ...], Geometry] = {}
        self._settings: Settings = ()
        self.busy_seconds = 0.0
        self._run_asleep: Runner | None = None
        self._lessons: Lessons | None = None  # told of each op, in a step that a meter counts

    def sleep(self, run: Runner | None = None) -> None:
        """From now on count what ops make, for as long as there is room for them. `run`: runs them; None where they are
        but called."""
        self.stand_in, self._run_asleep = self.watch, run

    def watch(
        self,
        kind: Kind,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: Sequence[torch.Tensor] = (),
        estimate: Estimate | None = None,
    ) -> Any:
        """Run an op asleep. `estimate`: of what it takes, where that is known."""
        run = self._run_asleep
        if kind.is_idle:
            return kind.call(*args, **kwargs) if run is None else run(kind, args, kwargs)
        if estimate is None:
            estimate = self._estimates.find_of(kind, args, kwargs)
        if not self._host.stays_asleep(self.ops, kind.func, estimate):
            return self.run(kind, args, kwargs, targets, estimate)
        result = kind.call(*args, **kwargs) if run is None else run(kind, args, kwargs, targets)
        if targets:
            self._note_written(targets)  # it may have grown them
        if not targets or result is not targets[0]:
            self._count(result)
        return result

    @contextlib.contextmanager
    def learning(self, meter: Meter) -> Iterator[None]:
        """What ops take in here is learned from a meter that runs for as long."""
        lessons = self._lessons = Lessons(self._estimates)
        try:
            yield
        finally:
            self._lessons = None
            lessons.learn(meter)

    def close(self) -> None:
        """The step is over: let every op pass, and let go of who asked."""
        self.pauses += 1
        self.stand_in = self._run_asleep = None
        del self._host, self._before_write, self._on_write

    def run(
        self,
        kind: Kind,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: Sequence[torch.Tensor] = (),
        estimate: Estimate | None = None,
    ) -> Any:
        """Run an op awake. `estimate`: of what it takes, where that is known."""
        if estimate is None:
            estimate = self._estimates.find_of(kind, args, kwargs)
        account = self._account
        # Described first: an op may write to what it reads.
        reads: _Reads | None = None
        if account.counted_bytes > self._resting_bytes:
            may_matter = estimate.nbytes >= self._least_bytes or kind.is_source or bool(targets)
            if may_matter and kind.is_replayable and self._is_recording and torch.is_grad_enabled():
                reads = self._describe_all(kind, args, kwargs)
        # What an op takes inside itself is known as an upper bound only, for which no step is refused that is captured.
        nbytes, pace = estimate.nbytes if self._is_recording else estimate.result_bytes, estimate.pace
        if not account.reserve_within(nbytes):
            nbytes = self._take_room(kind, args, kwargs, nbytes, estimate)
        lesson = None if self._lessons is None else self._lessons.begin(kind, args, kwargs, estimate)
        try:
            if pace.begun < Pace.ENOUGH:
                result = self._stopwatch.time(pace, kind.func, args, kwargs)
            else:
                result = kind.call(*args, **kwargs)
        except BaseException:
            account.reserve(-nbytes)
            raise
        if lesson is not None:
            lesson.end = time.time_ns()
        self.busy_seconds += pace.seconds
        if not targets:  # as of most
            if reads is None:
                self._count(result, nbytes)
                return result
            storage = get_plain_storage(result) if type(result) is torch.Tensor and self._is_here(result) else None
            if storage is not None:
                residence = account.meet(storage, nbytes)
                if _is_made(residence, reads):
                    made = weakref.ref(residence), residence.nbytes
                    residence.made_by = self._make_run(kind, reads, made, (), estimate)
                return result
        if nbytes:
            account.reserve(-nbytes)  # what it made is counted as it is seen
        written = self._note_written(targets) if targets else NONE
        if reads is not None:
            self._record(kind, reads, self._note(result), written, estimate)
            return result
        if result is not targets[0]:
            self._count(result)
        for residence in written:
            residence.forget_runs()
        return result

    def _take_room(
        self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], nbytes: int, estimate: Estimate
    ) -> int:
        """There is no room for so many bytes: have it made. Returns those that are reserved in the end."""
        try:
            self._host.take_room(nbytes, kind.func)
        except Infeasible:
            # Before a step is refused for a bound, what the same op has taken counts instead.
            inner_bytes = self._estimates.find_measured(kind, args, kwargs)
            if inner_bytes is None or estimate.result_bytes + inner_bytes >= nbytes:
                raise
            nbytes = estimate.result_bytes + inner_bytes
            self._host.take_room(nbytes, kind.func)
        return nbytes

    def _count(self, result: Any, reserved_bytes: int = 0) -> None:
        """Results that are not recorded take room all the same. `reserved_bytes`: for them."""
        if type(result) is torch.Tensor and self._is_here(result) and (storage := get_any_storage(result)) is not None:
            self._account.count(storage, reserved_bytes)  # as of most
            return
        for tensor in _list_tensors(result):
            if self._is_here(tensor):
                if (storage := get_any_storage(tensor)) is not None:
                    self._account.count(storage, reserved_bytes)
                    reserved_bytes = 0
                elif tensor.layout is not torch.strided:
                    self._count(list_parts(tensor))
        if reserved_bytes:
            self._account.reserve(-reserved_bytes)

    def _note(self, result: Any) -> Results:
        """The residence of each result; `NOBODYS` where one has none."""
        results: Results = []
        is_whole = True
        for tensor in _list_tensors(result):
            storage = get_plain_storage(tensor) if self._is_here(tensor) else None
            if storage is not None:
                results.append(self._account.see(storage, is_outside=False))
            else:
                is_whole = False
                self._count(tensor)
        return results if is_whole else NOBODYS

    def _note_written(self, targets: Sequence[torch.Tensor]) -> list[Residence]:
        """The residences of what an op wrote to, whose version is new once `on_write` has been told."""
        written: list[Residence] = []
        for tensor in targets:
            storage = get_any_storage(tensor) if self._is_here(tensor) else None
            if storage is not None:
                residence = self._account.measure(storage)
                if residence is None:
                    continue  # no op of the step has made it, and none has read it
                if residence not in written:
                    written.append(residence)
                if residence.made_by is not None and get_plain_storage(tensor) is None:
                    residence.forget_runs()
        return written

    def _record(
        self, kind: Kind, reads: _Reads, results: Results, written: Sequence[Residence], estimate: Estimate
    ) -> None:
        if results is NOBODYS:
            for residence in written:
                residence.forget_runs()
            return
        made = [each for each in results if _is_made(each, reads)]
        if not made and not written:
            return
        run = self._make_run(kind, reads, _point_to(results), _point_to(written), estimate)
        for residence in made:
            residence.made_by = run
        for residence in written:
            if residence.made_by is not None:
                residence.changed_by += (run,)
                if len(residence.changed_by) == MOST_RUNS:  # with the one that made it, there are too many
                    residence.forget_runs()

    def _make_run(
        self, kind: Kind, reads: _Reads, made: tuple[Any, ...], written: tuple[Any, ...], estimate: Estimate
    ) -> Run:
        if (settings := read_settings()) != self._settings:
            self._settings = settings  # one object for all that ran under the same
        args, kwargs, _ = reads
        return tuple.__new__(
            Run, (next(self._places), kind.func, args, kwargs, made, written, self._settings, estimate)
        )

    def _describe_all(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Reads | None:
        """Arguments with slots in the place of tensors; None if they cannot be had again, or the op may not be."""
        if kind.has_conditions and find_barrier(kind.func, args, kwargs):
            return None
        residences: list[Residence] = []
        try:
            described = self._describe(args, residences)
            named = dict(zip(kwargs, self._describe(kwargs.values(), residences), strict=True)) if kwargs else NO_NAMES
        except _Foreign:
            return None
        if kind.has_statistics:
            for position in find_statistics(kind.func, args):
                if isinstance(described[position], Slot):
                    described[position] = described[position]._replace(is_read=False)
        return tuple.__new__(_Reads, (tuple(described), named, residences))

    def _measure(self, tensor: torch.Tensor) -> Geometry:
        """Of many tensors alike, one geometry is kept: what is there makes the garbage collector slow."""
        lies = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        return self._geometries.get(lies) or self._geometries.setdefault(lies, Geometry.of(tensor))

    def _describe(self, values: Iterable[Any], residences: list[Residence]) -> list[Any]:
        described: list[Any] = []
        for value in values:
            made_as = type(value)
            if made_as in PLAIN:
                described.append(value)
            elif made_as in PLAIN_TENSORS or isinstance(value, torch.Tensor):
                storage = get_plain_storage(value) if self._is_here(value) else None
                if storage is None:
                    raise _Foreign
                residence = self._account.see(storage, is_outside=True)
                kept = None
                if residence.is_outside:
                    if not residence.is_staying:
                        raise _Foreign
                    kept = storage
                residences.append(residence)
                # Straight to the tuple, as for a geometry.
                slot = residence, self._measure(value), kept, None, 0, residence.version, True
                described.append(tuple.__new__(Slot, slot))
            elif isinstance(value, (list, tuple)):
                described.append(type(value)(self._describe(value, residences)))
            else:
                described.append(value)
        return described


def _list_tensors(result: Any) -> Iterable[torch.Tensor]:
    """As `iterate_tensors`, quicker where an op returns what most do."""
    if type(result) is torch.Tensor:
        return (result,)
    if type(result) is tuple and PLAIN_TENSORS.issuperset(map(type, result)):
        return result
    return iterate_tensors(result)


class _Reads(NamedTuple):
    """What an op is given, and the residences of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    residences: list[Residence]


def _is_made(residence: Residence, reads: _Reads) -> bool:
    """Whether an op has made a result: not what it was given, even where its schema hides that it returns a view."""
    is_known = residence.is_outside or residence.version or residence in reads.residences
    return residence.made_by is None and not is_known


def _point_to(residences: Sequence[Residence]) -> tuple[Any, ...]:
    flat: list[Any] = []
    for residence in residences:
        flat += (weakref.ref(residence), residence.nbytes)
    return tuple(flat)


class _Foreign(Exception):
    """A tensor that others may change unseen, or that is no plain block of bytes on the device.

    So may a batch: whoever loads it may write the next one to the same place, through NumPy or in another thread.
    """

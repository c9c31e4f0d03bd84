"""Watches the ops of a step that nobody knows beforehand: makes room before each, and writes down what it did."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from elbowroom.hooks.estimates import Estimates
from elbowroom.hooks.identity import get_any_storage, get_plain_storage, is_shared
from elbowroom.hooks.replayable import (
    find_barrier,
    find_statistics,
    find_written,
    is_view,
    iterate_tensors,
    list_written,
    touches_tensors,
)
from elbowroom.hooks.settings import read_settings
from elbowroom.runtime.calls import Slot, iterate_slots
from elbowroom.runtime.history import Result, Run
from elbowroom.runtime.residence import Geometry, Residence
from elbowroom.runtime.watcher import Watcher


class Host(Protocol):
    """Whoever owns the room."""

    def take_room(self, nbytes: int, func: Any) -> None:
        """Make room for what an op is about to allocate, and keep it free until `give_room`."""
        ...

    def give_room(self, nbytes: int) -> None:
        """The op has run."""
        ...

    def measure(self, storage: torch.UntypedStorage, residence: Residence) -> None:
        """Count a storage that may have been resized."""
        ...

    def find_seen(self, storage: torch.UntypedStorage, *, is_outside: bool) -> Residence:
        """The residence of a storage, made if there is none."""
        ...


Results = list[tuple[Residence, torch.Tensor]]
"""The results of an op that lie on the device, in order."""

NOBODYS: Results = []
"""Stands for results that could not be told apart."""


class Historian(Watcher):
    """Records every op that may be replayed.

    Args:
        host: owns the room.
        estimates: what ops allocate.
        device_type: ops elsewhere are let pass.
        before_write, on_write: as for a Watcher.
        is_recording: whether anything may have to be replayed; else room is all that is looked after.

    Attributes:
        busy_seconds: ops took so long.

    Cost: some ten microseconds an op; `benchmarks/op_overhead.py` measures it.
    """

    def __init__(
        self,
        host: Host,
        estimates: Estimates,
        device_type: str,
        before_write: Callable[[torch.Tensor], None],
        on_write: Callable[[torch.Tensor], None],
        *,
        is_recording: bool = True,
    ) -> None:
        super().__init__(before_write, on_write)
        self._is_recording = is_recording
        self._host, self._estimates, self._device_type = host, estimates, device_type
        self._places = itertools.count()  # several threads may run ops, and no two share a place
        self.busy_seconds = 0.0

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_view(func) or not touches_tensors(func):
            return func(*args, **kwargs)
        estimate = self._estimates.find(func, args, kwargs)
        # Described first: an op may write to what it reads.
        described = self._describe_all(func, args, kwargs) if self._is_recording and torch.is_grad_enabled() else None
        # What an op takes inside itself is known as an upper bound only, for which no step is refused that is captured.
        nbytes = estimate.result_bytes + (estimate.inner_bytes if self._is_recording else 0)
        self._host.take_room(nbytes, func)
        begin = time.perf_counter()
        try:
            result = func(*args, **kwargs)
        finally:
            self._host.give_room(nbytes)
        seconds = time.perf_counter() - begin
        self.busy_seconds += seconds
        results, written = self._note(result), self._note_written(func, args, kwargs)
        # What an op was given it has not made, even where its schema hides that a result is a view of it.
        read = {slot.residence for slot in iterate_slots(described)} if described else set()
        made = [each for each, _ in results if each.runs is None and not each.version and each not in read]
        if described is None or results is NOBODYS or not (made or written) or find_barrier(func, args, kwargs):
            for residence in written:
                residence.runs = None
            return result
        run = self._make_run(func, args, described, results, written, seconds, estimate.inner_bytes)
        for residence in made:
            if not residence.is_outside:
                residence.runs = [run]
        for residence in written:
            if residence.runs is not None and not residence.is_outside:
                residence.runs.append(run)
        return result

    def _note(self, result: Any) -> Results:
        """The residence of each result, and the result; `NOBODYS` where one has none."""
        if isinstance(result, torch.Tensor):
            result = (result,)
        results: Results = []
        is_whole = True
        for tensor in iterate_tensors(result):
            storage = get_plain_storage(tensor) if tensor.device.type == self._device_type else None
            if storage is None:
                is_whole = False
                if tensor.layout is torch.sparse_coo:
                    self._note((tensor._indices(), tensor._values()))
            else:
                results.append((self._host.find_seen(storage, is_outside=False), tensor))
        return results if is_whole else NOBODYS

    def _note_written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Residence]:
        """The residences of what an op wrote to, whose version is new once `on_write` has been told."""
        written: list[Residence] = []
        for tensor in list_written(func, args, kwargs):
            storage = get_any_storage(tensor) if tensor.device.type == self._device_type else None
            if storage is not None:
                residence = self._host.find_seen(storage, is_outside=True)
                if residence not in written:
                    self._host.measure(storage, residence)
                    written.append(residence)
                if get_plain_storage(tensor) is None:
                    residence.runs = None
        return written

    def _make_run(
        self,
        func: Any,
        args: tuple[Any, ...],
        described: tuple[tuple[Any, ...], dict[str, Any]],
        results: Results,
        written: list[Residence],
        seconds: float,
        inner_bytes: int,
    ) -> Run:
        scratch = {position for position, _ in find_written(func) if position < len(args)}
        scratch.update(find_statistics(func, args))
        found = tuple(Result(weakref.ref(residence), Geometry.of(tensor)) for residence, tensor in results)
        changes: tuple[Result, ...] = ()
        if written:
            geometries = {residence: result.geometry for (residence, _), result in zip(results, found, strict=True)}
            changes = tuple(
                Result(weakref.ref(each), geometries.get(each) or Geometry(torch.uint8, torch.Size((0,)), (1,), 0))
                for each in written
            )
        return Run(
            next(self._places),
            func,
            *described,
            found,
            changes,
            tuple(sorted(scratch)),
            read_settings(),
            seconds,
            inner_bytes,
        )

    def _describe_all(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Arguments with slots in the place of tensors; None if one of them cannot be had again."""
        try:
            statistics = find_statistics(func, args)
            described = tuple(map(self._describe, args))
            if statistics:
                described = tuple(
                    value._replace(is_read=False) if position in statistics and isinstance(value, Slot) else value
                    for position, value in enumerate(described)
                )
            return described, {name: self._describe(value) for name, value in kwargs.items()}
        except _Foreign:
            return None

    def _describe(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            storage = get_plain_storage(value)
            if storage is None or value.device.type != self._device_type:
                raise _Foreign
            residence = self._host.find_seen(storage, is_outside=True)
            if residence.is_outside and (not residence.is_staying or is_shared(storage)):
                raise _Foreign
            kept = storage if residence.is_outside else None
            return Slot(residence, Geometry.of(value), kept, None, 0, residence.version)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._describe, value))
        return value


class _Foreign(Exception):
    """A tensor that others may change unseen, or that is no plain block of bytes on the device.

    So may a batch: whoever loads it may write the next one to the same place, through NumPy or in another thread.
    """

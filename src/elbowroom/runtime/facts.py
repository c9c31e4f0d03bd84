"""What a policy is told of the step that it decides on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.ir.hardware import Link
from elbowroom.ir.plan import Segment
from elbowroom.residency.machine import State
from elbowroom.runtime.account import Account
from elbowroom.runtime.replays import Recording, is_exposed
from elbowroom.runtime.residence import Residence


class Clock(Protocol):
    """Times the step's own ops."""

    busy_seconds: float


class StepFacts:
    """Answers from what a step has done so far (`residency.context.PolicyContext`).

    Args:
        account: counts bytes.
        bound: residences by id.
        link: to the tier below.
        movable: whether a storage may leave at all.
        budget_bytes: room there is in all.

    Attributes:
        segments: how what was dropped can be computed again; grows.
        allows_drops: whether anything may be dropped; not once the step is over.
        state, clock: of the step; given later.
        base_bytes: of what is there before the step; given later.
        begin: when the step began, on the clock of `time.perf_counter`.
        stuck: bytes of what the tier below had no room for.
        pinned: storages that something at hand needs, and how often; one count for each list of actions under way.
    """

    def __init__(
        self,
        account: Account,
        bound: Mapping[int, Residence],
        link: Link,
        movable: Callable[[int], bool],
        budget_bytes: int,
    ) -> None:
        self._account, self._bound, self._link, self._budget_bytes = account, bound, link, budget_bytes
        self.may_move, self.allows_drops = movable, True
        self.segments: list[Segment] = []
        self.pinned: list[Counter[int]] = []
        self.stuck: dict[int, int] = {}
        self._recordings: dict[int, Recording | None] = {}
        self.base_bytes = 0
        self.state: Callable[[int], State | None] = lambda storage: None
        self.clock: Clock | None = None
        self.begin = time.perf_counter()

    def now(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self.begin

    @property
    def budget_bytes(self) -> int:
        """Room there is in all."""
        return self._budget_bytes

    def nbytes(self, storage: int) -> int:
        """What a storage takes."""
        return self._account.round(self._bound[storage].nbytes)

    def address(self, storage: int) -> int | None:
        """Where its block begins; None while it is not there."""
        home = self._bound[storage].find_storage()
        return None if home is None else home.data_ptr()

    def live_bytes(self) -> int:
        """Return the bytes on the device."""
        return self._account.live_bytes

    def take_recent_peak(self) -> int:
        """Return the most bytes that were there, or asked for by an op, since this was last called."""
        return self._account.take_recent_peak()

    def busy_seconds(self) -> float:
        """What the step's own ops took."""
        return 0.0 if self.clock is None else self.clock.busy_seconds

    def move_seconds(self, nbytes: int) -> tuple[float, float]:
        """To copy so many bytes out, and back."""
        return offload_seconds(self._link, nbytes), reload_seconds(self._link, nbytes)

    def copy_out_seconds(self, storage: int) -> float:
        """Return the seconds to copy it out: none if there is a copy, infinite if there is no room below."""
        residence = self._bound[storage]
        if residence.copy is not None:
            return 0.0
        return float("inf") if self._has_no_room_below(residence) else offload_seconds(self._link, residence.nbytes)

    def may_drop(self, storage: int) -> bool:
        """Tell whether it may be dropped: not after the step, nor where a reload would find room more easily."""
        return self.allows_drops and not self._is_tight(storage)

    def may_leave(self, storage: int) -> bool:
        """Whether we hold every alias of it, and nothing at hand needs it."""
        if any(counter[storage] > 0 for counter in self.pinned):
            return False
        residence = self._bound.get(storage)
        home = None if residence is None else residence.find_storage()
        if residence is None or home is None:
            return False
        if self._has_no_room_below(residence) and self.find_safe_recording(residence) is None:
            return False
        own = sum(view.geometry is None for view in residence.views.values())
        return int(torch._C._storage_Use_Count(home._cdata)) <= own + 1  # and that of its Python object

    def add_segment(self, storage: int) -> int:
        """A segment that computes it again."""
        recording = self.find_path(storage)
        assert recording is not None
        leaves = tuple(leaf.id for leaf in recording.leaves)
        self.segments.append(Segment(ops=tuple(recording.places), outputs=(storage,), leaves=leaves))
        return len(self.segments) - 1

    def find_path(self, storage: int) -> Recording | None:
        """Return the recording that computes a storage again; None if there is none."""
        table, recording = self._account.table, self._recordings.get(storage)
        if recording is None or not recording.is_open(table):
            recording = self._recordings[storage] = table.find_recording(self._bound[storage].record)
        return recording

    def find_safe_recording(self, residence: Residence) -> Recording | None:
        """Return it unless others may write to what it reads; the policy is not told of these, being few."""
        recording = self.find_path(residence.id)
        return None if recording is None or is_exposed(recording, residence) else recording

    def _is_tight(self, storage: int) -> bool:
        """Whether there may be no room to compute a storage again, while it could come back from the tier below."""
        # A replay runs beside what the same node of the graph needs, so it gets half of what the model leaves.
        path = self.find_path(storage)
        is_large = path is not None and 2 * path.nbytes > self._budget_bytes - self.base_bytes
        return is_large and not self._has_no_room_below(self._bound[storage])

    def _has_no_room_below(self, residence: Residence) -> bool:
        return residence.copy is None and bool(self.stuck) and residence.nbytes >= min(self.stuck.values())

    def forget(self, storage: int) -> None:
        """A storage is no more of interest; its recording keeps what it starts from."""
        self._recordings.pop(storage, None)
        self.stuck.pop(storage, None)

    def close(self) -> None:
        """The step is over: let go of all recordings, and of who is asked."""
        self._recordings.clear()
        self.may_move, self.clock = (lambda storage: False), None

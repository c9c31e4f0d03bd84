"""What a policy is told of the step that it decides on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch

from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.ir.hardware import Link
from elbowroom.ir.plan import Segment
from elbowroom.runtime.account import Account
from elbowroom.runtime.replays import Recording, is_exposed
from elbowroom.runtime.residence import Residence


class Clock(Protocol):
    """Times the step's own ops."""

    busy_seconds: float


class StepFacts:
    """Answers from what a step has done so far (`residency.online.Facts`).

    Args:
        account: counts bytes.
        bound: residences by id.
        link: to the tier below.
        movable: whether a storage may leave at all.
        budget_bytes: room there is in all.

    Attributes:
        segments: how what was dropped can be computed again; grows.
        may_drop: whether anything may be dropped; not once the step is over.
        is_on_device, clock: of the step; given later.
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
        self.may_move, self.may_drop = movable, True
        self.segments: list[Segment] = []
        self.pinned: list[Counter[int]] = []
        self.stuck: dict[int, int] = {}
        self._recordings: dict[int, Recording | None] = {}
        self.base_bytes = 0
        self.is_on_device: Callable[[int], bool] = lambda storage: True
        self.clock: Clock | None = None
        self.begin = time.perf_counter()

    def now(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self.begin

    def spare_bytes(self) -> int:
        """Room that nothing takes."""
        return self._budget_bytes - self._account.live_bytes

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

    def held_bytes(self) -> tuple[int, int]:
        """What is there now; and most that was, or was asked for by an op, since this was last called."""
        return self._account.live_bytes, self._account.take_recent_peak()

    def busy_seconds(self) -> float:
        """What the step took, without moves, replays and decisions."""
        return 0.0 if self.clock is None else self.clock.busy_seconds

    def move_seconds(self, nbytes: int) -> tuple[float, float]:
        """To copy so many bytes out, and back."""
        return offload_seconds(self._link, nbytes), reload_seconds(self._link, nbytes)

    def swap_seconds(self, storage: int) -> float:
        """Out, unless there is a copy, and back."""
        residence = self._bound[storage]
        if self._has_no_room_below(residence):
            return float("inf")
        back = reload_seconds(self._link, residence.nbytes)
        return back if residence.copy is not None else back + offload_seconds(self._link, residence.nbytes)

    def own_seconds(self, storage: int) -> float:
        """To compute it again from its neighbours; infinite where there is no way."""
        recording = self.find_recording(storage)
        return float("inf") if recording is None else float(recording.seconds)

    def own_bytes(self, storage: int) -> int:
        """What that allocates at once, with the storage itself."""
        recording = self.find_recording(storage)
        return 0 if recording is None else int(recording.nbytes)

    def replay_seconds(self, storage: int) -> float:
        """What it takes to compute it again, with all that has left before it; infinite where there is no way, or where
        that may take more room than a reload finds."""
        if not self.may_drop or self._is_tight(storage):
            return float("inf")
        seconds, seen, stack = 0.0, {storage}, [storage]
        while stack:
            recording = self.find_recording(stack.pop())
            if recording is None:
                return float("inf")
            seconds += recording.seconds
            for leaf in recording.leaves:
                if leaf.id in seen or self.is_on_device(leaf.id):
                    continue
                seen.add(leaf.id)
                if leaf.recording is not None:
                    stack.append(leaf.id)
                else:
                    seconds += reload_seconds(self._link, leaf.nbytes)
        return seconds

    def neighbours(self, storage: int) -> Iterable[int]:
        """The saved storages that it would be computed from."""
        recording = self.find_recording(storage)
        return () if recording is None else [leaf.id for leaf in recording.leaves]

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

    def segment(self, storage: int) -> int:
        """A segment that computes it again."""
        recording = self.find_recording(storage)
        assert recording is not None
        leaves = tuple(leaf.id for leaf in recording.leaves)
        self.segments.append(Segment(ops=tuple(recording.places), outputs=(storage,), leaves=leaves))
        return len(self.segments) - 1

    def find_recording(self, storage: int) -> Recording | None:
        """Return the recording that computes a storage again; None if there is none."""
        table, recording = self._account.table, self._recordings.get(storage)
        if recording is None or not recording.is_open(table):
            recording = self._recordings[storage] = table.find_recording(self._bound[storage].record)
        return recording

    def find_safe_recording(self, residence: Residence) -> Recording | None:
        """Return it unless others may write to what it reads; the policy is not told of these, being few."""
        recording = self.find_recording(residence.id)
        return None if recording is None or is_exposed(recording, residence) else recording

    def _is_tight(self, storage: int) -> bool:
        """Whether there may be no room to compute a storage again, while it could come back from the tier below."""
        # A replay runs beside what the same node of the graph needs, so it gets half of what the model leaves.
        is_large = 2 * self.own_bytes(storage) > self._budget_bytes - self.base_bytes
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

"""Facts about the running step for the policies."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.hooks.storage_ids import get_address
from elbowroom.ir.plan import Segment
from elbowroom.residency.machine import State
from elbowroom.runtime.replays import Recording, is_exposed
from elbowroom.runtime.saved_storage import SavedStorage
from elbowroom.runtime.step_environment import StepEnvironment
from elbowroom.runtime.step_state import StepState

BESIDE_A_REPLAY = 4
"""Tensors as large as what is computed again that a backward pass may hold meanwhile."""


class StepContext:
    """Implementation of `residency.context.PolicyContext` for a running step.

    Attributes:
        may_move: whether a storage may leave the device without a plan that says so.
        begin: start of the step, on the clock of `time.perf_counter`.
        pinned: storages that pending actions need on the device, with counts; one dict for each list of actions.
    """

    def __init__(self, state: StepState, environment: StepEnvironment) -> None:
        self._state = state
        self._by_id = state.storages.by_id
        self._ledger = environment.ledger
        self._link = environment.profile.links[0]
        self._budget_bytes = environment.budget_bytes
        self._free_bytes = self._budget_bytes - self._ledger.live_bytes
        self._recordings: dict[int, Recording | None] = {}
        self._move_seconds: dict[int, tuple[float, float]] = {}  # by bytes
        self.may_move: Callable[[int], bool] = state.storages.may_move
        self.begin = time.perf_counter()
        self.pinned: list[dict[int, int]] = []

    def now(self) -> float:
        return time.perf_counter() - self.begin

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    def nbytes(self, storage: int) -> int:
        return self._state.storages.round_up(self._by_id[storage].nbytes)

    def address(self, storage: int) -> int | None:
        home = self._by_id[storage].find_storage()
        try:
            return None if home is None else get_address(home)
        except RuntimeError:
            return None  # model state that is away

    def live_bytes(self) -> int:
        return self._ledger.live_bytes

    def take_recent_peak(self) -> int:
        return self._ledger.take_recent_peak()

    def busy_seconds(self) -> float:
        return float(self._state.watcher.busy_seconds)

    def move_seconds(self, nbytes: int) -> tuple[float, float]:
        found = self._move_seconds.get(nbytes)
        if found is None:
            found = self._move_seconds[nbytes] = offload_seconds(self._link, nbytes), reload_seconds(self._link, nbytes)
        return found

    def state(self, storage: int) -> State | None:
        return self._state.machine.state(storage)

    def copy_out_seconds(self, storage: int) -> float:
        saved = self._by_id[storage]
        if saved.copy is not None:
            return 0.0
        return float("inf") if self._state.has_no_room_below(saved) else offload_seconds(self._link, saved.nbytes)

    def may_drop(self, storage: int) -> bool:
        """Tell whether a storage may be dropped: not after the step, nor if its replay takes much of the free
        memory."""
        if self._state.phase.has_ended:
            return False
        path = self.find_path(storage)
        if path is None or self._state.has_no_room_below(self._by_id[storage]):
            return True
        # A replay needs memory beside that of the backward node that triggers it, so it gets half of the free memory.
        # It reads its inputs as a whole. The node has a gradient as large as the storage, and may need another tensor
        # and make one, while gradients from elsewhere wait to be added.
        needed_bytes = path.nbytes + path.read_bytes + BESIDE_A_REPLAY * self._by_id[storage].nbytes
        return bool(max(2 * path.nbytes, needed_bytes) <= self._free_bytes)

    def may_leave(self, storage: int) -> bool:
        if any(counts.get(storage, 0) > 0 for counts in self.pinned):
            return False
        saved = self._by_id.get(storage)
        if saved is None or saved.find_storage() is None:
            return False
        if self._state.has_no_room_below(saved) and self.find_safe_recording(saved) is None:
            return False
        return not self.is_held(saved)

    def is_held(self, saved: SavedStorage) -> bool:
        """Tell whether the program holds a storage that is on the device."""
        home = saved.find_storage()
        if home is None:
            return False
        own = saved.count_references()
        return int(torch._C._storage_Use_Count(home._cdata)) > own + 1  # 1 for the storage's Python object

    def add_segment(self, storage: int) -> int:
        recording = self.find_path(storage)
        assert recording is not None
        leaves = tuple(leaf.id for leaf in recording.leaves)
        self._state.segments.append(Segment(ops=tuple(recording.places), outputs=(storage,), leaves=leaves))
        return len(self._state.segments) - 1

    def find_path(self, storage: int) -> Recording | None:
        """Return the recording that recomputes a storage; None if there is none."""
        table = self._state.storages.table
        recording = self._recordings.get(storage)
        if recording is None or not recording.is_open(table):
            recording = self._recordings[storage] = table.find_recording(self._by_id[storage].record)
        return recording

    def find_safe_recording(self, saved: SavedStorage) -> Recording | None:
        """Return the recording of a storage; None if others may write to its inputs. Too rare for policies to check."""
        recording = self.find_path(saved.id)
        return None if recording is None or is_exposed(recording, saved) else recording

    def forget(self, storage: int) -> None:
        """Forget a storage that autograd has released."""
        self._recordings.pop(storage, None)
        self._state.stuck_bytes.pop(storage, None)

    def close(self) -> None:
        """Drop all recordings at the end of the step."""
        self._recordings.clear()

"""One step that nobody knows beforehand, within the budget from its first op on.

Before each op, each reload and each replay there has to be room; where there is not, the machine is told of the
pressure, and its policy says what leaves. Only what autograd alone holds can: what the program holds stays.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from elbowroom._family import get
from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.errors import Infeasible, Thrashing
from elbowroom.hooks.estimates import Estimates
from elbowroom.hooks.identity import Identities
from elbowroom.ir.actions import Action, Recompute, Reload
from elbowroom.ir.events import PressureRaised
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.plan import Segment
from elbowroom.residency import policies
from elbowroom.residency.capacity_first import Policy as CapacityFirst
from elbowroom.residency.habits import Habits
from elbowroom.residency.machine import Machine
from elbowroom.runtime.account import Account
from elbowroom.runtime.engine import Engine
from elbowroom.runtime.historian import Historian
from elbowroom.runtime.history import Way, find_way
from elbowroom.runtime.residence import Residence
from elbowroom.runtime.transfers import Transfers

logger = logging.getLogger(__name__)

WORTH_SAYING, ENOUGH = 10.0, 100.0
"""Replays that take so many times what the step's ops took: worth a warning, and the end."""

NOT_LONG = 1.0
"""Seconds below which neither is said."""


class OnlineEngine(Engine):
    """Runs one step under a policy.

    Args:
        transfers, device, list_staying, min_bytes: as for `Engine`.
        budget_bytes: what the step may hold on the device.
        policy: a member of `residency.policies`.
        estimates: what ops allocate; grows from step to step.
        profile: of this machine.
        habits: what earlier steps taught; this one is added to it.
        residents: what is there before the step.
    """

    def __init__(
        self,
        transfers: Transfers,
        device: torch.device,
        list_staying: Callable[[], Identities[bool]],
        min_bytes: int,
        *,
        budget_bytes: int,
        policy: str,
        estimates: Estimates,
        profile: HardwareProfile,
        habits: Habits,
        residents: Iterable[torch.Tensor],
    ) -> None:
        super().__init__(transfers, device, list_staying, min_bytes)
        self._budget_bytes, self._link = budget_bytes, profile.links[0]
        self._identities = self.account = Account(profile.alignment_bytes)
        self._segments: list[Segment] = []
        self._ways: dict[int, Way | None] = {}
        self._gone: dict[int, Way] = {}  # of what is dropped
        self._pinned: list[Counter[int]] = []
        self._most = 0
        self._begin, self._replay_seconds, self._has_said = time.perf_counter(), 0.0, False
        self._machine = Machine(get(policies, policy, "Policy")(self, habits), self._segments)
        self.historian = Historian(self, estimates, device.type, self.about_to_write, self.written)
        self.recorder = self.watcher = self.historian  # type: ignore[assignment]
        self._paused.watch([self.historian])
        for tensor in residents:
            if tensor.device.type == device.type and tensor.layout is torch.strided:
                self.find_seen(tensor.untyped_storage(), is_outside=True).is_staying = True

    # -- room -----------------------------------------------------------------------------------------------------

    def take_room(self, nbytes: int, func: Any) -> None:
        """Make room for what an op is about to allocate, and keep it free until `give_room`.

        Raises:
            Infeasible: everything that may leave has left, and there is not enough.
        """
        live = self.account.live_bytes
        self._most = max(self._most, live + nbytes)
        if live + nbytes > self._budget_bytes:
            with self._lock:
                self._drain()
                self._make_room(nbytes, str(func))
        self.account.reserve(nbytes)

    def give_room(self, nbytes: int) -> None:
        """The op has run: what it made is counted as it is seen."""
        self.account.reserve(-nbytes)

    def _make_room(self, nbytes: int, what: str) -> None:
        while (missing := self.account.live_bytes + nbytes - self._budget_bytes) > 0:
            actions = self._machine.feed(PressureRaised(missing, self.saves + self.needs))
            if not actions:
                raise Infeasible(
                    needed_bytes=self._budget_bytes + missing, budget_bytes=self._budget_bytes, op=what,
                    in_the_way=(("the op's own results and workspace", nbytes),),
                )  # fmt: skip
            self._carry_out(actions)

    def find_seen(self, storage: torch.UntypedStorage, *, is_outside: bool) -> Residence:
        """The residence of a storage, made if there is none."""
        residence = self._identities.find(storage)
        if residence is None:
            with self.account.lock:
                if (residence := self._identities.find(storage)) is None:
                    residence = Residence(storage.nbytes())
                    residence.is_outside = is_outside
                    self._identities.put(storage, residence)
        return residence

    def measure(self, storage: torch.UntypedStorage, residence: Residence) -> None:
        """Count a storage that may have been resized."""
        self.account.measure(storage, residence)

    _measure = measure

    def _find_residence(self, storage: torch.UntypedStorage) -> Residence:
        return self.find_seen(storage, is_outside=True)

    # -- what a policy asks (residency.online.Facts) --------------------------------------------------------------

    def now(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._begin

    def spare_bytes(self) -> int:
        """Room that nothing takes."""
        return self._budget_bytes - self.account.live_bytes

    def budget_bytes(self) -> int:
        """Room there is in all."""
        return self._budget_bytes

    def nbytes(self, storage: int) -> int:
        """What a storage takes."""
        return self.account.round(self._bound[storage].nbytes)

    def address(self, storage: int) -> int | None:
        """Where its block begins; None while it is not there."""
        home = self._bound[storage].find_storage()
        return None if home is None else home.data_ptr()

    def swap_seconds(self, storage: int) -> float:
        """Out, unless there is a copy, and back."""
        residence = self._bound[storage]
        back = reload_seconds(self._link, residence.nbytes)
        return back if residence.copy is not None else back + offload_seconds(self._link, residence.nbytes)

    def own_seconds(self, storage: int) -> float:
        """To compute it again from its neighbours; infinite where there is no way."""
        way = self._find_way(storage)
        return float("inf") if way is None else way.seconds

    def own_bytes(self, storage: int) -> int:
        """What that allocates at once, with the storage itself."""
        way = self._find_way(storage)
        return 0 if way is None else way.nbytes

    def move_seconds(self, nbytes: int) -> tuple[float, float]:
        """To copy so many bytes out, and back."""
        return offload_seconds(self._link, nbytes), reload_seconds(self._link, nbytes)

    def busy_seconds(self) -> float:
        """What the step's own ops took."""
        return self.historian.busy_seconds

    def most_bytes(self) -> int:
        """Most that was there, or asked for by an op, since this was last called."""
        live = self.account.live_bytes
        most, self._most = max(self._most, live), live
        return most

    def replay_seconds(self, storage: int) -> float:
        """What it takes to compute it again, with all that has left before it; infinite where there is no way."""
        seconds, seen, stack = 0.0, {storage}, [storage]
        while stack:
            way = self._find_way(stack.pop())
            if way is None:
                return float("inf")
            seconds += way.seconds
            for leaf in way.recording.leaves:
                if leaf.id in seen or self._machine.is_on_device(leaf.id):
                    continue
                seen.add(leaf.id)
                if leaf.recording is not None:
                    stack.append(leaf.id)
                else:
                    seconds += reload_seconds(self._link, leaf.nbytes)
        return seconds

    def neighbours(self, storage: int) -> Iterable[int]:
        """The saved storages that it would be computed from."""
        way = self._find_way(storage)
        return () if way is None else [leaf.id for leaf in way.recording.leaves]

    def may_move(self, storage: int) -> bool:
        """Whether it may leave the device at all."""
        return self._may_move(storage)

    def may_leave(self, storage: int) -> bool:
        """Whether we hold every alias of it, and nothing at hand needs it."""
        if any(counter[storage] > 0 for counter in self._pinned):
            return False
        residence = self._bound.get(storage)
        home = None if residence is None else residence.find_storage()
        if residence is None or home is None:
            return False
        own = sum(view.geometry is None for view in residence.views.values())
        return int(torch._C._storage_Use_Count(home._cdata)) <= own + 1  # and that of its Python object

    def segment(self, storage: int) -> int:
        """A segment that computes it again."""
        way = self._find_way(storage)
        assert way is not None
        leaves = tuple(leaf.id for leaf in way.recording.leaves)
        self._segments.append(Segment(ops=tuple(way.recording.calls), outputs=(storage,), leaves=leaves))
        return len(self._segments) - 1

    def _find_way(self, storage: int) -> Way | None:
        way = self._ways.get(storage)
        if way is None or not way.is_open():
            way = self._ways[storage] = find_way(self._bound[storage])
        return way

    # -- actions --------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: Sequence[Action], later: Sequence[Action] = ()) -> None:
        """As in any step; while a chain is computed, what its later links read may not leave."""
        if not actions:
            return
        pinned: Counter[int] = Counter()
        for action in actions:
            if isinstance(action, Recompute):
                pinned.update(self._segments[action.segment].leaves)
        for action in actions:  # links of a chain may go once they were read; what nothing here reads is needed
            if isinstance(action, Recompute):
                pinned.update(output for output in action.outputs if not pinned[output])
            elif isinstance(action, Reload) and not pinned[action.storage]:
                pinned[action.storage] = 1
        self._pinned.append(pinned)
        try:
            super()._carry_out(actions, later)
        finally:
            self._pinned.pop()

    def _reload(self, residence: Residence) -> None:
        if residence.ghost is None or residence.ghost() is None:
            self._make_room(self.nbytes(residence.id), f"a reload of {residence.nbytes} bytes")
        super()._reload(residence)

    def _recompute(self, action: Recompute) -> None:
        nbytes = sum(self.account.round(self._gone[storage].nbytes) for storage in action.outputs)
        self._make_room(nbytes, f"a replay of {len(self._segments[action.segment].ops)} ops")
        self.account.reserve(nbytes)
        begin = time.perf_counter()
        try:
            super()._recompute(action)
        finally:
            self.account.reserve(-nbytes)
        self._replay_seconds += time.perf_counter() - begin
        self._watch_thrashing()
        for leaf in self._segments[action.segment].leaves:
            self._pinned[-1][leaf] -= 1

    def _watch_thrashing(self) -> None:
        busy = max(NOT_LONG, self.historian.busy_seconds)
        if self._replay_seconds > ENOUGH * busy:
            raise Thrashing(self._replay_seconds, self.historian.busy_seconds, self._budget_bytes)
        if self._replay_seconds > WORTH_SAYING * busy and not self._has_said:
            self._has_said = True
            logger.warning("%s", Thrashing(self._replay_seconds, self.historian.busy_seconds, self._budget_bytes))

    def _prepare_replay(self, residence: Residence) -> bool:
        way = self._find_way(residence.id)
        if way is None or not self._may_move(residence.id):
            return False
        self._hold_recording(residence, way.recording)
        self._gone[residence.id] = way
        return True

    def _forget_recording(self, residence: Residence) -> None:
        self._gone.pop(residence.id, None)
        super()._forget_recording(residence)

    def _free_if_unused(self, residence: Residence) -> None:
        storage = residence.id
        super()._free_if_unused(residence)
        if residence.id < 0:
            self._ways.pop(storage, None)  # it keeps what it starts from

    def _settle(self, storages: Iterable[Residence]) -> None:
        """Compute what was dropped while that can still be done."""
        dropped = [each.id for each in storages if each.recording is not None]
        if dropped:
            self._carry_out(self._machine.evict(dropped))

    def about_to_write(self, tensor: torch.Tensor) -> None:
        """An op will write to a tensor. What is to be computed from its present contents is computed now."""
        residence = self._find_written(tensor)
        if residence is not None and residence.readers:
            with self._lock:
                self._settle(list(residence.readers))

    def finish(self) -> None:
        """The step is over: nobody watches writes from now on, and nobody makes room."""
        with self._lock:
            try:
                self._settle(list(self._bound.values()))
            except Infeasible as error:
                # A graph that lives on must not rest on what may be written to. One replay after the other takes what
                # it takes, and is offloaded at once.
                logger.warning("what the step leaves behind does not fit: %s", error)
                self._budget_bytes = 1 << 62
                self._settle(list(self._bound.values()))
            self._ways.clear()
            self._machine.policy = CapacityFirst(self._may_move)
            self._budget_bytes = 1 << 62

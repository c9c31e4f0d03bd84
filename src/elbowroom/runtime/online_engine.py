"""One step within the budget: by its plan as long as it has one, and decided on as it goes as soon as it has none.

Asleep, a step follows the plan that it is expected to follow, and those of its ops are recorded that the plan wants to
replay. It wakes as soon as it is another one, or asks for more than the budget. From then on the machine is told
whenever room is short, and its policy says what leaves. Only what autograd alone holds can: what the program holds
stays.

A step that is awake without a plan is calm for as long as there is plenty of room: what autograd saves and needs is
put down, and machine and policy learn of it when room gets short. Most steps that fit cost no more than that.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from elbowroom._family import get
from elbowroom.errors import Infeasible
from elbowroom.hooks.ledger import Ledger
from elbowroom.hooks.storage_ids import Identities, is_shared
from elbowroom.ir.actions import Action, Recompute
from elbowroom.ir.events import StorageRestored
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.placement import CopySlot
from elbowroom.residency import policies
from elbowroom.residency.access_history import AccessHistory
from elbowroom.residency.capacity_first import Policy as CapacityFirst
from elbowroom.residency.machine import Machine, Policy, count_reads
from elbowroom.residency.online import AHEAD, Online
from elbowroom.residency.plan_policy import NEVER
from elbowroom.residency.plan_then_online import Policy as Guided
from elbowroom.runtime.account import NO_LIMIT, Account, load_native
from elbowroom.runtime.engine import Engine, Observer
from elbowroom.runtime.facts import StepFacts
from elbowroom.runtime.known import Known
from elbowroom.runtime.log import read_log
from elbowroom.runtime.memory_guard import MemoryGuard
from elbowroom.runtime.patience import Patience
from elbowroom.runtime.replays import count_bytes, is_exposed
from elbowroom.runtime.residence import Residence
from elbowroom.runtime.transfers import Transfers
from elbowroom.runtime.waking import list_gone

logger = logging.getLogger(__name__)

RESTING = 0.25
"""Of the budget: while no more is taken nothing is recorded, if there was a step before and never too little room. Were
there too little this time, what was made by then could be offloaded, but not computed again."""


class OnlineEngine(Engine):
    """Runs one step under plans and a policy.

    Args:
        transfers, device, list_staying, min_bytes, spare_bytes, observer: as for `Engine`.
        budget_bytes: what the step may hold on the device.
        policy: a member of `residency.policies`; None to let everything go that may, as soon as it is saved.
        profile: of this machine.
        habits: what earlier steps taught; this one is added to it.
        list_residents: what is there before the step and after it.
        ledger: counts what the room holds, and asks for room.
        known: what the step may be, the likeliest first.
        is_awake: whether room is watched from the beginning; it has to be where nothing is known.

    Attributes:
        account: what is there.
    """

    _online: Online | None = None
    _guide: Guided | None = None
    _is_running = True

    def __init__(
        self,
        transfers: Transfers,
        device: torch.device,
        list_staying: Callable[[], Identities[bool]],
        min_bytes: int,
        *,
        budget_bytes: int,
        policy: str | None,
        profile: HardwareProfile,
        history: AccessHistory,
        list_residents: Callable[[], list[torch.Tensor]],
        ledger: Ledger,
        known: Sequence[Known] = (),
        is_awake: bool = True,
        spare_bytes: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(
            transfers, device, Account(ledger, profile.alignment_bytes), list_staying, min_bytes,
            known=known, spare_bytes=spare_bytes, observer=observer,
        )  # fmt: skip
        self._known = known
        self._budget_bytes, self.is_awake = budget_bytes, is_awake
        self._facts = StepFacts(self.account, self._bound, profile.links[0], self._may_move, budget_bytes)
        self._segments, self._pinned = self._facts.segments, self._facts.pinned
        self._segments += () if is_awake else known[0].plan.segments
        self._planned_segments, self._stalled_before = len(self._segments), transfers.stall_seconds
        self._patience = Patience(budget_bytes)
        decider: Policy = CapacityFirst(self._may_move)
        if policy is not None:
            decider = self._online = get(policies, policy, "Policy")(self._facts, history)
        if self._online is not None and known:
            decider = self._guide = Guided(self._online, known[0].plan, is_awake=is_awake)
        self._machine = Machine(decider, self._segments)
        self._facts.state = self._machine.state
        self._guard = MemoryGuard(self.account, self._machine, self._facts, list_residents, device, self)
        self._facts.clock = self.watcher
        self._records = policy is not None
        self._resting_bytes = int(RESTING * budget_bytes) if history.may_rest and not known else 0
        self._guard.count_residents()
        self._facts.base_bytes = self.account.live_bytes
        self.account.limit_bytes = budget_bytes
        if is_awake:
            self._record()
            self._spare_bytes = None
        elif self._segments:
            self.watcher.follow(*known[0].wanted)
        self._is_calm = is_awake and self._online is not None and self._guide is None and self._online.may_wait()
        if self._is_calm:
            self.account.limit_bytes -= int(AHEAD * budget_bytes)
            self._log(frozenset(), NEVER)
        elif not is_awake and self._guide is not None and observer is None:
            self._touched = known[0].touched
            self._log(self._touched, self._guide.due_tick)
        elif not is_awake:
            self._log(frozenset(), -1)

    @property
    def followed(self) -> int | None:
        """Which of the known steps it is; None if it is none."""
        followed = int(self.saved.followed)
        return None if followed < 0 else followed

    def _log(self, touched: frozenset[int], due_tick: int) -> None:
        self._is_logging, self._due_tick = True, due_tick
        self.saved.log(touched, due_tick)

    def begin(self) -> None:
        """The ledger counts from now on: it asks for room."""
        self.account.set_limit(self.account.limit_bytes)

    def _record(self) -> None:
        """From now on, what may have to be replayed is recorded."""
        if self._records:
            self.watcher.record(self._resting_bytes, self._min_bytes)
        else:
            self.watcher.stop_recording()

    # -- waking up ------------------------------------------------------------------------------------------------

    def leave_trace(self, why: str) -> None:
        """The step is another one that is known, or none: its plan, if it has one, decides from now on."""
        with self._lock:
            followed = self.followed
            logger.debug("the step left its trace: %s", why)
            if followed is None:
                self.drift = why
            if self._guide is None:
                return
            self._guide.follow(None if followed is None else self._known[followed].plan, self.saved.tick)
            if not self.is_awake:
                self.is_awake, self._spare_bytes = True, None
                self._record()
                self._guard.count_residents()
                self._catch_up()
                self._guide.wake(list_gone(self._machine, self._bound))

    def _catch_up(self) -> None:
        """Tell who decides what was logged so far; from now on, of everything at once."""
        entries, self._is_logging = self.saved.tell(), False
        if self._is_calm:
            self._is_calm = False
            self.account.set_limit(self._budget_bytes)
        self._touched, self._due_tick = None, -1
        assert self._online is not None
        self.saved.settle(self._make_handle)
        self._free_unused()
        for event, moment, nbytes in read_log(entries, self._facts.begin, self._bound):
            self._online.watch(event, moment, nbytes)

    def _find_copy_slot(self, storage: int) -> CopySlot | None:
        """Return where the copy of a storage that leaves now was planned to lie; None if nobody planned one."""
        return None if self.followed is None else self._known[self.followed].placement.find(storage, self.saved.tick)

    # -- room -----------------------------------------------------------------------------------------------------

    def free(self, requested_bytes: int, missing_bytes: int) -> bool:
        """Free memory for a request that would go over the limit, in whatever thread and op that comes.

        Returns:
            Whether to ask again; False once the step is over.

        Raises:
            Infeasible: everything that may leave has left, and there is not enough.
        """
        with self._lock:
            if not self._is_running:
                return False
            what = f"a request of {requested_bytes} bytes"
            if not self.is_awake:
                self.saved.leave(f"there is no room for {what}")
            self._drain()
            if self._is_logging:
                limit_bytes = self.account.limit_bytes
                self._catch_up()
                missing_bytes -= self.account.limit_bytes - limit_bytes
            if missing_bytes > 0:
                what = load_native().name_running_op() or what
                self._guard.evict(missing_bytes, requested_bytes, self._budget_bytes, what)
            return True

    def make_room_for(self, op: str) -> bool:
        """Free memory for an op that the device's allocator has refused. Returns and raises as `free`."""
        with self._lock:
            if not self._is_running:
                return False
            self.leave(f"there is no room for {op}")
            self._drain()
            if self._is_logging:
                self._catch_up()
            self._guard.evict(1, 0, self._budget_bytes, op)
            return True

    def _find_room(self, nbytes: int, what: str) -> None:
        """For what comes back: by its plan there is room for it, if the step takes no more than that."""
        if not self.is_awake and not self.account.has_room(nbytes):
            self.saved.leave(f"there is no room for {what}")
        self._guard.make_room(nbytes, what)

    def _may_move(self, storage: int) -> bool:
        """As in any step; while awake what outlives the step is marked, and need not be listed."""
        if not self.is_awake:
            return super()._may_move(storage)
        residence = self._bound.get(storage)
        if residence is None or residence.nbytes < self._min_bytes:
            return False
        if residence.may_move is None:
            home = residence.find_storage()
            residence.may_move = not residence.is_staying and (home is None or not is_shared(home))
        return residence.may_move

    # -- actions --------------------------------------------------------------------------------------------------

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Carry out what the machine answers."""
        self._carry_out(actions)

    def _carry_out(self, actions: Sequence[Action], later: Sequence[Action] = ()) -> None:
        """As in any step; while a chain is computed, what its later links read may not leave."""
        if not actions:
            return
        self._pinned.append(count_reads(actions, self._segments))
        try:
            super()._carry_out(actions, later)
        finally:
            self._pinned.pop()

    def _reload(self, residence: Residence) -> None:
        if residence.find_ghost() is None:
            self._find_room(self.account.round(residence.nbytes), f"a reload of {residence.nbytes} bytes")
        super()._reload(residence)

    def _keep_instead(self, residence: Residence, why: str) -> bool:
        is_kept = super()._keep_instead(residence, why)
        if not self.is_awake:
            return is_kept
        self._facts.stuck[residence.id] = residence.nbytes
        self._machine.policy.decide(StorageRestored(residence.id, self.saves + self.needs))  # it may be dropped
        return is_kept

    def _discard_copy(self, residence: Residence) -> None:
        self._facts.stuck.clear()  # there is room below again
        super()._discard_copy(residence)

    def _recompute(self, action: Recompute) -> None:
        missing = [each for each in map(self._bound.__getitem__, action.outputs) if each.find_ghost() is None]
        nbytes = count_bytes([each.recording for each in missing if each.recording is not None])
        self._find_room(nbytes, f"a replay of {len(self._segments[action.segment].ops)} ops")
        begin = time.perf_counter()
        super()._recompute(action)
        if self.is_awake:
            self._patience.replay_seconds += time.perf_counter() - begin
            self._watch_thrashing()
        for leaf in self._segments[action.segment].leaves:
            self._pinned[-1][leaf] -= 1

    def _wait(self, residence: Residence) -> None:
        super()._wait(residence)
        if self.is_awake:
            self._watch_thrashing()

    def _watch_thrashing(self) -> None:
        moves = self._transfers.stall_seconds - self._stalled_before
        self._patience.watch(moves, self.watcher.busy_seconds)

    def _prepare_replay(self, residence: Residence) -> bool:
        segment = self._machine.segment_of(residence.id)
        if segment is None or not self._may_move(residence.id):
            return False
        if segment < self._planned_segments:
            ops, leaves = self._segments[segment].ops, self._segments[segment].leaves
            recording = self.watcher.make_recording(list(ops), residence.record)
            is_whole = bool(recording.places) and {leaf.id for leaf in recording.leaves}.issubset(leaves)
            if not is_whole or not recording.is_open(self.account.table) or is_exposed(recording, residence):
                return False
        else:
            recording = self._facts.find_safe_recording(residence)
            if recording is None:
                return False
        self._hold_recording(residence, recording)
        return True

    def _find_due_tick(self) -> int:
        return -1 if self._guide is None else self._guide.due_tick

    def _free_if_unused(self, residence: Residence) -> None:
        storage = residence.id
        super()._free_if_unused(residence)
        if residence.id < 0:
            self._facts.forget(storage)

    def _settle(self, storages: Iterable[Residence]) -> None:
        """Compute what was dropped while that can still be done."""
        self._carry_out(self._machine.evict([each.id for each in storages if each.recording is not None]))

    def about_to_write(self, tensor: torch.Tensor) -> None:
        """An op will write to a tensor. What is to be computed from its present contents is computed now, and nothing
        else will be: room is made for that, and for the op, before it writes."""
        residence = self._find_written(tensor)
        if residence is not None and residence.readers:
            with self._lock:
                if not self.is_awake:
                    self.saved.stop("an op writes to what a replay would read")
                self._settle(list(residence.readers))

    def finish(self) -> None:
        """The step is over: nobody watches writes from now on, and nobody makes room."""
        # Room for what is settled comes from moving the rest.
        self._patience.is_endless, self._facts.allows_drops = True, False
        with self._lock:
            self._drain()
            if self._is_calm:
                self.saved.end()
            dropped = [residence for residence in self._bound.values() if residence.recording is not None]
            if not self.is_awake and not dropped:
                self.account.limit_bytes = NO_LIMIT  # it goes on as planned, if there is anything left of it
                self._is_running = False
                self._free_unused()
                if not self._bound:
                    self._break_cycles()
                return
            if dropped:
                self.saved.stop("it ended before its backward pass did")
            try:
                # A graph that lives on must not rest on what may be written to.
                self._settle(dropped)
            except Infeasible as error:
                self.given_up = why = str(error)  # not the error itself, whose frames hold the step
                logger.warning("what the step leaves behind was given up, as there is no room to compute it: %s", why)
            finally:
                # Where that failed, an error in a later backward pass is better than a replay of what is no more.
                for residence in list(self._bound.values()):
                    self._forget_recording(residence)
                self.account.limit_bytes = NO_LIMIT
                self._is_running = False
                self._break_cycles()

    def _break_cycles(self) -> None:
        """With the last handle this goes at once, and thousands of objects with it: the garbage collector is slow."""
        may_move = weakref.WeakMethod(self._may_move)
        self._machine.policy = CapacityFirst(lambda storage: (ask := may_move()) is not None and ask(storage))
        self._guide = None
        self._facts.close()
        self.watcher.close()

"""One step within the budget: by its plan as long as it has one, and decided on as it goes as soon as it has none.

Asleep, a step follows the plan that it is expected to follow, whose bytes are known; what ops make is counted, and
those are recorded that the plan wants to replay. As soon as the step is another one it wakes, or takes more than its
plan has room for. From then on room is made before each op, each reload and each replay: the machine is told of the
pressure, and its policy says what leaves. Only what autograd alone holds can: what the program holds stays.

A step that is awake without a plan is calm for as long as there is plenty of room: what autograd saves and needs is
put down, and machine and policy learn of it when room gets short. Most steps that fit cost no more than that.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from elbowroom._family import get
from elbowroom.errors import Infeasible
from elbowroom.hooks.estimates import UNSEEN_BYTES, Estimate, Estimates
from elbowroom.hooks.hidden import Paused
from elbowroom.hooks.identity import Identities, is_shared
from elbowroom.ir.actions import Action, Recompute
from elbowroom.ir.events import StorageRestored
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.residency import policies
from elbowroom.residency.capacity_first import Policy as CapacityFirst
from elbowroom.residency.guided import Policy as Guided
from elbowroom.residency.habits import Habits
from elbowroom.residency.machine import Machine, Policy, count_reads
from elbowroom.residency.online import AHEAD, Online
from elbowroom.runtime.account import NO_LIMIT, Account
from elbowroom.runtime.calm import Calm
from elbowroom.runtime.engine import Engine
from elbowroom.runtime.facts import StepFacts
from elbowroom.runtime.follower import Follower, Known, Observer
from elbowroom.runtime.historian import Historian
from elbowroom.runtime.history import count_replay
from elbowroom.runtime.memory_guard import MemoryGuard
from elbowroom.runtime.past import Past
from elbowroom.runtime.patience import Patience
from elbowroom.runtime.recorder import Recorder
from elbowroom.runtime.residence import Residence
from elbowroom.runtime.transfers import Transfers
from elbowroom.runtime.waking import find_outside, list_gone
from elbowroom.runtime.watcher import Run

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
        estimates: what ops allocate; grows from step to step.
        profile: of this machine.
        habits: what earlier steps taught; this one is added to it.
        list_residents: what is there before the step and after it.
        adopt: as for `Account`.
        known: what the step may be, the likeliest first.
        is_awake: whether room is watched from the beginning; it has to be where nothing is known.

    Attributes:
        followed: which of the known steps it is; None if it is none.
        account: what is there.
        historian: sees every op.
    """

    account_class, historian_class, calm_class, past_class = Account, Historian, Calm, Past
    _online: Online | None = None
    _guide: Guided | None = None
    _is_running = True
    recorder: Recorder | None = None

    def __init__(
        self,
        transfers: Transfers,
        device: torch.device,
        list_staying: Callable[[], Identities[bool]],
        min_bytes: int,
        *,
        budget_bytes: int,
        policy: str | None,
        estimates: Estimates,
        profile: HardwareProfile,
        habits: Habits,
        list_residents: Callable[[], Iterable[torch.Tensor]],
        adopt: Callable[[torch.UntypedStorage], object],
        known: Sequence[Known] = (),
        is_awake: bool = True,
        spare_bytes: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(
            transfers, device, self.account_class(profile.alignment_bytes, adopt), list_staying, min_bytes,
            known=known, spare_bytes=spare_bytes, observer=observer,
        )  # fmt: skip
        self._known, self.followed = known, self._follower.followed
        self._budget_bytes = self._alarm_bytes = budget_bytes
        self._facts = StepFacts(self.account, self._bound, profile.links[0], self._may_move, budget_bytes)
        self._segments, self._pinned = self._facts.segments, self._facts.pinned
        self._segments += () if is_awake else known[0].plan.segments
        self._planned_segments, self._stalled_before = len(self._segments), transfers.stall_seconds
        self._patience = Patience(budget_bytes)
        decider: Policy = CapacityFirst(self._may_move)
        if policy is not None:
            decider = self._online = get(policies, policy, "Policy")(self._facts, habits)
        if self._online is not None and known:
            decider = self._guide = Guided(self._online, known[0].plan, is_awake=is_awake)
        self._machine = Machine(decider, self._segments)
        self._facts.is_on_device = self._machine.is_on_device
        self._guard = MemoryGuard(self.account, self._machine, self._facts, list_residents, self._is_here, self)
        self.watcher = self.historian = self._facts.clock = self.historian_class(
            self, self.account, estimates, device, self.about_to_write, self.written, is_recording=policy is not None,
            resting_bytes=int(RESTING * budget_bytes) if habits.may_rest and not known else 0, least_bytes=min_bytes,
        )  # fmt: skip
        self.account.reserve(UNSEEN_BYTES)
        self._guard.count_residents()
        self._facts.base_bytes = self.account.live_bytes
        if is_awake:
            self.account.limit_bytes, self._spare_bytes = budget_bytes, None
        else:
            if self._segments:
                self.recorder = Recorder(known[0].trace, known[0].plan, self.account.see, self._leave_ops)
            self.historian.sleep(None if self.recorder is None else self.recorder.run)
        self._paused = Paused([self.historian] if observer is None else [self.historian, observer])
        is_calm = is_awake and self._online is not None and self._guide is None and self._online.may_wait()
        if is_calm or not is_awake:
            self._past = past = self.past_class(self._facts.begin, self.historian, self.account)
        if observer is None and not is_awake and self._guide is not None:
            self._touched, self._due_tick = known[0].plan.find_touched(), self._guide.due_tick
        if is_calm:
            self.account.limit_bytes -= int(AHEAD * budget_bytes)
            self._calm = self.calm_class(past, self.account, self.sizes, self._is_here, self._paused, self._own_ids)

    @property
    def is_awake(self) -> bool:
        """Whether room is watched."""
        return self.account.limit_bytes < NO_LIMIT

    # -- waking up ------------------------------------------------------------------------------------------------

    def _leave_ops(self, why: str) -> Run:
        with self._lock:
            self._follower.leave(why)
        return self.historian.run

    def stays_asleep(self, ops: int, func: Any, estimate: Estimate) -> bool:
        """Saves and needs do not tell of all that a step takes, nor, where the program's own hooks take what is saved,
        that nothing will leave."""
        if not self.account.has_room(estimate.nbytes, self._alarm_bytes):
            # What an op takes inside itself is known as an upper bound, and better where it is the plan's own.
            live_bytes = self.account.live_bytes + estimate.result_bytes
            if not self._follower.foresees(str(func), live_bytes):
                self._leave_ops(f"{func} takes {estimate.nbytes} bytes, for which its plan has no room")
        elif ops > self._follower.due_ops:
            self._leave_ops(f"{ops} ops without a save that should have come before")
        return not self.is_awake

    def _leave_trace(self, why: str) -> None:
        """The step is another one that is known, or none: its plan, if it has one, decides from now on."""
        followed = self.followed = self._follower.followed
        logger.debug("the step left its trace: %s", why)
        if followed is None:
            self.drift = why
        if self._guide is None:
            return
        self._guide.follow(None if followed is None else self._known[followed].plan, self._follower.tick)
        if not self.is_awake:
            find_outside(self._bound, self._known[0].trace)
            self.account.limit_bytes, self._spare_bytes = self._budget_bytes, None
            self.historian.stand_in = None
            self._guard.count_residents()
            self._catch_up()
            self._guide.wake(list_gone(self._machine, self._bound))

    def _catch_up(self) -> None:
        """Tell who decides what was put down so far; from now on, of everything at once."""
        past, self._past = self._past, None
        if self._calm is not None:
            self._own_ids, self._calm, self.account.limit_bytes = self._calm.ids, None, self._budget_bytes
        self._touched, self._due_tick = None, -1
        assert self._online is not None and past is not None
        self._settle_in(past.list_guests())
        for event, moment, nbytes in past.tell(self._bound):
            self._online.watch(event, moment, nbytes)

    # -- room -----------------------------------------------------------------------------------------------------

    def take_room(self, nbytes: int, func: Any) -> None:
        """Make room for what an op is about to allocate, and reserve it until the op has run.

        Raises:
            Infeasible: everything that may leave has left, and there is not enough.
        """
        while not self.account.reserve_within(nbytes):
            with self._lock:
                self._drain()
                if self._past is not None:
                    self._catch_up()
                self._guard.make_room(nbytes, str(func))

    def free(self, requested_bytes: int, missing_bytes: int) -> bool:
        """Free memory for a request that would go over the budget, in whatever thread and op that comes.

        Returns:
            Whether anything has left; False once the step is over.

        Raises:
            Infeasible: everything that may leave has left, and there is not enough.
        """
        with self._lock:
            if not self._is_running:
                return False
            if not self.is_awake:
                self._follower.leave(f"{requested_bytes} bytes were asked for, for which its plan has no room")
            self._drain()
            if self._past is not None:
                self._catch_up()
            what = f"a request of {requested_bytes} bytes"
            self._guard.evict(missing_bytes, requested_bytes, self._budget_bytes, what)
            return True

    def _find_room(self, nbytes: int, what: str) -> None:
        """For what comes back: by its plan there is room for it, if the step takes no more than that."""
        if not self.is_awake and not self.account.has_room(nbytes, self._alarm_bytes):
            self._follower.leave(f"there is no room for {what}")
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
        nbytes = count_replay(missing, self.account.round)
        self._find_room(nbytes, f"a replay of {len(self._segments[action.segment].ops)} ops")
        self.account.reserve(nbytes)
        begin = time.perf_counter()
        try:
            super()._recompute(action)
        finally:
            self.account.reserve(-nbytes)
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
        self._patience.watch(moves, self.historian.busy_seconds)

    def _prepare_replay(self, residence: Residence) -> bool:
        segment = self._machine.segment_of(residence.id)
        if segment is None or not self._may_move(residence.id):
            return False
        if segment < self._planned_segments:
            assert self.recorder is not None
            recording = self.recorder.make_recording(self._segments[segment].ops, residence)
            if (
                not recording.calls
                or not recording.is_current()
                or any(leaf.id < 0 or not leaf.views for leaf in recording.leaves)
                or any(each.is_exposed() for each in (residence, *recording.leaves))
            ):
                return False
        else:
            way = self._facts.find_safe_way(residence)
            if way is None:
                return False
            recording = way.recording
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
        if (residence := self._find_written(tensor)) is None:
            return
        residence.version += 1
        if residence.readers:
            with self._lock:
                if not self.is_awake:
                    self._follower.stop("an op writes to what a replay would read")
                self._settle(list(residence.readers))

    def finish(self) -> None:
        """The step is over: nobody watches writes from now on, and nobody makes room."""
        # Room for what is settled comes from moving the rest.
        self._patience.is_endless, self._facts.may_drop = True, False
        with self._lock:
            self._drain()
            if self._calm is not None:
                self._calm.end()
            dropped = [residence for residence in self._bound.values() if residence.recording is not None]
            if not self.is_awake and not dropped:
                self._alarm_bytes = NO_LIMIT  # it goes on as planned, if there is anything left of it
                self._is_running = False
                self._free_unused(() if self._past is None else self._past.list_guests())
                if not self._bound:
                    self._break_cycles()
                return
            if dropped:
                self._follower.stop("it ended before its backward pass did")
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
        self._follower = Follower((), self._min_bytes, self._bound, lambda why: None)
        self._guide = self.recorder = None
        self._facts.close()
        self.historian.close()

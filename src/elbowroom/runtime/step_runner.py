"""One training step within its budget, from the first op to the last backward pass through its graph.

The extension calls the runner when autograd saves or needs a tensor that may have to move, when the plan has something
to do at that tick, and when an op writes to such a tensor. The ledger calls it when there is no room for a request. The
runner tells the machine, and has an executor perform the machine's answers. `phase.py` has the phases of a step.

Each step has its own runner, which autograd's packed tensors keep alive: a backward pass can come late, twice or never.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from elbowroom._family import get
from elbowroom.errors import Infeasible
from elbowroom.hooks.compiled_regions import undisturbed
from elbowroom.ir.events import StorageNeeded, StorageSaved
from elbowroom.residency import policies
from elbowroom.residency.access_history import AccessHistory
from elbowroom.runtime.action_executor import ActionExecutor
from elbowroom.runtime.candidate import Candidate
from elbowroom.runtime.deferred_events import DeferredEvents
from elbowroom.runtime.device_limit import DeviceLimit
from elbowroom.runtime.event_log import NEEDED, NO_STORAGE, SAVED
from elbowroom.runtime.locks import make_lock
from elbowroom.runtime.memory_guard import MemoryGuard
from elbowroom.runtime.observer import Observer
from elbowroom.runtime.packed_tensor import PackedTensor
from elbowroom.runtime.phase import Phase
from elbowroom.runtime.planned_moves import PlannedMoves
from elbowroom.runtime.save_handles import SaveHandles
from elbowroom.runtime.saved_storage import SavedStorage
from elbowroom.runtime.state_moves import is_followed
from elbowroom.runtime.step_context import StepContext
from elbowroom.runtime.step_environment import StepEnvironment
from elbowroom.runtime.step_moves import StepMoves
from elbowroom.runtime.step_policy import StepPolicy
from elbowroom.runtime.step_state import make_state
from elbowroom.runtime.step_storages import load_native
from elbowroom.runtime.thrash_guard import ThrashGuard
from elbowroom.runtime.watching import start_watching
from elbowroom.runtime.write_guard import WriteGuard

logger = logging.getLogger(__name__)


@undisturbed
class StepRunner:
    """Runs one step.

    Args:
        phase: in which the step begins. FOLLOWING_PLAN needs a candidate; UNPRESSURED means that there is none. In
            MANAGED, the plan of the first candidate is followed as well.
        environment: of the steps of the room.
        candidates: steps that this one may be, the likeliest first.
        spare_bytes: of the budget that the plan leaves free, beside what the program holds.
        is_plan_proven: whether a step has followed the plan to its end, within the budget.
        observer: told of all saves, needs and releases.
        skipped_ops: ops of the step that have run before, without the runner.

    Attributes:
        state: of the step.
        sliced_ops: runs ops in slices; None if no op may.
    """

    def __init__(
        self,
        phase: Phase,
        environment: StepEnvironment,
        *,
        candidates: Sequence[Candidate] = (),
        spare_bytes: int = 0,
        is_plan_proven: bool = True,
        observer: Observer | None = None,
        skipped_ops: int = 0,
    ) -> None:
        self.state = make_state(phase, environment, candidates, self)
        self._machine = self.state.machine
        self._saved_tensors = self.state.saved_tensors
        self._observer = observer
        self._pager = environment.pager
        self.sliced_ops = environment.sliced_ops
        # The lock knows which thread holds it: the garbage collector may free packed tensors in the middle of a move.
        self._lock = make_lock()
        self._guard = MemoryGuard(self.state, environment, spare_bytes, is_plan_proven=is_plan_proven)
        if phase is not Phase.FOLLOWING_PLAN:
            self.state.storages.mark_persistent()
        self._context = StepContext(self.state, environment)
        # From a captured step, in which everything leaves, the policy learns nothing.
        history = environment.history
        if phase is Phase.CAPTURING and not history.is_bounded:
            history = AccessHistory()
        online = get(policies, environment.policy, "Policy")(self._context, history)
        self._policy = StepPolicy(self.state, self._context, online)
        thrash = ThrashGuard(self.state, environment)
        self._handles = handles = SaveHandles(self.state, weakref.WeakMethod(self.retire))
        self._executor = ActionExecutor(
            self.state, self._context, self._guard, thrash, environment.transfers, handles, max(0, spare_bytes)
        )
        self._policy.begin()
        follows = phase is Phase.FOLLOWING_PLAN and observer is None and bool(candidates[0].copied_storages)
        planned = PlannedMoves(self.state, self._guard, environment.transfers) if follows else None
        self._moves = StepMoves(self.state, self._policy, self._executor, planned, handles, observer)
        self._writes = WriteGuard(self.state, self._lock, self._executor, handles, self._moves)
        is_observed = observer is not None
        self._deferred = DeferredEvents(self.state, self._policy, self._executor, handles, is_observed=is_observed)
        self._state_moves = start_watching(
            self.state, environment, self._moves, self._lock, observer,
            may_rest=history.may_rest and not candidates, skipped_ops=skipped_ops,
        )  # fmt: skip

    def begin(self) -> None:
        """Have the ledger ask for room from now on."""
        self.state.activity_log.begin()
        if self._state_moves is not None:
            self._state_moves.begin()
        self._guard.limit_requests()

    @property
    def device_limit(self) -> DeviceLimit:
        """Object that makes room for ops; made for each call, since a cycle would outlive the step."""
        prepare = self._prepare_to_evict
        return DeviceLimit(
            self.state, self._guard, self._executor, self._lock, prepare, self._deferred, self._state_moves
        )

    # -- what the extension calls ---------------------------------------------------------------------------------

    def save(self, index: int, tensor: torch.Tensor, saved: SavedStorage | None) -> PackedTensor | None:
        """Take a tensor that autograd saves.

        Args:
            index: position among the saves of the step.
            saved: storage of the tensor; None if it is not a plain block of bytes on the device.

        Returns:
            The object that stands for the tensor. None if the tensor stays as it is, and nothing has to be done when
            autograd gives it up.
        """
        with self._lock:
            self._drain()
            self._deferred.catch_up()
            if self._observer is not None:
                self._observer.saved(tensor, index)
            tensors = self._saved_tensors
            record: Any = None if saved is None else saved.record
            tick = tensors.follow_save(index, record)
            if saved is None or (tensors.is_persistent(index) if tensors.followed >= 0 else record.is_staying):
                tensors.note(SAVED, NO_STORAGE, tick, 0)
                self._moves.make(StorageSaved(NO_STORAGE, tick))
                return None if self._observer is None else self._handles.pack(index, None, tensor._version)
            if record.id < 0:
                record.id = tensors.make_id()
            storage = record.id
            tensors.note(SAVED, storage, tick, record.nbytes)
            is_following = self.state.phase.follows_plan and self._observer is None
            if is_following and storage not in self.state.candidates[0].plan_storages:
                self._moves.make(StorageSaved(NO_STORAGE, tick))
                return None
            if storage in self._moves.copied_storages:
                self._moves.take_over()  # the extension was not sure whether the step is that of the trace
            self.state.storages.by_id[storage] = saved
            saved.add_view(index, tensor)
            packed = self._handles.pack(index, saved, tensor._version)
            del tensor
            self._moves.make(StorageSaved(storage, tick))
            if not saved.views[index].is_released and not self._machine.is_on_device(storage):
                saved.release()  # it had left before, and the program alone still holds it
            if self._observer is not None and saved.find_storage() is not None and self._context.may_move(storage):
                self._observer.stays(index, functools.partial(self._context.is_held, saved))
            return packed

    def need(self, index: int, save: Any) -> torch.Tensor | None:
        """Return a saved tensor that autograd asks for; None if the extension has it, because it stayed as it was.

        Args:
            index: position among the needs of the step.
            save: of the extension; the save of the tensor.

        Raises:
            RuntimeError: the tensor was modified in place after it was saved.
        """
        with self._lock:
            self._drain()
            self._deferred.catch_up()
            tick = self._saved_tensors.follow_need(index, save.index)
            packed: PackedTensor | None = save.handle
            saved: SavedStorage | None = save.residence if packed is None else packed.residence
            given: torch.Tensor | None = None
            if packed is None or saved is None:
                self._saved_tensors.note(NEEDED, NO_STORAGE if saved is None else saved.id, tick, 0)
                self._moves.make(StorageNeeded(NO_STORAGE, tick))
            else:
                # Versions first, before anything moves: a step that is refused must leave everything as it is.
                saved.views[packed.index].check_version(packed.version)
                self._saved_tensors.note(NEEDED, saved.record.id, tick, 0)
                given = self._moves.serve(packed, saved, tick)
            self._deferred.set_marks()
            if self._observer is not None:
                self._observer.needed(save.index, save.tensor if given is None else given)
            return given

    def move(self, tick: int) -> None:
        """Make the moves that are due at an event that was only logged."""
        with self._lock:
            self._drain()
            if self._deferred.are_deferred:
                self._deferred.decide()
            else:
                self._moves.make_due(tick)

    def bring(self, save: Any, storage: int, tick: int) -> torch.Tensor:
        """Return a saved tensor whose storage is not there, and make the moves that are due."""
        with self._lock:
            self._drain()
            return self._moves.bring(save, storage, tick)

    def leave(self, why: str) -> None:
        """Leave the plan: the ops of the step are not those of its trace."""
        with self._lock:
            self._saved_tensors.leave(why)

    def leave_trace(self, why: str) -> None:
        """Go on by the plan of another candidate, or by none: the step is not the trace that it followed."""
        with self._lock:
            logger.debug("the step left its trace: %s", why)
            followed = self._saved_tensors.followed
            if followed < 0:
                self.state.drift = why
            phase = self.state.phase
            if self._state_moves is not None:
                self._state_moves.leave()
            if phase is Phase.FOLLOWING_PLAN:
                self._start_managing()
            elif phase is Phase.MANAGED:
                self._policy.manage(followed, self._saved_tensors.tick)
                self._deferred.begin(followed)
            elif phase is Phase.DRAINING:
                self._close()

    def move_state(self, position: int, is_before: bool) -> None:
        """Make the moves of model state that the plan has before or after an op.

        Args:
            position: of the op in the trace; -1 if the step's ops are not those of the trace any more.
        """
        if self._state_moves is None or self.state.phase is not Phase.FOLLOWING_PLAN:
            return
        if position < 0:
            self._state_moves.leave()
        else:
            self._state_moves.make(position, is_before=is_before)

    def about_to_write(self, tensor: torch.Tensor) -> None:
        """Compute what depends on the present contents of a tensor that an op is about to write to."""
        self._writes.about_to_write(tensor)

    def written(self, tensor: torch.Tensor) -> None:
        """Give up what the previous contents of a tensor were kept for: an op has written to it."""
        self._writes.written(tensor)

    # -- what the ledger and the room call ------------------------------------------------------------------------

    def make_room(self, requested_bytes: int, missing_bytes: int) -> bool:
        """Free memory for a request that would go over the limit, in whatever thread and op that comes.

        Args:
            requested_bytes, missing_bytes: of the request, and of these bytes, those that do not fit into the limit.

        Returns:
            Whether to ask again; False if no budget holds any more.

        Raises:
            Infeasible: nothing more may leave, and there is not enough room.
        """
        with self._lock:
            is_following, spares_soon = self.state.phase is Phase.FOLLOWING_PLAN, is_followed(self._state_moves)
            if is_following and self._guard.move_state(missing_bytes, spares_soon=spares_soon):
                return True
            limit_bytes = self._guard.limit_bytes
            what = f"a request of {requested_bytes} bytes"
            if not self._prepare_to_evict(what, missing_bytes):
                return False
            missing_bytes -= self._guard.limit_bytes - limit_bytes
            if missing_bytes > 0:
                missing_bytes -= self._guard.move_state(missing_bytes, spares_soon=True)
            if missing_bytes > 0:
                what = load_native().name_running_op() or what
                actions = self._guard.evict(missing_bytes, requested_bytes, what)
                with self._guard.noting_moves():
                    self._executor.perform(actions)
            self._deferred.set_marks()
            return True

    def finish(self) -> None:
        """End the step: from now on no writes are seen, and no room is made."""
        state = self.state
        with self._lock:
            self._drain()
            self._moves.take_over()
            if self._policy.was_short():
                self._deferred.catch_up()
            dropped = [saved for saved in state.storages.by_id.values() if saved.recording is not None]
            if state.phase is Phase.FOLLOWING_PLAN and not dropped:
                state.enter(Phase.DRAINING)
                self._executor.free_unused()
                if not state.storages.by_id:
                    self._close()
                return
            if dropped:
                self._saved_tensors.stop("it ended before its backward pass did")
            state.enter(Phase.SETTLING)
            try:
                # A graph that lives on must not depend on storages that may be written to.
                self._writes.settle(dropped)
            except Infeasible as error:
                state.given_up = why = str(error)  # not the error itself, whose frames hold the step
                logger.warning("what the step leaves behind was given up, as there is no room to compute it: %s", why)
            finally:
                # Where that failed, an error in a later backward pass is better than a replay from other contents.
                for saved in list(state.storages.by_id.values()):
                    self._executor.forget_recording(saved)
                self._close()

    def retire(self) -> None:
        """Forget packed tensors that died. Called at any moment, in any thread, by the garbage collector too."""
        if self._lock._is_owned():
            return
        try:  # Ctrl-C may come between any two lines: the lock knows whether it is held, and a flag might not
            if self._lock.acquire(blocking=False):
                self._drain()
                self._lock.release()
        except BaseException:
            if self._lock._is_owned():
                self._lock.release()
            raise

    def _drain(self) -> None:
        """Forget the packed tensors that died."""
        retired = self._handles.retired
        while retired:
            index, saved = retired[0]
            if self._observer is not None:
                self._observer.save_released(index)
            if saved is not None:
                if saved.readers:
                    saved.storage = saved.find_storage()  # a replay will read it
                saved.discard_view(index)
                if not saved.views:
                    self._executor.free_if_unused(saved)
            retired.popleft()  # last: what an exception interrupts is repeated by the next call

    def _prepare_to_evict(self, what: str, missing_bytes: int) -> bool:
        """Have the policy decide from now on: there is no room for `what`. Returns False if no budget holds."""
        if not self.state.phase.has_budget:
            return False
        if self.state.phase.follows_plan:
            self.state.left_for_room = True
            self.state.missing_bytes = max(0, missing_bytes)
            self._saved_tensors.leave(f"there is no room for {what}")
        self._drain()
        self._deferred.catch_up()
        if self.state.phase is Phase.UNPRESSURED:
            self._start_managing()
        return True

    def _start_managing(self) -> None:
        """Tell the policy what was only logged so far, and have it decide from now on."""
        state = self.state
        entries = self._saved_tensors.tell()
        was_following = state.phase is Phase.FOLLOWING_PLAN
        state.enter(Phase.MANAGED)
        self._guard.limit_requests()
        if was_following:
            self.state.watcher.record(0, state.storages.min_bytes)
            state.storages.mark_persistent()  # again: there may be others by now
        followed = self._saved_tensors.followed
        self._moves.take_over_all(are_kept=self._deferred.may_begin(followed))
        self._executor.free_unused()
        self._policy.catch_up(entries)
        self._policy.manage(followed, self._saved_tensors.tick)
        self._deferred.begin(followed)

    def _close(self) -> None:
        """Let go of what a graph that lives on does not need. No reference cycle is left."""
        self.state.enter(Phase.CLOSED)
        self._saved_tensors.end()
        self._policy.close()
        self._context.close()
        self.state.watcher.close()

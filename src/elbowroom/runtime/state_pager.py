"""Decides when model state leaves memory, and watches ops so that it comes back before they use it.

The extension restores a storage that is away before an op uses it (`native/state_storages.h`), and
`hooks/exposed_memory.py` does so before Python's methods that access memory without an op; other accesses raise an
error.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from elbowroom.errors import NO_ROOM
from elbowroom.hooks.exposed_memory import is_shared
from elbowroom.hooks.ledger import Ledger
from elbowroom.hooks.storage_ids import get_plain_storage
from elbowroom.native import library
from elbowroom.ops.update_marks import begin_update
from elbowroom.runtime.other_threads import may_look
from elbowroom.runtime.paged_storages import PagedStorages
from elbowroom.runtime.sections import Sections
from elbowroom.runtime.transfers import Transfers
from elbowroom.runtime.update_groups import UpdateGroups
from elbowroom.runtime.watched_uses import WatchedUses, show_moves

SOON = 0.25
"""Share of a step's uses of state. What is used within so many is better kept than activations."""

WORTH_WATCHING = 8
"""Smaller state is not watched, as a share of the budget, unless a step was short of memory: little would be gained."""

COMING = 4
"""With Adam, parameters, gradients and optimizer state take four times the bytes of the parameters."""

LISTS = 8
"""An op over lists of tensors (of all gradients, say) takes items of this share of the budget at a time."""

WHOLE_LISTS = 1 << 60
"""Bytes at a time of an op over lists while no state leaves."""


def may_leave(state_bytes: int, budget_bytes: int) -> bool:
    """Return True if state of this size is worth moving within a budget."""
    return state_bytes > budget_bytes // WORTH_WATCHING


class StatePager:
    """Moves the state of one job.

    Args:
        device: device whose memory is limited. State elsewhere stays where it is.
        list_residents: returns parameters, gradients, buffers and optimizer state.
        optimizers: of the job. Those that can update a few parameters at a time do so while ops are watched.
        transfers: moves bytes to the tier below and back.
        ledger: counts bytes on the device.
        min_bytes: smaller storages stay on the device.
        moves_results: whether results of ops may leave although no state may.

    Attributes:
        sections: parts of storages that are away.
        storages: of the state, with the figures of what moved.
        is_active: whether ops are watched for their use of state. Otherwise all of it is in memory, beside the results
            of ops that ran in slices.
        follows_plan: whether the step's plan moves state, and is followed so far.
        budget_bytes: state that comes back replaces other state if more would be live; None before the first step, and
            after `close`.
    """

    def __init__(
        self,
        device: torch.device,
        list_residents: Callable[[], list[torch.Tensor]],
        optimizers: Sequence[Optimizer],
        transfers: Transfers,
        ledger: Ledger,
        min_bytes: int,
        *,
        moves_results: bool = True,
    ) -> None:
        self._native = library.load()
        self._device = device
        self._list_residents = list_residents
        self._ledger = ledger
        self._min_bytes = min_bytes
        self._held: dict[Any, Any] = {}  # storages whose address the program knows, until the next step begins
        self.budget_bytes: int | None = None
        self._thread = threading.get_ident()  # of the last step
        self._first_bytes: int | None = None  # state when the first step begins
        self._comes_first = False  # state leaves before activations, as there is more of it
        self._was_short = False
        own = weakref.ref(self)  # methods would make cycles that hold the job
        self._groups = UpdateGroups(
            optimizers,
            functools.partial(_find_budget, own),
            functools.partial(_begin_update, own),
        )
        self.storages = PagedStorages(transfers, ledger, functools.partial(_limit, own))
        self.sections = Sections(self.storages, transfers)
        self.is_active = False
        self._uses = WatchedUses(self.storages.table, may_watch=moves_results)
        self.follows_plan = False

    # -- what the room calls --------------------------------------------------------------------------------------

    def begin_step(
        self,
        budget_bytes: int,
        *,
        may_move: bool,
        is_planned: bool = False,
        is_unknown: bool = False,
        has_groups: bool = False,
    ) -> None:
        """Begin a step: move state out until what the job holds is within its budget.

        Args:
            may_move: whether the step may need state to leave. Ops are watched for that only if so, and if the state is
                large, or an earlier step had too little room.
            is_planned: whether the step's plan moves state. Then ops are watched in any case.
            is_unknown: whether no step like this one is known. Then ops are watched, so that their results can leave.
            has_groups: whether optimizers update a few parameters at a time although no state may leave.
        """
        self.budget_bytes = budget_bytes
        self._thread = threading.get_ident()
        self.follows_plan = False
        self.storages.refusal = ""
        for record in self._held:
            record.is_written = True  # by its address
        self._held.clear()
        live_bytes = self._ledger.live_bytes
        missing_bytes = live_bytes - budget_bytes
        is_watching = self._native.is_any_state_managed()
        self.storages.sweep()
        made = self.sections.list_made()  # in every step, since it forgets those that are gone
        self._comes_first = live_bytes + self.count_away() > budget_bytes // 2
        if missing_bytes > 0 or is_planned or (may_move and self.is_needed(budget_bytes)):
            self._activate()
        elif self.is_active and not self.count_away() and not made:
            self._deactivate()
        if has_groups:
            self._groups.begin()
        elif not self.is_active:
            self._groups.end()
        if is_unknown or (self.is_active and not is_planned):  # small state alone has nothing watched
            self._uses.begin(self)
        else:
            self._uses.end()
        if is_watching or self._native.is_any_state_managed():
            self._native.update_watching()  # the step may run in another thread than the last one
            self._native.limit_lists(budget_bytes // LISTS if self.is_active or made else WHOLE_LISTS)
            self.storages.table.begin_step()
        if missing_bytes > 0:
            self.make_room(missing_bytes)

    def watch_results(self) -> None:
        """Have results of the ops from here on be free to leave."""
        if self.budget_bytes is not None:  # else the room is closed
            self._uses.begin(self)

    def make_room_between_steps(self, missing_bytes: int) -> None:
        """Move state out of memory, `missing_bytes` if there are as many; what the next step uses last first."""
        self._activate()
        self._native.update_watching()
        self.make_room(missing_bytes)

    def make_room(self, missing_bytes: int, *, spares_soon: bool = False) -> int:
        """Move state out of memory, what is used last first.

        Args:
            missing_bytes: to free.
            spares_soon: leave what the next `SOON` of a step uses, and all of it while it takes less than half of the
                budget: then activations leave first.

        Returns:
            The bytes that were freed, which may be fewer.
        """
        if not self.is_active:
            self._was_short = True  # ops that run now are not known to use state: it can leave in the next step
            self.watch_results()
        if spares_soon and not self._comes_first:
            return 0
        with self.storages.lock:
            freed_bytes = self.storages.evict(self._choose(missing_bytes, spares_soon))
            if freed_bytes < missing_bytes and not spares_soon:
                freed_bytes += self.storages.cancel_reloads()
            return freed_bytes

    def begin_reload(self, storage: torch.UntypedStorage) -> None:
        """Begin bringing a storage back, if there is room. If not, it comes back when it is used."""
        record = self.storages.table.find(storage)
        if record is None or not record.is_away:
            return
        missing_bytes = self._ledger.live_bytes + record.nbytes - (self.budget_bytes or 0)
        if missing_bytes <= 0 or self.make_room(missing_bytes, spares_soon=True) >= missing_bytes:
            self.storages.begin_reload(record)

    def hold_storage(self, storage: torch.UntypedStorage, *, is_written: bool, is_lasting: bool) -> Any:
        """Bring a storage back if it is state that is away. See `exposed_memory.Restorer`.

        Raises:
            TierError, Infeasible: as for `PagedStorages.restore`.
        """
        table = self.storages.table
        if is_written:
            self.storages.unwritten.run_waiting()  # ops may wait that read it
        # A storage whose address is known must not be moved out as an op's argument either. A closed room moves none.
        adds = is_lasting and self.budget_bytes is not None and self._native.is_any_state_managed()
        record = table.add(storage) if adds else table.find(storage)
        if record is None:
            return None
        use = self._native.StateUse(record, is_written)
        if is_lasting:
            self._held.setdefault(record, use)
        return use

    def close(self) -> None:
        """Bring all state back, and end.

        Raises:
            TierError: as for `PagedStorages.restore_all`. Nothing is given up then, and the call can be repeated.
        """
        if sys.is_finalizing():
            return  # nothing can be read back any more, and no code is left to use it
        self.storages.sweep()
        self.budget_bytes = None
        self.storages.restore_all()
        self._deactivate()

    def count_away(self) -> int:
        """Return the bytes of state that are away."""
        return int(self.storages.table.count_away())

    def is_away(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether a storage is state that is away."""
        record = self.storages.table.find(storage)
        return record is not None and record.is_away

    def is_needed(self, budget_bytes: int) -> bool:
        """Tell whether state may have to leave: gradients and optimizer state may be to come."""
        if self._was_short or self.is_active:
            return True
        if self._first_bytes is None:
            unknown = self.storages.table.list_unknown(self._list_residents(), self._min_bytes)
            self._first_bytes = sum(each.untyped_storage().nbytes() for each in unknown if each.device == self._device)
        # Between steps, little but state is live.
        return may_leave(max(self._ledger.live_bytes, COMING * self._first_bytes), budget_bytes)

    # -- which state leaves ---------------------------------------------------------------------------------------

    def _choose(self, missing_bytes: int, spares_soon: bool) -> list[Any]:
        """Return storages that may leave, of at least `missing_bytes` if there are as many; the last used first."""
        table = self.storages.table
        soon = math.ceil(SOON * (table.former_events or table.events)) if spares_soon else 0
        if not spares_soon and self.is_active:
            self._note_new()  # gradients leave before what the next step uses
        while True:
            chosen: list[Any] = table.choose(missing_bytes, soon)
            shared = [each for each in chosen if (storage := each.storage) is not None and is_shared(storage)]
            for each in shared:
                table.forbid(each)
            if shared:
                continue
            is_enough = sum(each.nbytes for each in chosen) >= missing_bytes
            if is_enough or not self.is_active or not self._note_new():
                return chosen

    def _note_new(self) -> bool:
        """Have state that came since the last call, such as gradients, be free to leave. Return whether there is any.

        In a first step, the parameters of the last layers are used last.
        """
        if not may_look(self._thread):
            return False
        table = self.storages.table
        has_new = False
        for tensor in table.list_unknown(self._list_residents()[::-1], self._min_bytes):
            storage = get_plain_storage(tensor) if tensor.device == self._device else None
            if storage is not None and not is_shared(storage):
                has_new |= table.add(storage, is_movable=True) is not None
        return has_new

    def limit(self, nbytes: int) -> int | None:
        """Have other state leave before a storage comes back. Return the budget; None between steps."""
        if self.budget_bytes is None:
            return None
        missing_bytes = self._ledger.live_bytes + nbytes - self.budget_bytes
        if missing_bytes > 0:
            self.storages.evict(self._choose(missing_bytes, spares_soon=False))
        return self.budget_bytes

    # -- watching -------------------------------------------------------------------------------------------------

    def _activate(self) -> None:
        """Watch ops for their use of state, from now on."""
        if self.is_active:
            return
        show_moves(self)
        self._note_new()
        self._groups.begin()
        self.is_active = True  # last, so that an interrupted call can be repeated

    def _deactivate(self) -> None:
        """Watch no more. All state is in memory."""
        self._held.clear()
        self._uses.end()
        self._groups.end()
        self.storages.clear()
        self.is_active = False
        self._native.update_watching()

    def _hold(self, tensors: Sequence[torch.Tensor]) -> Sequence[object]:
        """Keep what an update uses in memory as long as the result lives, with room beside it.

        Raises:
            TierError, Infeasible: before the update begins, which would fail halfway otherwise.
        """
        if not tensors or not self.is_active:
            return ()
        held: Sequence[object] = self.storages.table.use(tensors)
        if self.follows_plan and not self.storages.refusal:
            return held
        nbytes = self._native.count_storage_bytes(tensors)
        missing_bytes = self._ledger.live_bytes + nbytes - (self.budget_bytes or 0)
        if missing_bytes > 0 and not self.follows_plan:
            self.make_room(missing_bytes)
        if self.storages.refusal:  # what should have left stays
            self.storages.require(nbytes, self.budget_bytes or 0)
        return held


def _find_budget(pager: weakref.ref[StatePager]) -> int | None:
    found = pager()
    return None if found is None else found.budget_bytes


def _begin_update(pager: weakref.ref[StatePager], tensors: Sequence[torch.Tensor]) -> Sequence[object] | None:
    """Begin an update, as for `GroupedStep`.

    Raises:
        TierError, Infeasible: there is no room, because the tier below has not taken all that was to leave.
    """
    found = pager()
    former = 0 if found is None else len(found._ledger.refusals)
    try:
        begin_update(tensors)  # as an op, so that plans bring them back, and keep them
        return () if found is None else found._hold(tensors)
    except NO_ROOM:
        if found is None or found.storages.refusal:
            raise
        del found._ledger.refusals[former:]  # the program gets no error
        return None


def _limit(pager: weakref.ref[StatePager], nbytes: int) -> int | None:
    found = pager()
    return None if found is None else found.limit(nbytes)

"""The budget of one step: whether there is room, what has to leave to make some, and the refusal if nothing may."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import distributed

from elbowroom.errors import Infeasible
from elbowroom.hooks.compiled_regions import is_in_region
from elbowroom.hooks.exposed_memory import is_shared
from elbowroom.hooks.storage_ids import get_any_storage, is_on
from elbowroom.hooks.unsharded_weights import is_gathered
from elbowroom.ir.actions import Action
from elbowroom.ir.events import PressureRaised
from elbowroom.residency.online import AHEAD
from elbowroom.runtime.error_frames import clear_frames
from elbowroom.runtime.other_threads import OtherThreads, may_look
from elbowroom.runtime.phase import Phase
from elbowroom.runtime.shortage import note_evidence
from elbowroom.runtime.step_environment import StepEnvironment
from elbowroom.runtime.step_state import StepState
from elbowroom.runtime.step_storages import load_native
from elbowroom.slicing.registry import list_rules
from elbowroom.units import format_bytes

ALLOCATING = ("a request of", "aten.empty", "aten.full", "aten.new_", "aten.ones", "aten.zeros")
"""Beginnings of what allocates a tensor: no op, or one that does nothing else."""


class MemoryGuard:
    """Keeps one step within its budget.

    Args:
        spare_bytes: of the budget that the plan leaves free, beside what the program holds; negative if it has no room.
        is_plan_proven: whether a step has followed the plan to its end, within the budget.

    Attributes:
        ledger: counts bytes on the device, and limits them.
    """

    def __init__(
        self, state: StepState, environment: StepEnvironment, spare_bytes: int = 0, *, is_plan_proven: bool = True
    ) -> None:
        ledger = environment.ledger
        self._state = state
        self._keeps_budget = is_plan_proven and spare_bytes >= 0
        self._device = environment.device
        self._budget_bytes = environment.budget_bytes
        self._list_residents = environment.list_residents
        self._complete_error = environment.complete_error
        self._thread = threading.get_ident()
        self.ledger = ledger
        self._pager = environment.pager
        self._native = load_native()
        self._counter = ledger if ledger.scope is None else ledger.scope  # on a CPU without a call of Python

    @property
    def limit_bytes(self) -> int:
        """Bytes from which on the ledger asks for room, in the present phase."""
        ahead_bytes = int(AHEAD * self._budget_bytes) if self._state.phase is Phase.UNPRESSURED else 0
        return self._budget_bytes - ahead_bytes

    def limit_requests(self) -> None:
        """Have the ledger ask for room, from now on, before a request that goes over the limit of the present phase."""
        phase = self._state.phase
        self.ledger.set_limit(self.limit_bytes, follows_plan=self.is_left_to_plan)
        if self._pager is not None and phase.has_budget and not phase.follows_plan:
            self._state.watcher.note_results(self._state.storages.min_bytes)
            if phase is Phase.MANAGED:
                self._pager.watch_results()
        if self.ledger.scope is None and phase.has_budget:
            moves_state = self._pager is not None and self._pager.is_active
            if not self.is_left_to_plan or moves_state:
                self._state.watcher.limit_bytes = self._budget_bytes

    @property
    def is_left_to_plan(self) -> bool:
        """True if the plan is known to keep the budget, so that it is not left for what an op may take."""
        return self._state.phase.follows_plan and self._keeps_budget

    def lift_limit(self) -> None:
        """Have the allocator refuse nothing that the device has, until `restore_limit`."""
        self.ledger.lift_limit()

    def restore_limit(self) -> None:
        """Have the allocator limit requests again."""
        self.ledger.restore_limit()

    def raise_limit(self) -> bool:
        """Leave out of the limit what the allocator cannot use, after a refusal. Return whether there was any."""
        return self.ledger.raise_limit()

    def count_missing(self, nbytes: int) -> int:
        """Return how many of `nbytes` do not fit beside the live bytes; 0 or less if there is room for all."""
        return self._counter.live_bytes + nbytes - self._budget_bytes if self._state.phase.has_budget else 0

    @property
    def _refusal(self) -> str:
        return "" if self._pager is None else self._pager.storages.refusal

    def move_state(self, missing_bytes: int, *, spares_soon: bool = False) -> int:
        """Move model state out of memory. Return the bytes freed. For the arguments see `StatePager.make_room`."""
        return 0 if self._pager is None else self._pager.make_room(missing_bytes, spares_soon=spares_soon)

    def is_paged(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether a storage leaves in place, as model state does, that of other rooms included."""
        return self._native.find_state(storage) is not None

    def count_away(self, storages: Iterable[torch.UntypedStorage]) -> int:
        """Return the bytes of those storages that have left in place. They come back when an op uses them."""
        if self._pager is None or not self._pager.is_active:
            return 0
        return sum({each._cdata: each.nbytes() for each in storages if self._pager.is_away(each)}.values())

    @contextlib.contextmanager
    def noting_moves(self) -> Iterator[None]:
        """Return a context in which saved tensors leave during an op, as its measured workspace must not tell."""
        before = self.ledger.live_bytes
        try:
            yield
        finally:
            self.ledger.note_move(self.ledger.live_bytes - before)

    def evict(self, missing_bytes: int, nbytes: int, what: str, *, waits: bool = True) -> list[Action]:
        """Return actions that free some of the bytes that an allocation misses; none if there is room for some without.

        Args:
            missing_bytes: of the `nbytes` that the allocation takes.
            what: allocates them: an op, or a description for the message.
            waits: whether to do all before it is refused: to wait for ops of other threads, as what they use cannot
                leave, and to move results that autograd has not saved.

        Raises:
            Infeasible: nothing more may leave.
        """
        live_bytes = self._counter.live_bytes
        others = OtherThreads()
        while (short_bytes := missing_bytes - (live_bytes - self._counter.live_bytes)) > 0:
            if actions := self._state.machine.feed(PressureRaised(short_bytes, self._state.events)):
                return actions
            if self.move_state(short_bytes):
                break
            if waits and not self._may_be_extension(what) and self._move_results(short_bytes):
                break
            if self._pager is None or not waits or not others.wait():
                raise self.refuse(short_bytes, nbytes, what)
        return []

    def _may_be_extension(self, what: str) -> bool:
        """Tell whether an allocation may be that of an extension in C++, which may hold addresses of other tensors.

        PyTorch gives up the GIL before it runs an op that Python calls, and where autograd computes gradients.
        """
        if not what.startswith(ALLOCATING):
            return False
        return what.startswith("a request") or is_in_extension() or self._native.began_with_gil()

    def repeat_refused(self, replay: Callable[[], None], list_reads: Callable[[], list[torch.UntypedStorage]]) -> None:
        """Run a replay, and again after each refusal of a request in it, with fewer results of ops in memory.

        None leave for a request in the middle of a replay, which looks like one of an extension. Before it they may.

        Args:
            list_reads: returns what the replay starts from, which stays. So each time there are fewer that may leave.
        """
        former = len(self.ledger.refusals)
        while True:
            try:
                replay()
                return
            except Infeasible as error:
                if is_in_extension() or self._native.began_with_gil():  # which may hold their addresses
                    raise
                with self.noting_moves():
                    if not self._move_results(error.needed_bytes - error.budget_bytes, list_reads()):
                        raise
                clear_frames(error)
            del self.ledger.refusals[former:]

    def _move_results(self, missing_bytes: int, spared: Sequence[torch.UntypedStorage] = ()) -> int:
        """Move out results of ops that the program or autograd's engine holds. Return the bytes freed.

        They leave in place, as model state does, and come back when an op uses them. The last resort: most are used
        soon. Those that autograd has saved as well come last.

        Args:
            spared: results that stay.
        """
        if self._pager is None or not self._native.is_any_state_managed():
            return 0
        spares_gradients = distributed.is_available() and distributed.is_initialized()  # their addresses are read there
        table, sections = self._state.storages.table, self._pager.sections
        freed_bytes = 0
        held_and_saved = []
        stays = {each._cdata for each in spared}
        for storage, may_be_gradient in self._state.watcher.list_results():
            if freed_bytes >= missing_bytes:
                return freed_bytes
            if storage._cdata in stays or self.is_paged(storage) or is_shared(storage) or not storage.resizable():
                continue
            saved = table.find(storage)
            if saved is not None and saved.is_persistent:
                continue
            if saved is not None and saved.record.id >= 0:
                held_and_saved.append((storage, saved))
            elif not (may_be_gradient and spares_gradients):
                table.stay(storage)  # if autograd saves it later, it goes on leaving in place
                freed_bytes += sections.page_out(storage, None)
        for storage, saved in held_and_saved:
            if freed_bytes >= missing_bytes:
                break
            freed_bytes += sections.page_out(storage, saved.copy)
        return freed_bytes

    def refuse(self, missing_bytes: int, nbytes: int, what: str) -> Infeasible:
        """Note that an allocation is refused. Return the error: a lower bound, as what comes after is not known."""
        listed = self._list_residents() if may_look(self._thread) else []
        residents = [each for each in listed if is_on(each, self._device)]
        storages = [storage for each in residents if (storage := get_any_storage(each)) is not None]
        here = [each for each in storages if self._pager is None or not self._pager.is_away(each)]
        blocks = {id(each): self._state.storages.round_up(each.nbytes()) for each in here}
        state_bytes = sum(blocks.values())
        in_the_way = [
            ("what the op asks for", nbytes),
            ("parameters, gradients and optimizer state that it uses or that do not leave", state_bytes),
        ]
        if stuck := self._state.stuck_bytes:
            in_the_way.append((f"what cannot leave since {self._state.refusal}", sum(stuck.values())))
        rest = self._budget_bytes + missing_bytes - sum(each for _, each in in_the_way)
        if rest > 0:
            in_the_way.append(("other tensors that are in use or that the program holds", rest))
        error = Infeasible(
            needed_bytes=self._budget_bytes + missing_bytes,
            budget_bytes=self._budget_bytes,
            op=what,
            is_whole_step=False,
            in_the_way=tuple(in_the_way),
            state_bytes=state_bytes,
            note=self._note(what, here),
        )
        self.ledger.refusals.append(f"{type(error).__name__}: {error.args[0]}")
        return note_evidence(error, self._complete_error)

    def _note(self, op: str, here: Sequence[torch.UntypedStorage]) -> str:
        notes = []
        moves_state = self._pager is not None and self._pager.is_active
        gathered = {id(each): each.nbytes() for each in here if is_gathered(each)}
        if gathered:
            notes.append(
                f"{format_bytes(sum(gathered.values()))} of the parameters are those that FSDP has gathered: shard "
                "smaller modules, with reshard_after_forward=True."
            )
        shared = {id(each): each.nbytes() for each in here if is_shared(each)} if moves_state else {}
        shared = {key: nbytes for key, nbytes in shared.items() if key not in gathered}
        if shared:
            notes.append(
                f"{format_bytes(sum(shared.values()))} of the state stay, since NumPy, another process or another "
                "tensor of a loaded file uses their memory: give the model and the optimizer copies (copy.deepcopy)."
            )
        if self._refusal:
            notes.append(f"Parameters, gradients or optimizer state stay, since {self._refusal}")
        if is_in_region():
            notes.append(
                "Compiled code runs as one op: what it reads and what it holds inside stays until it returns. Compile "
                "smaller parts, and leave an optimizer's step uncompiled."
            )
        least_bytes = self._state.storages.min_bytes
        if sum(each for each in self._state.saved_tensors.sizes if each < least_bytes) > self._budget_bytes // 2:
            notes.append(
                f"Many saved tensors are smaller than min_offload_bytes ({format_bytes(least_bytes)}), and stay: pass "
                "a smaller min_offload_bytes."
            )
        if op.startswith("aten.") and op not in list_rules():
            notes.append(f"{op} cannot run in slices.")
        return " ".join(notes)


def is_in_extension() -> bool:
    """Tell whether this thread computes gradients by code of an extension in C++."""
    node = torch._C._current_autograd_node()
    return node is not None and "CppNode" in node.name()


def explain_growth(
    requested_bytes: int, missing_bytes: int, budget_bytes: int, complete_error: Callable[[Infeasible], None]
) -> Infeasible:
    """Return the error that refuses a request in a step in which nothing may leave, since everything fitted so far."""
    error = Infeasible(
        needed_bytes=budget_bytes + missing_bytes,
        budget_bytes=budget_bytes,
        is_whole_step=False,
        op=f"a request of {requested_bytes} bytes",
        note="Nothing moves in this step, since it began like those in which everything fitted. The next one is "
        "watched from its beginning; with always_watch=True all are.",
    )
    return note_evidence(error, complete_error)

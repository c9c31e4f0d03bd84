"""The residency machine: where every saved storage is, and which actions are legal next.

               Offload           Wait, Release
    RESIDENT ----------> LEAVING -------------> AWAY
       ^  ^                 |                    |  Reload
       |  '-- need ---------'                    v
       |<------------- Wait ------------------ ARRIVING
       |
       |   Release (no copy: will be replayed)
       |----------------------------------------> DROPPED
       '<------------- Recompute -------------------'

A storage that came back from the tier below still has its copy there: releasing it again costs nothing.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from elbowroom.errors import InternalError
from elbowroom.ir.actions import Action, Offload, Recompute, Release, Reload, Wait
from elbowroom.ir.events import Event, PressureRaised, StorageNeeded, StorageRestored, StorageSaved
from elbowroom.ir.plan import Segment


class State(enum.Enum):
    """Where a storage is, as far as autograd's claim on it goes."""

    RESIDENT = enum.auto()
    LEAVING = enum.auto()  # on the device, and being copied to the tier below
    AWAY = enum.auto()
    ARRIVING = enum.auto()  # its room on the device is taken, its bytes are not all there
    DROPPED = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """Ask that a storage be let go without a copy; `segment` will bring it back."""

    storage: int
    segment: int


Intent = Offload | Release | Reload | Drop
"""What a policy may ask for. The machine turns it into legal actions, or into none."""


class Policy(Protocol):
    """Decides what should move. Pure: it sees events and nothing else."""

    def decide(self, event: Event) -> Iterable[Intent]:
        """What to do once `event` has been served."""
        ...


@dataclasses.dataclass(slots=True)
class _Record:
    state: State = State.RESIDENT
    copied: bool = False  # the tier below has, or is being given, its contents
    segment: int = -1  # replays it, if it is dropped


class Machine:
    """Keeps the state of every saved storage of one step.

    Args:
        policy: decides what leaves and what comes back early.
        segments: how dropped storages can be computed again; a list may grow while the step goes on.
    """

    def __init__(self, policy: Policy, segments: Sequence[Segment] = ()) -> None:
        self.policy = policy
        self._segments = segments
        self._records: dict[int, _Record] = {}

    def state(self, storage: int) -> State | None:
        """Where a storage is; None if it is not saved (any more)."""
        record = self._records.get(storage)
        return None if record is None else record.state

    def is_on_device(self, storage: int) -> bool:
        """Whether autograd's claim on a storage keeps it on the device; so it does where nothing is known of it."""
        record = self._records.get(storage)
        return record is None or record.state not in (State.AWAY, State.DROPPED)

    def segment_of(self, storage: int) -> int | None:
        """The segment that will bring a dropped storage back; None if it is not dropped."""
        record = self._records.get(storage)
        return record.segment if record is not None and record.state is State.DROPPED else None

    def feed(self, event: Event) -> list[Action]:
        """Take in one event.

        Returns:
            What the driver must do now, in this order, before it feeds the next event.

        Raises:
            InternalError: a storage is needed that was never saved or is already free.
        """
        actions: list[Action] = []
        storage = event.storage
        if isinstance(event, StorageSaved):
            self.add(storage)
        elif isinstance(event, StorageNeeded):
            record = self._records.get(storage)
            if record is not None and record.state is not State.RESIDENT:
                for restored in self._ensure(storage, actions):
                    if restored != storage:
                        self.policy.decide(StorageRestored(restored, event.tick))
        elif not isinstance(event, PressureRaised):
            self._free(storage, actions)
        for intent in self.policy.decide(event):
            self._intend(intent, actions)
        return actions

    def add(self, storage: int) -> None:
        """A storage was saved, and is on the device; the policy need not be told, or knows."""
        if storage not in self._records:
            self._records[storage] = _Record()

    def evict(self, storages: Iterable[int]) -> list[Action]:
        """What it takes to have these in the tier below, wherever they are; nobody planned that.

        What was dropped is computed while that can still be done, so that nothing depends on what comes next.
        """
        actions: list[Action] = []
        for storage in storages:
            leaving = [storage]
            if self.segment_of(storage) is not None:
                # What it was computed from goes again, too, or one after the other would stay.
                leaving = self._ensure(storage, actions)
            for each in leaving:
                self._intend(Offload(each), actions)
                self._intend(Release(each), actions)
        return actions

    def refuse(self, storage: int) -> None:
        """The driver could not let a storage leave the device: it stays, and nothing was lost."""
        record = self._records.get(storage)
        if record is not None:
            record.state, record.copied = State.RESIDENT, False

    def correct(self, storage: int, state: State, copied: bool) -> None:
        """The driver could not do what it was told: this is where a storage really is."""
        record = self._records.get(storage)
        if record is not None:
            record.state, record.copied = state, copied

    def _free(self, storage: int, actions: list[Action]) -> None:
        record = self._records.pop(storage, None)
        if record is None:
            return
        if record.state in (State.LEAVING, State.ARRIVING):
            actions.append(Wait(storage))  # its memory is in use by the transfer until then
        if record.state not in (State.AWAY, State.DROPPED):
            actions.append(Release(storage))

    def _intend(self, intent: Intent, actions: list[Action]) -> None:
        record = self._records.get(intent.storage)
        if record is None:
            return
        if isinstance(intent, Offload):
            if record.state is State.RESIDENT and not record.copied:
                record.state, record.copied = State.LEAVING, True
                actions.append(intent)
        elif isinstance(intent, Reload):
            if record.state is State.AWAY:
                record.state = State.ARRIVING
                actions.append(intent)
        else:
            self._release(intent, record, actions)

    def _release(self, intent: Release | Drop, record: _Record, actions: list[Action]) -> None:
        if record.state in (State.LEAVING, State.ARRIVING):
            actions.append(Wait(intent.storage))
            record.state = State.RESIDENT
        if record.state is not State.RESIDENT:
            return
        if record.copied:
            record.state = State.AWAY
        elif isinstance(intent, Drop):
            record.state, record.segment = State.DROPPED, intent.segment
        else:
            return  # its copy failed, or was never begun: it stays
        actions.append(Release(intent.storage))

    def _ensure(self, storage: int, actions: list[Action]) -> list[int]:
        """Bring a storage to the device, and first what it is computed from; returns all that were not there.

        Not recursive: what is computed from what was dropped may be a long chain.
        """
        restored: list[int] = []
        stack = [(storage, False)]
        while stack:
            storage, is_ready = stack.pop()
            record = self._records.get(storage)
            if record is None or record.state in (State.RESIDENT, State.LEAVING):
                continue  # there, or a leaf that the program holds and not autograd
            if record.state is State.DROPPED and not is_ready:
                stack.append((storage, True))
                stack += [(leaf, False) for leaf in reversed(self._segments[record.segment].leaves)]
                continue
            if record.state is State.DROPPED:
                outputs = self._replay(record.segment, actions)
                restored += outputs
                if storage not in outputs:
                    raise InternalError(f"segment {record.segment} does not bring storage {storage} back")
                continue
            if record.state is State.AWAY:
                actions.append(Reload(storage))
            actions.append(Wait(storage))
            record.state = State.RESIDENT
            restored.append(storage)
        return restored

    def _replay(self, index: int, actions: list[Action]) -> list[int]:
        outputs = []
        for output in self._segments[index].outputs:
            record = self._records.get(output)
            if record is not None and record.state is State.DROPPED and record.segment == index:
                record.state = State.RESIDENT
                outputs.append(output)
        actions.append(Recompute(index, tuple(outputs)))
        return outputs


def count_reads(actions: Sequence[Action], segments: Sequence[Segment]) -> Counter[int]:
    """How often each storage is read while some actions are carried out: until then it may not leave again.

    Links of a chain may go once they were read; what comes back and nothing here reads is needed, and counts as one.
    """
    reads: Counter[int] = Counter()
    back: list[int] = []
    for action in actions:
        if isinstance(action, Recompute):
            for leaf in segments[action.segment].leaves:
                reads[leaf] = reads.get(leaf, 0) + 1
            back += action.outputs
        elif isinstance(action, Reload):
            back.append(action.storage)
    for storage in back:
        reads.setdefault(storage, 1)
    return reads

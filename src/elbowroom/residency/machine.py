"""The residency machine: the state of every saved storage, and its legal transitions.

               Offload           Wait, Release
    RESIDENT ----------> LEAVING -------------> AWAY
       ^  ^                 |                    |  Reload
       |  '-- need ---------'                    v
       |<------------- Wait ------------------ ARRIVING
       |
       |   Release (no copy: will be replayed)
       |----------------------------------------> DROPPED
       '<------------- Recompute -------------------'

A reloaded storage keeps its copy in the tier below: releasing it again costs nothing.
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
    """Residency of a storage with respect to autograd's claim on it."""

    RESIDENT = enum.auto()
    LEAVING = enum.auto()  # on the device, and being copied to the tier below
    AWAY = enum.auto()
    ARRIVING = enum.auto()  # its device memory is allocated, its bytes are being copied
    DROPPED = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """Request to release a storage without a copy; `segment` recomputes it."""

    storage: int
    segment: int


Intent = Offload | Release | Reload | Drop
"""A request of a policy. The machine turns it into legal actions, or ignores it."""


class Policy(Protocol):
    """Decides which storages move, from events alone."""

    def decide(self, event: Event) -> Iterable[Intent]:
        """Return the intents to carry out after `event`."""
        ...


@dataclasses.dataclass(slots=True)
class _Record:
    state: State = State.RESIDENT
    copied: bool = False  # the tier below has its contents, or a copy is under way
    segment: int = -1  # recomputes it, if it is dropped


class Machine:
    """Keeps the state of every saved storage of one step.

    Args:
        policy: decides which storages leave, and which come back early.
        segments: recompute segments of dropped storages; a list may grow during the step.
    """

    def __init__(self, policy: Policy, segments: Sequence[Segment] = ()) -> None:
        self.policy = policy
        self._segments = segments
        self._records: dict[int, _Record] = {}

    def state(self, storage: int) -> State | None:
        """Return the state of a storage; None if it is not saved (any more)."""
        record = self._records.get(storage)
        return None if record is None else record.state

    def is_on_device(self, storage: int) -> bool:
        """Tell whether autograd's claim on a storage keeps it on the device; True if the storage is unknown."""
        record = self._records.get(storage)
        return record is None or record.state not in (State.AWAY, State.DROPPED)

    def segment_of(self, storage: int) -> int | None:
        """Return the segment that recomputes a dropped storage; None if it is not dropped."""
        record = self._records.get(storage)
        return record.segment if record is not None and record.state is State.DROPPED else None

    def feed(self, event: Event) -> list[Action]:
        """Process one event.

        Returns:
            Actions for the driver to carry out, in this order, before it feeds the next event.

        Raises:
            InternalError: a segment does not produce the dropped storage that it is recorded for.
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
        """Add a saved storage that is on the device, without calling the policy."""
        if storage not in self._records:
            self._records[storage] = _Record()

    def evict(self, storages: Iterable[int]) -> list[Action]:
        """Return the actions that move these storages to the tier below, whatever their states.

        Dropped storages are recomputed first, while their leaves are still available.
        """
        actions: list[Action] = []
        for storage in storages:
            leaving = [storage]
            if self.segment_of(storage) is not None:
                # Also evict the leaves that this restored, or they would accumulate.
                leaving = self._ensure(storage, actions)
            for each in leaving:
                self._intend(Offload(each), actions)
                self._intend(Release(each), actions)
        return actions

    def refuse(self, storage: int) -> None:
        """Mark a storage resident and without a copy: the driver keeps it on the device."""
        record = self._records.get(storage)
        if record is not None:
            record.state, record.copied = State.RESIDENT, False

    def correct(self, storage: int, state: State, copied: bool) -> None:
        """Set the actual state of a storage, after the driver failed to carry out an action."""
        record = self._records.get(storage)
        if record is not None:
            record.state, record.copied = state, copied

    def _free(self, storage: int, actions: list[Action]) -> None:
        record = self._records.pop(storage, None)
        if record is None:
            return
        if record.state in (State.LEAVING, State.ARRIVING):
            actions.append(Wait(storage))  # the transfer uses its memory until then
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
            return  # no copy exists: it stays
        actions.append(Release(intent.storage))

    def _ensure(self, storage: int, actions: list[Action]) -> list[int]:
        """Restore a storage, after its leaves if it is dropped; return all storages that were restored.

        Iterative, since chains of dropped storages may be long.
        """
        restored: list[int] = []
        stack = [(storage, False)]
        while stack:
            storage, is_ready = stack.pop()
            record = self._records.get(storage)
            if record is None or record.state in (State.RESIDENT, State.LEAVING):
                continue  # on the device, or a leaf that only the program holds
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
    """Count how often actions read each storage. A storage may not leave again before its last read.

    A restored storage that no action reads is the one that is needed; it counts as read once.
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

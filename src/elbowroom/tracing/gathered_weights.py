"""Times during which the weights that FSDP gathers are on the device, in a trace.

Autograd's views of such a weight outlive its memory. In a trace the weight itself, which is saved and needed, has 0
bytes, and each time between its gathering and its freeing is a storage of its own, which no plan moves. What FSDP
writes when it gathers the same contents again is left out, so a weight keeps its version, and `Trace.presences` says
when replays may read it.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import torch

from elbowroom.hooks.unsharded_weights import list_gathered, observe_weights
from elbowroom.ir.trace import Op, Presence, Role, Storage, Trace, View
from elbowroom.native import library
from elbowroom.tracing.tracer import Tracer


@dataclasses.dataclass(slots=True)
class _Stay:
    """A weight on the device, from one tick to another: -1 for the beginning of the step, None for its end.

    Attributes:
        filled: tick from which its contents are there; None if they were never seen, or seen to change.
        digest: of its contents.
    """

    storage: torch.UntypedStorage
    nbytes: int
    begin: int
    end: int | None = None
    filled: int | None = None
    digest: object = None


class GatheredWeights:
    """Observes the gathered weights of one step.

    Args:
        tracer: of the step.
        model: sharded or not.
    """

    def __init__(self, tracer: Tracer, model: torch.nn.Module) -> None:
        self._tracer = tracer
        self._stays: list[_Stay] = []
        self._open: dict[int, _Stay] = {}
        self._ids: dict[int, list[_Stay]] | None = None
        for each in list_gathered(model):
            self._add(each, -1)
            self.weight_filled(each)
        observe_weights(self)

    def weight_gathered(self, storage: torch.UntypedStorage) -> None:
        """Note that a weight is on the device."""
        if self._ids is None and storage._cdata not in self._open:
            self._add(storage, self._tracer.ticks.now)

    def weight_filled(self, storage: torch.UntypedStorage) -> None:
        """Note that the contents of a weight are there."""
        stay = self._open.get(storage._cdata)
        if self._ids is not None or stay is None:
            return
        digest = library.load().digest(storage)
        is_first = stay.digest is None
        stay.filled = self._tracer.ticks.now if is_first else stay.filled if stay.digest == digest else None
        stay.digest = digest

    def weight_freed(self, storage: torch.UntypedStorage) -> None:
        """Note that a weight has left the device."""
        if self._ids is None and (stay := self._open.pop(storage._cdata, None)) is not None:
            stay.end = self._tracer.ticks.now

    def close(self) -> None:
        """Look up the weights in the trace, before that is finished."""
        if self._ids is None:
            self._ids = {}
            for stay in self._stays:
                if (seen := self._tracer.lookup(stay.storage)) is not None:
                    self._ids.setdefault(seen.id, []).append(stay)
            self._open.clear()

    def write_into(self, trace: Trace) -> Trace:
        """Return a trace with the times of all weights on the device."""
        if not self._stays:
            return trace
        storages, ops = list(trace.storages), list(trace.ops)
        presences: list[Presence] = []
        weights = self._ids or {}
        positions: dict[int, list[int]] = {weight: [] for weight in weights}
        for position, op in enumerate(ops):
            for weight in {view.storage for view in (*op.reads, *op.writes)} & positions.keys():
                positions[weight].append(position)
        for weight, stays in weights.items():
            home = storages[weight]
            storages[weight] = dataclasses.replace(home, nbytes=0)
            users = [ops[position] for position in positions[weight]]
            found = _keep_version(users, weight, stays)
            for position, op in zip(positions[weight], found or users, strict=True):
                reads_it = any(view.storage == weight for view in op.reads)
                ops[position] = _bar(op) if found is None and reads_it else op
            if found is None:
                continue
            storages[weight] = dataclasses.replace(
                home, nbytes=0, role=Role.INPUT, created=-1, released=trace.end, label="gathered weight"
            )
            for stay in stays:
                end = trace.end if stay.end is None else stay.end
                presences.append(Presence(storage=weight, begin=max(0, stay.filled or 0), end=max(0, end)))
        ticks = [op.tick for op in ops]
        for stay in self._stays:
            end = trace.end if stay.end is None else stay.end
            created = stay.begin
            if created >= 0:
                place = bisect.bisect_left(ticks, created)
                if place == len(ops) or ops[place].tick >= end:
                    continue  # nothing happened meanwhile
                created = ops[place].tick
                ops[place] = _make(ops[place], len(storages), stay.nbytes)
            role = Role.TEMPORARY if created >= 0 else Role.INPUT
            home = Storage(
                id=len(storages), nbytes=stay.nbytes, role=role, created=created, released=max(end, 0),
                label="gathered weight",
            )  # fmt: skip
            storages.append(home)
        return dataclasses.replace(trace, storages=tuple(storages), ops=tuple(ops), presences=tuple(presences))

    def _add(self, storage: torch.UntypedStorage, begin: int) -> None:
        self._open[storage._cdata] = stay = _Stay(storage, storage.nbytes(), begin)
        self._stays.append(stay)


def _keep_version(ops: Sequence[Op], weight: int, stays: Sequence[_Stay]) -> list[Op] | None:
    """Return the ops that use a weight so that it has the same version whenever it has the same contents.

    Returns None if its contents may have changed unseen.
    """
    kept: list[Op] = []
    version = 0
    contents = next((stay.digest for stay in stays if stay.begin < 0), None)
    unwritten = {id(stay) for stay in stays if stay.begin >= 0}
    if any(stay.filled is None for stay in stays):
        return None
    for op in ops:
        reads = tuple(
            dataclasses.replace(view, version=version) if view.storage == weight else view for view in op.reads
        )
        writes = []
        for view in op.writes:
            if view.storage != weight:
                writes.append(view)
                continue
            if view.version == 0 and contents is None:
                continue  # it is made
            stay = next((each for each in stays if each.begin <= op.tick < (each.filled or 0)), None)
            if stay is not None:
                unwritten.discard(id(stay))
            if stay is None or contents not in (None, stay.digest):
                version += 1
                writes.append(dataclasses.replace(view, version=version))
            contents = object() if stay is None else stay.digest
        kept.append(dataclasses.replace(op, reads=reads, writes=tuple(writes)))
    return None if unwritten else kept


def _bar(op: Op) -> Op:
    return dataclasses.replace(op, barrier=op.barrier or "reads a gathered weight")


def _make(op: Op, storage: int, nbytes: int) -> Op:
    made = View(storage=storage, version=0, dtype="uint8", shape=(nbytes,))
    return dataclasses.replace(op, writes=(*op.writes, made), barrier=op.barrier or "writes to a gathered weight")

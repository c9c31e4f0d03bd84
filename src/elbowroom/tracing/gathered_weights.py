"""Times during which the weights that FSDP gathers are on the device, in a trace.

Autograd's views of such a weight outlive its memory. In a trace the weight itself, which is saved and needed, has 0
bytes, and each time between its gathering and its freeing is a storage of its own, which no plan moves.
"""

from __future__ import annotations

import bisect
import dataclasses

import torch

from elbowroom.hooks.unsharded_weights import list_gathered, observe_weights
from elbowroom.ir.trace import Op, Role, Storage, Trace, View
from elbowroom.tracing.tracer import Tracer


@dataclasses.dataclass(slots=True)
class _Presence:
    """A weight on the device, from one tick to another: -1 for the beginning of the step, None for its end."""

    storage: torch.UntypedStorage
    nbytes: int
    begin: int
    end: int | None = None


class GatheredWeights:
    """Observes the gathered weights of one step.

    Args:
        tracer: of the step.
        model: sharded or not.
    """

    def __init__(self, tracer: Tracer, model: torch.nn.Module) -> None:
        self._tracer = tracer
        self._presences = [_Presence(each, each.nbytes(), -1) for each in list_gathered(model)]
        self._open = {each.storage._cdata: each for each in self._presences}
        self._ids: set[int] | None = None
        observe_weights(self)

    def weight_gathered(self, storage: torch.UntypedStorage) -> None:
        """Note that a weight is on the device."""
        if self._ids is None and storage._cdata not in self._open:
            presence = _Presence(storage, storage.nbytes(), self._tracer.tick)
            self._open[storage._cdata] = presence
            self._presences.append(presence)

    def weight_freed(self, storage: torch.UntypedStorage) -> None:
        """Note that a weight has left the device."""
        if self._ids is None and (presence := self._open.pop(storage._cdata, None)) is not None:
            presence.end = self._tracer.tick

    def close(self) -> None:
        """Look up the weights in the trace, before that is finished."""
        if self._ids is None:
            seen = (self._tracer.lookup(each.storage) for each in self._presences)
            self._ids = {each.id for each in seen if each is not None}
            self._open.clear()

    def write_into(self, trace: Trace) -> Trace:
        """Return a trace with the times of all weights on the device."""
        if not self._presences:
            return trace
        ids = self._ids or set()
        storages = [dataclasses.replace(each, nbytes=0) if each.id in ids else each for each in trace.storages]
        ops = list(trace.ops)
        ticks = [op.tick for op in ops]
        for presence in self._presences:
            end = trace.end if presence.end is None else presence.end
            created = presence.begin
            if created >= 0:
                place = bisect.bisect_left(ticks, created)
                if place == len(ops) or ops[place].tick >= end:
                    continue  # nothing happened meanwhile
                created = ops[place].tick
                ops[place] = _make(ops[place], len(storages), presence.nbytes)
            role = Role.TEMPORARY if created >= 0 else Role.INPUT
            home = Storage(
                id=len(storages), nbytes=presence.nbytes, role=role, created=created, released=max(end, 0),
                label="gathered weight",
            )  # fmt: skip
            storages.append(home)
        return dataclasses.replace(trace, storages=tuple(storages), ops=tuple(ops))


def _make(op: Op, storage: int, nbytes: int) -> Op:
    made = View(storage=storage, version=0, dtype="uint8", shape=(nbytes,))
    return dataclasses.replace(op, writes=(*op.writes, made), barrier=op.barrier or "writes to a gathered weight")

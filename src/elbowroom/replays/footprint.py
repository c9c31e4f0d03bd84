"""Cost of a replay: its seconds and its peak bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Segment
from elbowroom.ir.trace import Op, Trace


class Footprint(NamedTuple):
    """Cost of one replay.

    Attributes:
        seconds: of its ops.
        peak_bytes: peak allocation, outputs included.
        output_bytes: bytes of the outputs, which stay allocated.
    """

    seconds: float
    peak_bytes: int
    output_bytes: int

    @property
    def extra_bytes(self) -> int:
        """Bytes of the peak that are freed by the end."""
        return max(0, self.peak_bytes - self.output_bytes)


class Footprints:
    """Computes and caches the costs of replays of one trace.

    Args:
        rounded: bytes of each storage, rounded up as by the device's allocator.
    """

    def __init__(self, trace: Trace, costs: Costs, rounded: Sequence[int]) -> None:
        self._ops = {op.tick: op for op in trace.ops}
        self._seconds = {op.tick: seconds for op, seconds in zip(trace.ops, costs.op_seconds, strict=True)}
        self._workspace = {op.tick: nbytes for op, nbytes in zip(trace.ops, costs.workspace_bytes, strict=True)}
        self._rounded = rounded
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], Footprint] = {}

    def measure(self, segment: Segment, outputs: tuple[int, ...]) -> Footprint:
        """Return the cost of one replay, which may keep only some of a segment's outputs."""
        key = (segment.ops, outputs)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self.measure_replay(segment.ops, segment.leaves, outputs)
        return found

    def count_seconds(self, ticks: Iterable[int]) -> float:
        """Return the seconds of replaying the ops at these ticks."""
        return sum(self._seconds[tick] for tick in ticks)

    def measure_replay(self, ticks: Sequence[int], leaves: Collection[int], outputs: Collection[int]) -> Footprint:
        """Return the cost of replaying these ops, freeing intermediates after their last use as the runtime does."""
        ops = [self._ops[tick] for tick in ticks]
        ends = list_last_uses(ops, {*leaves, *outputs})
        allocated: set[int] = set(leaves)
        seconds = 0.0
        live = peak = 0
        for op, freed in zip(ops, ends, strict=True):
            seconds += self._seconds[op.tick]
            for view in op.writes:
                if view.storage not in allocated:
                    allocated.add(view.storage)
                    live += self._rounded[view.storage]
            peak = max(peak, live + self._workspace[op.tick])
            live -= sum(self._rounded[storage] for storage in freed if storage in allocated)
        return Footprint(
            seconds=seconds,
            peak_bytes=peak,
            output_bytes=sum(self._rounded[storage] for storage in outputs),
        )


def list_last_uses(ops: Sequence[Op], stays: Collection[int]) -> list[list[int]]:
    """Return, for each op, the storages that it is the last to use, in argument order, excluding `stays`."""
    used = [dict.fromkeys(view.storage for view in (*op.reads, *op.writes)) for op in ops]
    last_use = {storage: index for index, storages in enumerate(used) for storage in storages}
    return [
        [storage for storage in storages if last_use[storage] == index and storage not in stays]
        for index, storages in enumerate(used)
    ]

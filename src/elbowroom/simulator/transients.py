"""What replaying a segment takes: seconds, and bytes beyond what it leaves behind."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Segment
from elbowroom.ir.trace import Trace


class Transients:
    """Walks segments op by op, freeing each intermediate after its last use, as the runtime does."""

    def __init__(self, trace: Trace, costs: Costs, rounded: npt.NDArray[np.int64]) -> None:
        self._costs, self._rounded = costs, rounded
        self._index = {op.tick: index for index, op in enumerate(trace.ops)}
        self._trace = trace
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, int]] = {}

    def measure(self, segment: Segment, outputs: tuple[int, ...]) -> tuple[float, int]:
        """Seconds of one replay, and its peak bytes minus those of the outputs that stay."""
        key = (segment.ops, outputs)
        if key not in self._known:
            self._known[key] = self._walk(segment, set(outputs))
        return self._known[key]

    def seconds(self, ops: tuple[int, ...]) -> float:
        """Seconds of replaying the ops at these ticks."""
        return sum(self._costs.op_seconds[self._index[tick]] for tick in ops)

    def _walk(self, segment: Segment, outputs: set[int]) -> tuple[float, int]:
        ops = [self._trace.ops[self._index[tick]] for tick in segment.ops]
        leaves = set(segment.leaves)
        last_use: dict[int, int] = {}
        for position, op in enumerate(ops):
            for view in (*op.reads, *op.writes):
                last_use[view.storage] = position
        live: dict[int, int] = {}
        seconds, peak = 0.0, 0
        for position, op in enumerate(ops):
            index = self._index[op.tick]
            seconds += self._costs.op_seconds[index]
            for view in op.writes:
                if view.storage not in leaves:
                    live[view.storage] = int(self._rounded[view.storage])
            peak = max(peak, sum(live.values()) + self._costs.workspace_bytes[index])
            for view in (*op.reads, *op.writes):
                if last_use[view.storage] == position and view.storage not in outputs:
                    live.pop(view.storage, None)
        stays = sum(int(self._rounded[storage]) for storage in outputs)
        return seconds, max(0, peak - stays)

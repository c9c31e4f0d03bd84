"""A step that is known: its trace, what is to be done about it, and what the extension is told of both."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from elbowroom.ir.placement import Placement
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import PERSISTENT_ROLES, Trace
from elbowroom.runtime.account import load_native


@dataclasses.dataclass(frozen=True)
class Known:
    """A trace and its plan.

    Attributes:
        placement: where the copies are to lie.
    """

    trace: Trace
    plan: Plan
    placement: Placement

    @functools.cached_property
    def timetable(self) -> Any:
        """List the tensors that autograd saves and needs in the trace, for the extension."""
        storages = self.trace.storages
        homes = [storages[save.storage] for save in self.trace.saves]
        saves = [
            (save.tick, home.id, home.nbytes, home.role in PERSISTENT_ROLES)
            for save, home in zip(self.trace.saves, homes, strict=True)
        ]
        needs = [(need.tick, need.save) for need in self.trace.needs]
        return load_native().Timetable(saves, needs, len(storages))

    @functools.cached_property
    def touched(self) -> frozenset[int]:
        """The storages that the plan touches."""
        return self.plan.find_touched()

    @functools.cached_property
    def wanted(self) -> tuple[list[str], list[int], dict[int, list[bool]]]:
        """List the ops that the plan replays among all ops.

        The list goes on until the forward pass is over: what an op that is not in the trace does to a leaf would be in
        the replay.

        Returns:
            The names of the ops; the tick of each that the plan replays, -1 of the others; and by tick, of each tensor
            that such an op reads, whether the program holds it throughout the step.
        """
        trace, segments = self.trace, self.plan.segments
        wanted = {tick for segment in segments for tick in segment.ops}
        leaves = {leaf for segment in segments for leaf in segment.leaves}
        kept = frozenset(leaf for leaf in leaves if trace.storages[leaf].role in PERSISTENT_ROLES)
        last = max(*wanted, trace.needs[0].tick)
        ops = [op for op in trace.ops if op.tick <= last]
        ticks = [op.tick if op.tick in wanted else -1 for op in ops]
        return (
            [op.name for op in ops],
            ticks,
            {op.tick: [view.storage in kept for view in op.reads] for op in ops if op.tick in wanted},
        )

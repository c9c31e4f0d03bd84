"""Candidates: planned steps that a running step may turn out to be."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from elbowroom.ir.placement import CopySlot, Placement
from elbowroom.ir.plan import Choice, Plan
from elbowroom.ir.trace import PERSISTENT_ROLES, Trace
from elbowroom.residency.plan_policy import COPIES, Move, list_moves
from elbowroom.runtime.state_moves import StateSchedule
from elbowroom.runtime.step_storages import load_native


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A trace that a step may match, and its plan.

    Attributes:
        placement: offsets of the plan's copies in the tier below.
    """

    trace: Trace
    plan: Plan
    placement: Placement

    @functools.cached_property
    def timetable(self) -> Any:
        """Saves and needs of the trace, in the extension's format."""
        storages = self.trace.storages
        homes = [storages[save.storage] for save in self.trace.saves]
        saves = [
            (save.tick, home.id, home.nbytes, home.role in PERSISTENT_ROLES)
            for save, home in zip(self.trace.saves, homes, strict=True)
        ]
        needs = [(need.tick, need.save) for need in self.trace.needs]
        return load_native().Timetable(saves, needs, len(storages))

    @functools.cached_property
    def first_bytes(self) -> int:
        """Size of the first save's storage."""
        return self.trace.storages[self.trace.saves[0].storage].nbytes

    @functools.cached_property
    def plan_storages(self) -> frozenset[int]:
        """Ids of the storages that the plan moves or replays from."""
        return self.plan.find_touched()

    @functools.cached_property
    def copied_storages(self) -> frozenset[int]:
        """Ids of the storages that the plan moves by copies alone, and that no replay makes or reads."""
        segments = self.plan.segments
        replayed = {tick for segment in segments for tick in segment.ops}
        read = {view.storage for op in self.trace.ops if op.tick in replayed for view in op.reads}
        copied = {decision.storage for decision in self.plan.decisions if decision.choice is Choice.OFFLOAD}
        dropped = {decision.storage for decision in self.plan.decisions if decision.choice is Choice.RECOMPUTE}
        return frozenset(copied.difference(dropped, read, *((*each.outputs, *each.leaves) for each in segments)))

    @functools.cached_property
    def moves(self) -> Sequence[Move]:
        """Moves of saved storages, in order."""
        return list_moves(self.plan)

    @functools.cached_property
    def copy_moves(self) -> Sequence[tuple[int, int, int, CopySlot | None]]:
        """Moves of `copied_storages`: tick, order within it, storage, and the slot of a copy that is made."""
        return [
            (tick, order, storage, self.placement.find(storage, tick) if order == COPIES else None)
            for tick, order, storage, _ in self.moves
            if storage in self.copied_storages
        ]

    @functools.cached_property
    def other_moves(self) -> Sequence[Move]:
        """Moves of all other storages."""
        return [move for move in self.moves if move[2] not in self.copied_storages]

    @functools.cached_property
    def state_schedule(self) -> StateSchedule | None:
        """Moves of the plan's state; None if it has none, and needs none to be away."""
        schedule = StateSchedule(self.trace, self.plan)
        return schedule if self.plan.state or schedule.unused else None

    @functools.cached_property
    def replayed_ops(self) -> tuple[list[str], list[int], dict[int, list[Any]], int]:
        """Ops of the trace, with a mark on those that the plan replays: all ops if model state moves, else those of
        the forward pass.

        The other ops are listed to detect ops that are not in the trace, which might write to inputs of a replay.

        Returns:
            Name of each op; tick of each op, or -1 if the plan does not replay it; and by tick of a replayed op, for
            each tensor that it reads, where the replay finds it (`Source` of the extension). Last, how many of the
            ops a step must run as listed; after another op later on, only the moves of model state are left out.
        """
        trace = self.trace
        segments = self.plan.segments
        replayed = {tick for segment in segments for tick in segment.ops}
        leaves = {leaf for segment in segments for leaf in segment.leaves}
        held = frozenset(leaf for leaf in leaves if trace.storages[leaf].role in PERSISTENT_ROLES)
        source = load_native().Source

        def find_source(storage: int) -> Any:
            if storage not in held:
                return source.STEP
            return source.COMES_BACK if storage in trace.present else source.KEPT

        last = max([*replayed, trace.needs[0].tick])
        required = sum(op.tick <= last for op in trace.ops)
        ops = trace.ops if self.plan.state else trace.ops[:required]
        ticks = [op.tick if op.tick in replayed else -1 for op in ops]
        reads = {op.tick: [find_source(view.storage) for view in op.reads] for op in ops if op.tick in replayed}
        return [op.name for op in ops], ticks, reads, required

"""Builds plans from choice vectors with the compiled sweep; `auto` and the other searches use it."""

from __future__ import annotations

import numpy as np

from elbowroom.ir.plan import Choice, Decision, Plan, Segment
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.draft import Key
from elbowroom.simulator.compiled_loops.columns import Array, Columns, make_columns
from elbowroom.simulator.compiled_loops.segments import OFFLOAD, RECOMPUTE
from elbowroom.simulator.compiled_loops.sweep import sweep
from elbowroom.simulator.compiled_loops.transit import Sweep, make_sweep


class ChoiceVectorPlanner:
    """Turns choice vectors for one problem into plans.

    Attributes:
        columns: the problem as arrays.
        keys: the gaps' keys, in the order of the columns.
    """

    def __init__(self, problem: Problem) -> None:
        drafter = problem.drafter
        self._problem = problem
        self.columns: Columns = make_columns(drafter.replay, drafter.gaps, problem.plain.live_bytes)
        ordered = sorted(drafter.gaps.items(), key=lambda item: (item[1].closes, item[1].storage))
        self.keys: list[Key] = [key for key, _ in ordered]
        self.room: Sweep = make_sweep(self.columns)

    def make_plan(self, choices: Array, strategy: str, slack: float = 0.0) -> Plan:
        """Build the plan of a feasible choice vector.

        Leaves out an offload whose copy does not finish before the storage is needed again. That frees the link, so the
        plan may be faster than the sweep; its bytes are the same.
        """
        is_feasible = sweep(self.columns, choices, self._problem.budget_bytes, slack, np.inf, self.room)
        assert is_feasible
        return self._read_plan(strategy)

    def _read_plan(self, strategy: str) -> Plan:
        ticks, found = self.columns.events["tick"], self.room.segments
        decisions: list[Decision] = []
        for (storage, index), gap, move in zip(self.keys, self.columns.gaps, found.moves, strict=True):
            if move.choice == OFFLOAD and move.release_event >= 0:
                back = int(ticks[move.back_event]) if move.back_event >= 0 else int(gap.closes)
                decisions.append(
                    Decision(storage=storage, gap=index, choice=Choice.OFFLOAD, leave=int(gap.opens),
                             release=int(ticks[move.release_event]), back=back, segment=-1)
                )  # fmt: skip
            elif move.choice >= RECOMPUTE:
                leave = int(move.leave)
                decisions.append(
                    Decision(storage=storage, gap=index, choice=Choice.RECOMPUTE, leave=leave, release=leave,
                             back=int(gap.closes), segment=int(move.segment))
                )  # fmt: skip
        decisions.sort(key=lambda decision: (decision.storage, decision.gap))
        return Plan(
            trace_digest=self._problem.drafter.replay.costs.trace_digest,
            strategy=strategy,
            budget_bytes=self._problem.budget_bytes,
            decisions=tuple(decisions),
            segments=tuple(self._read_segment(segment) for segment in range(int(found.tally[0].segments))),
        )

    def _read_segment(self, segment: int) -> Segment:
        found = self.room.segments
        this, following = found.segments[segment], found.segments[segment + 1]
        outputs = self.columns.gaps["storage"][found.moves["segment"] == segment]
        return Segment(
            ops=tuple(self.columns.ops["tick"][found.ops[this.ops_start : following.ops_start]].tolist()),
            outputs=tuple(sorted(outputs.tolist())),
            leaves=tuple(found.leaves[this.leaves_start : following.leaves_start].tolist()),
        )

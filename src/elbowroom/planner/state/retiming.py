"""Shifts moves of a finished plan, so that the step waits less for copies of state and activations on one link.

    copies out    [state, from the step before][  a  ][  b  ]
    before        a released ^ waits              ^ copied
    after                                         ^ a released here, if memory allows

The state's moves and the activations are chosen one after the other, each with a part of the link. Together they queue
for it. So the plan is simulated as a whole, and every move for which the step waits is shifted: a release to the tick
at which its copy is done, a reload to an earlier tick, as far as the budget allows. This is repeated while the step
becomes faster.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np
import numpy.typing as npt

from elbowroom.ir.forecast import Forecast
from elbowroom.ir.plan import Choice, Decision, Plan
from elbowroom.ir.state import get_back
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.memory_curve import MemoryCurve
from elbowroom.planner.schedule.timing import CopyTimetable, list_moments
from elbowroom.planner.state.windows import Curve, Cycle

Numbers = npt.NDArray[np.float64]
Waits = dict[tuple[int, int], float]

PATIENCE = 3
"""Rounds in a row that may leave the step as slow as it was: where one copy is late, others wait behind it."""

LEAST_GAIN = 1 - 1e-4
"""Multiple of the fastest step so far that counts as faster."""


class Retimer:
    """Shifts the moves of plans for one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._replay = problem, problem.drafter.replay
        self._trace = self._replay.trace
        self._cycle = Cycle(self._replay)
        self._load = MemoryCurve(problem.drafter, problem.plain.live_bytes)
        self._timetable = CopyTimetable(problem.drafter)
        self._moments = list_moments(self._trace)

    def shift(self, plan: Plan) -> Plan:
        """Return a plan whose step waits less; the plan itself if none is found, or if it does not fit."""
        forecast, waits = self._replay.run_with_waits(plan)
        if not self._problem.fits(forecast):
            return plan
        best, seconds = plan, forecast.step_seconds
        tried = 0
        while tried < PATIENCE:
            shifted = self._shift_all(plan, forecast, waits)
            if shifted == plan:
                break
            plan, (forecast, waits) = shifted, self._replay.run_with_waits(shifted)
            if not self._problem.fits(forecast):
                break
            tried += 1
            if forecast.step_seconds < seconds * LEAST_GAIN:
                best, seconds = plan, forecast.step_seconds
                tried = 0
        return best

    def _shift_all(self, plan: Plan, forecast: Forecast, waits: Waits) -> Plan:
        """Return a plan with all moves shifted for which the step waits."""
        begins = np.array(forecast.begin_seconds)
        times = np.concatenate((begins[:-1], forecast.step_seconds + begins))
        spare = self._problem.budget_bytes - np.array(forecast.live_bytes, dtype=np.int64)
        decisions = {(each.storage, each.gap): each for each in plan.decisions}
        for key, decision in decisions.items():
            if decision.choice is Choice.OFFLOAD:
                decisions[key] = self._shift(decision, waits, times, spare)
        state = tuple(self._shift_state(each, waits, times, spare) for each in plan.state)
        return dataclasses.replace(plan, decisions=tuple(decisions.values()), state=state)

    def _shift(self, decision: Decision, waits: Waits, times: Numbers, spare: Curve) -> Decision:
        """Return a decision on an activation; takes what it needs from the spare bytes."""
        key = (decision.storage, decision.gap)
        gap, nbytes = self._problem.drafter.gaps[key], self._load.nbytes[key]
        release, back = self._find_moment(decision.release), self._find_moment(decision.back)
        if late := waits.get((release, decision.storage), 0.0):
            ideal = int(np.searchsorted(times, times[release + 1] + late))
            latest = min(self._find_moment(ideal), back - 1)
            begin = self._load.away(key, release, back).start
            over = np.flatnonzero(spare[begin : latest + 1] < nbytes)
            latest = latest if not len(over) else begin + int(over[0]) - 1
            moved = self._moments[max(0, bisect.bisect_right(self._moments, latest) - 1)]
            if release < moved < back:
                spare[begin : moved + 1] -= nbytes
                decision, release = dataclasses.replace(decision, release=moved), moved
        if late := waits.get((gap.closes, decision.storage), 0.0):
            ideal = int(np.searchsorted(times, times[back] - late, side="right")) - 1
            moment = self._moments[max(0, bisect.bisect_right(self._moments, ideal) - 1)]
            earliest = max(self._timetable.earliest_back(key, release), moment)
            over = np.flatnonzero(spare[earliest:back] < nbytes)
            if len(over):
                earliest = self._find_moment(earliest + int(over[-1]) + 1)
            if release < earliest < back:
                spare[earliest:back] -= nbytes
                decision = dataclasses.replace(decision, back=earliest)
        return decision

    def _shift_state(self, decision: Decision, waits: Waits, times: Numbers, spare: Curve) -> Decision:
        """Return a decision on the state; takes what it needs from the spare bytes."""
        cycle, trace = self._cycle, self._trace
        end = trace.end
        gap, nbytes = trace.state_gaps[decision.storage][decision.gap], int(self._replay.rounded[decision.storage])
        release, back = gap.unwrap(decision.release, end), get_back(gap, decision, end)
        if late := waits.get((decision.release, decision.storage), 0.0):
            ideal = int(np.searchsorted(times, times[release + 1] + late))
            latest = min(cycle.move_at_or_after(ideal), back - 1)
            if trace.storages[decision.storage].created >= 0:
                latest = min(latest, end - 1)
            over = np.flatnonzero(cycle.view(spare, release + 1, latest + 1) < nbytes)
            latest = latest if not len(over) else release + int(over[0])
            moved = cycle.move_at_or_before(latest)
            if release < moved < back - 1:
                cycle.add(spare, release + 1, moved + 1, -nbytes)
                decision, release = dataclasses.replace(decision, release=moved % end), moved
        if (late := waits.get((gap.closes, decision.storage), 0.0)) and trace.is_reloaded(gap):
            ideal = int(np.searchsorted(times, times[back] - late, side="right")) - 1
            earliest = max(cycle.move_at_or_after(release + 1), cycle.move_at_or_before(ideal))
            over = np.flatnonzero(cycle.view(spare, min(earliest, back), back) < nbytes)
            if len(over):
                earliest = cycle.move_at_or_after(earliest + int(over[-1]) + 1)
            if release < earliest < back:
                cycle.add(spare, earliest, back, -nbytes)
                decision = dataclasses.replace(decision, back=earliest % end)
        return decision

    def _find_moment(self, tick: int) -> int:
        """Return the first save or need at or after a tick: there a move takes effect."""
        index = bisect.bisect_left(self._moments, tick)
        return self._moments[min(index, len(self._moments) - 1)]

"""Optimal checkpoints for chains within little memory, by dynamic programming.

    forward    0 - - - 3 - - - 6 -          keeps 3 and 6
    backward   serves 6 - ...; replays 3 4 5, keeps 4; serves 5; replays 4; ... serves 3; replays 0 1 2, keeps ...

Given a boundary a on the device, the stages up to b are served, the last one first. Either a replay goes on to some
boundary c and keeps it: then the stages from c to b are served from there, and after them those before c from a again.
Or it also keeps everything that stage a needs, and goes on from the next boundary. The forward pass has the same
options, without any replay. So a boundary may be kept by any replay that passes it, not only by the first or at its own
need; and what a replay reads may itself come from a replay.

Bytes are counted in quanta, so with equal stages the schedule is optimal. Otherwise it is the best of those that keep
all or none of the inner storages of a stage. The simulator judges; if it finds more bytes than are counted here, the
schedule for slightly less memory is taken.

Source: A. Griewank, A. Walther, "Algorithm 799: revolve", ACM Transactions on Mathematical Software 26, 2000; for
stages that differ O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory", 2019. Ours: stages found in a trace, and
the memory that is left at each of them.
"""

from __future__ import annotations

import math

import numpy as np

from elbowroom.ir.plan import Plan
from elbowroom.planner.heuristics.chain import Stage, find_stages
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.assembly import ReplayStep, assemble, list_replays
from elbowroom.planner.schedule.draft import Key
from elbowroom.simulator.compiled_loops.columns import Array

ABOVE = 17 / 16
"""The first schedule is for this multiple of the budget: the byte counts here are too high rather than too low."""

LEVELS = 256
"""Most quanta of memory, if the sizes of storages have no common divisor that needs fewer."""

MOST_TRIED, STEP = 12, 1 / 64
"""Schedules that are judged, each for less memory than the previous one, and the share by which it is less."""

Holds = dict[Key, int]
"""By gap: the stage that is served when the storage is kept, or the number of stages if that is in the forward pass."""


def revolve(problem: Problem) -> Plan | None:
    """Return the plan of the best schedule that fits; None if the step is no chain, or no schedule fits.

    Cost: cubic in the stages, times `LEVELS`.
    """
    stages = find_stages(problem)
    if not stages:
        return None
    schedule = Schedule(stages, int(ABOVE * problem.budget_bytes))
    known: Holds | None = None
    for tried in range(MOST_TRIED):
        holds = schedule.find_holds(tried * max(1, round(STEP * schedule.levels)))
        if holds is None:
            return None
        plan = None if holds == known else _write(problem, stages, holds)
        if plan is not None and problem.fits(problem.drafter.replay.run(plan)):
            return plan
        known = holds
    return None


def _write(problem: Problem, stages: list[Stage], holds: Holds) -> Plan | None:
    """Return the plan that keeps every storage from the point given in `holds` on."""
    wants = np.asarray([stage.want for stage in reversed(stages)])

    def keeps(key: Key, tick: int) -> bool:
        served = len(stages) - int(np.searchsorted(wants, tick, side="right"))
        return served <= holds.get(key, -1)

    gaps = [key for stage in stages for key in (stage.boundary, *stage.inner) if key is not None]
    dropped = [key for key in gaps if holds.get(key, -1) < len(stages)]
    replays: list[ReplayStep] = []
    for replay in list_replays(problem.drafter, dropped, keeps):
        if not isinstance(replay, ReplayStep):
            return None
        replays.append(replay)
    return assemble(problem.drafter, "revolve", problem.budget_bytes, offloads={}, replays=replays)


class Schedule:
    """The best schedules of a chain, for every number of quanta that are kept for earlier stages.

    Attributes:
        levels: how many such numbers there are.
    """

    def __init__(self, stages: list[Stage], budget_bytes: int) -> None:
        self._stages, self._budget_bytes = stages, budget_bytes
        self._quantum = _find_quantum(stages, budget_bytes)
        self.levels = max(0, self._count_room(0)) + 1
        count = len(stages)
        self._sizes = [-(-stage.boundary_bytes // self._quantum) for stage in stages]
        self._inner = [-(-stage.inner_bytes // self._quantum) for stage in stages]
        self._reach, self._peaks = self._find_reaches()
        # From stage a to b: seconds by quanta held before a.
        self._serve: Array = np.full((count, count, self.levels), np.inf)
        for length in range(count):
            for begin in range(count - length):
                end = begin + length
                self._serve[begin, end] = self._weigh(begin, end).min(axis=0)
        self._forward: Array = np.full((count, self.levels), np.inf)
        for begin in reversed(range(count)):
            self._forward[begin] = self._weigh_forward(begin).min(axis=0)

    def find_holds(self, reserve: int) -> Holds | None:
        """Return what is kept, and from when, if `reserve` quanta are left free; None if there is no schedule."""
        if reserve >= self.levels or not math.isfinite(self._forward[0, reserve]):
            return None
        holds: Holds = {}
        pending = self._follow_forward(reserve, holds)
        while pending:
            begin, end, held = pending.pop()
            self._hold_boundary(begin, end, holds)
            option = int(self._weigh(begin, end)[:, held].argmin())
            if option == 0:
                self._hold_inner(begin, end, holds)
            if begin == end:
                continue
            if option == 0:
                pending.append((begin + 1, end, held + self._sizes[begin] + self._inner[begin]))
            else:
                middle = begin + option
                pending += [(middle, end, held + self._sizes[begin]), (begin, middle - 1, held)]
        return holds

    def _follow_forward(self, held: int, holds: Holds) -> list[tuple[int, int, int]]:
        """Add what the forward pass keeps to `holds`; return the ranges of stages that are served after it."""
        count, begin = len(self._stages), 0
        served: list[tuple[int, int, int]] = []
        while begin < count:
            self._hold_boundary(begin, count, holds)
            option = int(self._weigh_forward(begin)[:, held].argmin())
            if option == 0:
                self._hold_inner(begin, count, holds)
                held += self._sizes[begin] + self._inner[begin]
                begin += 1
            else:
                served.append((begin, begin + option - 1, held))
                held += self._sizes[begin]
                begin += option
        return served

    def _hold_boundary(self, stage: int, served: int, holds: Holds) -> None:
        boundary = self._stages[stage].boundary
        if boundary is not None:
            holds[boundary] = max(served, holds.get(boundary, -1))

    def _hold_inner(self, stage: int, served: int, holds: Holds) -> None:
        for key in self._stages[stage].inner:
            holds[key] = max(served, holds.get(key, -1))

    def _weigh(self, begin: int, end: int) -> Array:
        """Return the seconds to serve the stages from `end` to `begin`, by first action and by quanta kept.

        Row 0: the replay keeps everything that stage `begin` needs. The other rows: it goes on to each later boundary
        in turn. For a single stage: compute all that it needs at once, or each storage at its own need.
        """
        stage, served = self._stages[begin], self._stages[end]
        around = served.want_bytes + (stage.boundary_bytes if end > begin or stage.inner else 0)
        if begin == end:
            needed = [max(stage.backward_bytes, around + stage.serving.peak_bytes), stage.sparing_bytes]
            seconds = np.asarray([[stage.serving.seconds], [stage.sparing.seconds]])
            return self._allow(np.repeat(seconds, self.levels, axis=1), np.asarray(needed))
        rows = np.empty((end - begin + 1, self.levels))
        rows[0] = stage.holding.seconds + self._shift(
            self._serve[begin + 1, end], self._sizes[begin] + self._inner[begin]
        )
        rows[1:] = self._shift(self._serve[begin + 1 : end + 1, end], self._sizes[begin])
        rows[1:] += self._serve[begin, begin:end] + self._reach[begin, begin + 1 : end + 1, None]
        room = around + self._peaks[begin, begin : end + 1]
        room[0] = max(around + stage.holding.peak_bytes, stage.backward_bytes)
        return self._allow(rows, room)

    def _weigh_forward(self, begin: int) -> Array:
        """Return the seconds of all stages from `begin` on, by first action and by quanta kept.

        Row 0: keep all that stage `begin` needs. The other rows: the next kept boundary is a later one, or none.
        """
        count, stage = len(self._stages), self._stages[begin]
        rows = np.zeros((count - begin + 1, self.levels))
        rows[1:] = self._serve[begin, begin:count]
        if begin + 1 < count:
            rows[0] = self._shift(self._forward[begin + 1], self._sizes[begin] + self._inner[begin])
            rows[1:-1] += self._shift(self._forward[begin + 1 : count], self._sizes[begin])
        passed = [stage.forward_own_bytes]
        passed += [stage.boundary_bytes + each.forward_bytes for each in self._stages[begin + 1 :]]
        needed = np.asarray([max(stage.forward_all_bytes, stage.backward_bytes), *passed])
        needed[1:] = np.maximum.accumulate(needed[1:])
        return self._allow(rows, needed)

    def _allow(self, rows: Array, needed: Array) -> Array:
        """Return the rows, infinite where the quanta kept before leave less than the bytes that the row needs."""
        room = (self._budget_bytes - needed) // self._quantum
        return np.where(np.arange(self.levels) <= room[:, None], rows, np.inf)

    def _shift(self, rows: Array, quanta: int) -> Array:
        """Return the seconds with this many more quanta kept."""
        shifted: Array = np.full_like(rows, np.inf)
        if quanta < self.levels:
            shifted[..., : self.levels - quanta] = rows[..., quanta:]
        return shifted

    def _count_room(self, nbytes: int) -> int:
        least = min(stage.want_bytes for stage in self._stages)
        return max(0, self._budget_bytes - max(0, least) - nbytes) // self._quantum

    def _find_reaches(self) -> tuple[Array, Array]:
        """Return, from each boundary to each later one, the seconds to compute it, and the peak bytes on the way."""
        count = len(self._stages)
        seconds, peaks = np.zeros((count, count)), np.zeros((count, count), dtype=np.int64)
        for begin in range(count):
            for end in range(begin + 1, count):
                passed = self._stages[end - 1]
                if self._stages[end].boundary is None:
                    continue  # it stays on the device
                under_way = passed.boundary_bytes if end - 1 > begin else 0
                seconds[begin, end] = seconds[begin, end - 1] + passed.passing.seconds
                peaks[begin, end] = max(peaks[begin, end - 1], passed.passing.peak_bytes + under_way)
        return seconds, peaks


def _find_quantum(stages: list[Stage], budget_bytes: int) -> int:
    """Return the greatest common divisor of all sizes, or the budget divided by `LEVELS` if that is larger."""
    divisor = math.gcd(*(size for stage in stages for size in (stage.boundary_bytes, stage.inner_bytes)))
    return max(1, divisor, -(-budget_bytes // LEVELS))

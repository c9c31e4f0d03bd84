"""Capuchin's feedback: a late reload begins earlier in the next step, by a share of its duration.

Source: X. Peng, X. Shi, H. Dai, H. Jin, W. Ma, Q. Xiong, F. Yang, X. Qian, "Capuchin: Tensor-based GPU memory
management for deep learning", ASPLOS 2020: a reload that is needed before it is done begins earlier by 5 % of its time.
Inferred: it begins no earlier than memory permits, and the fastest of all steps tried is kept. Moves happen at saves
and needs, so it may take several rounds until a reload begins at an earlier one.
"""

from __future__ import annotations

import dataclasses

from elbowroom.cost.transfers import reload_seconds
from elbowroom.ir.actions import Offload, Recompute, Reload, Wait
from elbowroom.ir.events import StorageNeeded
from elbowroom.ir.plan import Plan
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.draft import Key
from elbowroom.planner.schedule.realize import RealizedChoices
from elbowroom.planner.schedule.timing import CopyTimetable
from elbowroom.residency import plan_policy
from elbowroom.residency.machine import Machine
from elbowroom.simulator.planned import PreparedTrace

SHARE = 0.05
"""Share of its duration by which a late reload begins earlier."""

ROUNDS = 20
"""After this many rounds, a reload may begin earlier by its whole duration."""


def feed_back(problem: Problem, timetable: CopyTimetable, realized: RealizedChoices, strategy: str) -> Plan:
    """Return the fastest plan found by beginning late reloads earlier, round by round."""
    replay = problem.drafter.replay
    advance = _Advance(problem, timetable, realized)
    plan = best = realized.plan(problem, strategy)
    seconds = replay.run(plan).step_seconds
    for _ in range(ROUNDS):
        if not advance.begin_earlier(find_late_reloads(replay, plan)):
            break
        plan = dataclasses.replace(realized, times=advance.times).plan(problem, strategy)
        found = replay.run(plan).step_seconds
        if found < seconds:
            best, seconds = plan, found
    return best


class _Advance:
    """The times of realized choices, and the desired begin of each reload."""

    def __init__(self, problem: Problem, timetable: CopyTimetable, realized: RealizedChoices) -> None:
        self._drafter = problem.drafter
        self._budget_bytes = problem.budget_bytes
        self._timetable = timetable
        self._load = realized.load.copy()
        self.times = dict(realized.times)
        self._begins = {key: self._drafter.begins[each.back] for key, each in self.times.items()}
        self._keys: dict[int, list[Key]] = {}
        for key in sorted(self.times):
            self._keys.setdefault(key[0], []).append(key)

    def begin_earlier(self, late: dict[tuple[int, int], float]) -> bool:
        """Begin late reloads earlier; return whether any reload moved, or could move in a later round."""
        moved = False
        for storage, tick in sorted(late):
            for key in self._keys.get(storage, ()):
                gap = self._drafter.gaps[key]
                if gap.opens < tick <= gap.closes:
                    moved |= self._move(key)
        return moved

    def _move(self, key: Key) -> bool:
        times, load = self.times[key], self._load
        link, storages = self._drafter.replay.costs.link, self._drafter.replay.trace.storages
        self._begins[key] -= SHARE * reload_seconds(link, storages[key[0]].nbytes)
        earliest = self._timetable.earliest_back(key, times.release)
        back = max(self._timetable.moment_before(self._begins[key]), earliest)
        if back >= times.back:
            return times.back > earliest  # the desired begin has not reached an earlier save or need
        added = load.live[max(back, load.gone[key]) : times.back]
        if int(added.max(initial=0)) + load.nbytes[key] > self._budget_bytes:
            return False
        added += load.nbytes[key]
        self.times[key] = dataclasses.replace(times, back=back)
        return True


def find_late_reloads(replay: PreparedTrace, plan: Plan) -> dict[tuple[int, int], float]:
    """Return the seconds that the step waits for a reload at a need, by (storage, tick of the need).

    If a replay waits for one of its leaves, the wait counts for that leaf.
    """
    machine = Machine(plan_policy.Policy(plan_policy.list_moves(plan)), plan.segments)
    device = replay.make_device(None)
    coming: set[int] = set()
    waits: dict[tuple[int, int], float] = {}
    for event in replay.events:
        device.entry, device.begin = event.tick, replay.begin_list[event.tick]
        for action in machine.feed(event):
            if isinstance(action, Recompute):
                device.replay(replay.footprints.measure(plan.segments[action.segment], action.outputs).seconds)
            elif isinstance(action, Offload):
                device.offload(action.storage)
            elif isinstance(action, Reload):
                coming.add(action.storage)
                device.reload(action.storage)
            elif isinstance(action, Wait):
                late = device.wait(action.storage)
                if late > 0.0 and action.storage in coming and isinstance(event, StorageNeeded):
                    waits[action.storage, event.tick] = late
                coming.discard(action.storage)
    return waits

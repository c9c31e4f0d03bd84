"""Merges replays that run the same ops.

    before   need c: replay a b c       need d: replay a b d       a and b run twice, since nothing holds them
    after    need c: replay a b c d     need d: on the device      d takes memory from the first need on

A replay keeps its intermediate results. Merging also lets it produce a result of a later replay, if the ops that both
share cost more than the memory is worth. An example is a dense block: each result is a concatenation of all earlier
ones, and nothing holds the parts. Replays that are close in time are merged as long as that saves time and fits the
budget.

Source: replaying a whole block at its first need is checkpointing as done by hand in memory-efficient DenseNets (G.
Pleiss, D. Chen, G. Huang, T. Li, L. van der Maaten, K. Q. Weinberger, "Memory-efficient implementation of DenseNets",
2017). Ours: any replays of any plan, as far as the budget allows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from elbowroom.ir.forecast import Forecast
from elbowroom.ir.plan import Choice, Decision, Plan, Segment
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.draft import Drafter, Key

REACH = 6
"""Two replays are candidates if they are at most this many replays apart."""

MOST_TRIALS, FEWEST_TRIALS = 12, 3
"""Number of forecasts; one forecast may test several merges at once."""

MOST_REPLAYED = 6_000
"""Replayed ops in all forecasts together; long plans get fewer forecasts."""

WORTHWHILE = 1e-6
"""Least time that merging two replays must save, as a share of the plain step."""

Group = tuple[Key, ...]
"""Gaps that one replay ends."""


def merge_replays(problem: Problem, plan: Plan) -> Plan:
    """Return a plan that is no slower and fits, if `plan` fits; else, or if nothing is gained, return `plan`.

    Cost: about a dozen forecasts, and the closures of each pair of replays that are close in time.
    """
    drafter = problem.drafter
    rest = [decision for decision in plan.decisions if decision.choice is not Choice.RECOMPUTE]
    groups = _list_groups(drafter, plan)
    best, forecast = plan, drafter.replay.run(plan)
    if not problem.fits(forecast):
        return plan
    barred: set[Group] = set()
    pairs = _Merger(problem, groups, forecast).find_pairs(barred)
    replayed = sum(len(segment.ops) for segment in plan.segments)
    for _ in range(max(FEWEST_TRIALS, min(MOST_TRIALS, MOST_REPLAYED // max(1, replayed)))):
        if not pairs:
            break
        joined = _merge(drafter, groups, pairs)
        made = _write(problem, plan, joined, rest)
        found = None if made is None else drafter.replay.run(made)
        if made and found and problem.fits(found) and found.step_seconds < forecast.step_seconds:
            groups = joined
            best = made
            forecast = found
            pairs = _Merger(problem, groups, forecast).find_pairs(barred)
        elif len(pairs) > 1:
            pairs = pairs[: len(pairs) // 2]  # keep the pairs that save most
        else:
            barred.add(_unite(groups, *pairs[0]))
            pairs = _Merger(problem, groups, forecast).find_pairs(barred)
    return best


def _list_groups(drafter: Drafter, plan: Plan) -> list[Group]:
    groups: dict[int, list[Key]] = {}
    for decision in plan.decisions:
        if decision.choice is Choice.RECOMPUTE:
            groups.setdefault(decision.segment, []).append((decision.storage, decision.gap))
    return sorted((tuple(sorted(group)) for group in groups.values()), key=lambda group: (_tick(drafter, group), group))


def _tick(drafter: Drafter, group: Group) -> int:
    """Return the need at which a group is replayed: the first of its needs."""
    return min(drafter.gaps[key].closes for key in group)


def _merge(drafter: Drafter, groups: list[Group], pairs: Sequence[tuple[int, int]]) -> list[Group]:
    apart = set(range(len(groups))) - {index for pair in pairs for index in pair}
    joined = [groups[index] for index in sorted(apart)] + [_unite(groups, *pair) for pair in pairs]
    return sorted(joined, key=lambda group: (_tick(drafter, group), group))


def _unite(groups: Sequence[Group], earlier: int, later: int) -> Group:
    return tuple(sorted(groups[earlier] + groups[later]))


class _Replays:
    """Finds the ops that each group replays, when every group is dropped until its replay."""

    def __init__(self, drafter: Drafter, groups: Sequence[Group]) -> None:
        self._drafter = drafter
        self._away: dict[int, list[tuple[int, int]]] = {}
        for group in groups:
            tick = _tick(drafter, group)
            for key in group:
                self._away.setdefault(key[0], []).append((drafter.gaps[key].opens, tick))

    def find(self, group: Group, tick: int) -> Segment | None:
        """Return the replay of a group at a need not after its own; None if that is impossible."""
        ops: set[int] = set()
        leaves: set[int] = set()
        for key in group:
            if self._drafter.gaps[key].opens >= tick:
                return None
            closure = self._drafter.find_closure(key[0], tick, lambda storage: self._is_away(storage, tick))
            if closure is None:
                return None
            ops |= set(closure.ops)
            leaves |= set(closure.leaves)
        outputs = tuple(sorted(storage for storage, _ in group))
        return Segment(ops=tuple(sorted(ops)), outputs=outputs, leaves=tuple(sorted(leaves)))

    def _is_away(self, storage: int, tick: int) -> bool:
        return any(opens < tick <= back for opens, back in self._away.get(storage, ()))


class _Merger:
    """Finds pairs of groups to merge, given a forecast of the step in which they are separate."""

    def __init__(self, problem: Problem, groups: Sequence[Group], forecast: Forecast) -> None:
        self._drafter, self._budget_bytes = problem.drafter, problem.budget_bytes
        self._footprints = problem.drafter.replay.footprints
        self._worthwhile = WORTHWHILE * problem.plain.step_seconds
        self._groups, self._live = groups, np.array(forecast.live_bytes)
        self._replays = _Replays(problem.drafter, groups)
        self._ticks = [_tick(self._drafter, group) for group in groups]
        self._segments = [self._replays.find(group, tick) for group, tick in zip(groups, self._ticks, strict=True)]

    def find_pairs(self, barred: Collection[Group]) -> list[tuple[int, int]]:
        """Return pairs that save time and fit together, by decreasing saving; no group is in two pairs.

        Args:
            barred: merged groups that have been tried without success.
        """
        savings = []
        for earlier in range(len(self._groups)):
            for later in range(earlier + 1, min(earlier + 1 + REACH, len(self._groups))):
                saved = self._find_saving(earlier, later)
                if saved > self._worthwhile and _unite(self._groups, earlier, later) not in barred:
                    savings.append((-saved, earlier, later))
        pairs: list[tuple[int, int]] = []
        taken: set[int] = set()
        for _, earlier, later in sorted(savings):
            if not taken & {earlier, later} and self._take_room(earlier, later):
                taken |= {earlier, later}
                pairs.append((earlier, later))
        return pairs

    def _find_saving(self, earlier: int, later: int) -> float:
        first, second = self._segments[earlier], self._segments[later]
        if first is None or second is None or not set(first.ops) & set(second.ops):
            return 0.0
        if self._live[self._ticks[earlier] : self._ticks[later]].max() + self._count(later) > self._budget_bytes:
            return 0.0
        moved = self._replays.find(self._groups[later], self._ticks[earlier])
        if moved is None:
            return 0.0
        apart = self._footprints.count_seconds(first.ops) + self._footprints.count_seconds(second.ops)
        return apart - self._footprints.count_seconds(tuple(sorted({*first.ops, *moved.ops})))

    def _take_room(self, earlier: int, later: int) -> bool:
        """Reserve memory for the later group from the earlier replay on; return False if it does not fit."""
        span = self._live[self._ticks[earlier] : self._ticks[later]]
        if span.max() + self._count(later) > self._budget_bytes:
            return False
        span += self._count(later)
        return True

    def _count(self, group: int) -> int:
        return int(sum(self._drafter.replay.rounded[storage] for storage, _ in self._groups[group]))


def _write(problem: Problem, plan: Plan, groups: Sequence[Group], rest: Sequence[Decision]) -> Plan | None:
    """Return the plan in which each group is one replay; None if one of them is impossible."""
    drafter = problem.drafter
    replays = _Replays(drafter, groups)
    segments: list[Segment] = []
    decisions = list(rest)
    for group in groups:
        tick = _tick(drafter, group)
        segment = replays.find(group, tick)
        if segment is None:
            return None
        # The leaves replace the dropped storage, so they must be saved before it is dropped.
        saved = max((drafter.graph.claim_at(leaf, tick) for leaf in segment.leaves), default=-1)
        for key in group:
            leave = max(drafter.gaps[key].opens, saved)
            if leave >= tick:
                return None
            decisions.append(
                Decision(storage=key[0], gap=key[1], choice=Choice.RECOMPUTE, leave=leave, release=leave,
                         back=drafter.gaps[key].closes, segment=len(segments))
            )  # fmt: skip
        segments.append(segment)
    decisions.sort(key=lambda decision: (decision.storage, decision.gap))
    return dataclasses.replace(plan, decisions=tuple(decisions), segments=tuple(segments))

"""Plans a problem together with the smaller problems inside it, so that a larger one is never slower.

    both  --+-- recompute alone                     a plan for a nested problem is a plan for the outer one
            +-- offload alone
    host  --+-- smaller hosts: fixed shares of the host bytes that the plan for an unlimited host uses
            +-- recompute alone
    host and a disk  --+-- that host without the disk
                       +-- smaller hosts with the disk: the same moves, with less of the host

A search finds good plans, not always the best: within a larger problem it can miss what it finds within a smaller one.
So plans of smaller problems are candidates as well, and the simulator judges all of them. A smaller problem whose bound
(`fluid`) excludes a faster plan is not searched. Hence, between calls:

- both kinds of moves are never slower than one of them;
- a host is never slower than a smaller one, as long as it is too small for the plan for an unlimited host; a host that
  is large enough gets that plan. This is why only fixed shares of that plan's host bytes are searched;
- a limited host is never slower than recomputation alone, and a disk behind a host never slower than none, with the
  host smaller by the buffers through which the disk's bytes pass.

The order of offloads decides which of them go to the disk, so the same moves can be slower with a larger host. A plan
may therefore state how much of the host it uses (`Plan.host_bytes`), and takes the same time with any larger one. One
call tries its plans with smaller hosts, but does not search each of those with the disk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from elbowroom.ir.plan import Plan
from elbowroom.ir.sliced_trace import ON_SECTIONS
from elbowroom.planner.bounds.fluid import solve_fluid
from elbowroom.planner.options import find_strategy
from elbowroom.planner.problem import Problem, pose
from elbowroom.planner.searching.choice_search import Moves, search_choices
from elbowroom.simulator.host_overflow import find_host_bytes

SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0625, 0.03125)
"""Hosts to search, as shares of the host bytes of the plan for an unlimited host."""

MOST_SECTION_GAPS = 5000
"""With more gaps, a step whose ops run in slices is planned by one sweep: the search takes minutes and finds less."""

ASKED = "tvdnn_ilp"
"""Strategy whose plan is a candidate for a step whose ops run in slices."""

STEPS = 16
"""Hosts at equal distances, up to all of those bytes, with which each plan is tried if there is a disk."""


def solve(problem: Problem, strategy: str, moves: Moves = "both", effort: float = 1.0) -> Plan:
    """Return the fastest plan found within the budget; the plan with the lowest peak if none fits.

    Cost: one search; more if one kind of moves may be faster than both, or if the lower tier is limited.
    """
    if problem.floor.peak_bytes > problem.budget_bytes:
        return search_choices(problem, strategy, moves, effort).plan
    search = _NestedSearch(problem, strategy, effort)
    if moves == "recompute" or not any(op.barrier == ON_SECTIONS for op in problem.drafter.replay.trace.ops):
        return search.solve(moves)
    candidates = _Candidates(problem)
    swept = find_strategy(ASKED)(problem)  # fits if the lower tier is unlimited
    candidates.add(dataclasses.replace(swept, strategy=strategy))
    if len(problem.drafter.gaps) <= MOST_SECTION_GAPS or candidates.seconds() == np.inf:
        candidates.add(search.solve(moves))
    return candidates.choose()


class _Candidates:
    """Plans for one problem, with their forecasts.

    Args:
        hosts: host sizes with which a plan that needs the disk is tried.
    """

    def __init__(self, problem: Problem, hosts: Sequence[int] = ()) -> None:
        self._problem, self._hosts = problem, hosts
        self._found: list[tuple[bool, float, int, Plan]] = []

    def add(self, plan: Plan) -> None:
        """Add a plan, which need not fit."""
        replay = self._problem.drafter.replay
        forecast = replay.run(plan)
        made = [(plan, forecast)]
        if forecast.disk_bytes and plan.host_bytes is None:
            limited = [dataclasses.replace(plan, host_bytes=host_bytes) for host_bytes in self._hosts]
            made += [(each, replay.run(each)) for each in limited]
        for each, forecast in made:
            fits = self._problem.fits(forecast)
            rank = forecast.step_seconds if fits else float(forecast.peak_bytes)
            self._found.append((not fits, rank, len(self._found), each))

    def seconds(self) -> float:
        """Return the time of the fastest plan that fits; infinite if none does."""
        return min((rank for is_over, rank, _, _ in self._found if not is_over), default=np.inf)

    def choose(self) -> Plan:
        """Return the fastest plan that fits; the plan with the lowest peak if none does."""
        return min(self._found)[-1]


class _NestedSearch:
    """The searches for one problem and its nested problems."""

    def __init__(self, problem: Problem, strategy: str, effort: float) -> None:
        self._problem = problem
        self._strategy = strategy
        self._effort = effort
        drafter = problem.drafter
        overflow = drafter.replay.overflow
        self._has_disk = overflow is not None
        self._host_bytes = problem.host_bytes if overflow is None else overflow.host_bytes
        self._free = dataclasses.replace(problem, host_bytes=None)
        if self._has_disk:
            trace, costs = drafter.replay.trace, drafter.replay.costs
            self._free = pose(trace, costs, problem.budget_bytes, min_offload_bytes=drafter.min_bytes)
        self._recomputing: Plan | None = None
        self._is_stopped = False

    def solve(self, moves: Moves) -> Plan:
        """Return the best plan with these moves."""
        unlimited = self._solve_free(moves)
        forecast = self._problem.drafter.replay.run(unlimited)
        if self._host_bytes is None or (self._problem.fits(forecast) and not forecast.disk_bytes):
            return unlimited
        below_bytes = self._free.drafter.replay.run(unlimited).lower_tier_bytes
        steps = [find_host_bytes(step * below_bytes // STEPS) for step in range(STEPS + 1)]
        candidates = _Candidates(self._problem, [each for each in steps if each <= self._host_bytes])
        if self._has_disk:
            candidates.add(unlimited)
        if moves != "offload":
            candidates.add(self._recompute())
        for smaller in self._list_smaller(below_bytes) if moves != "recompute" else ():
            if self._may_be_faster(candidates, smaller, moves):
                candidates.add(self._search(smaller, moves))
        if moves == "both" and self._may_be_faster(candidates, self._problem, "offload"):
            candidates.add(self.solve("offload"))
        if candidates.seconds() == np.inf and moves != "recompute":
            candidates.add(self._search(self._problem, moves))
        return candidates.choose()

    def _list_smaller(self, below_bytes: int) -> Iterator[Problem]:
        """Yield problems with smaller hosts and no disk; then, if there is a disk, the problem itself."""
        assert self._host_bytes is not None
        for room_bytes in (int(share * below_bytes) for share in SHARES):
            if (find_host_bytes(room_bytes) if self._has_disk else room_bytes) <= self._host_bytes:
                yield dataclasses.replace(self._free, host_bytes=room_bytes)
        if self._has_disk:
            yield self._problem

    def _solve_free(self, moves: Moves) -> Plan:
        """Return the best plan for an unlimited lower tier."""
        if moves == "recompute":
            return self._recompute()
        candidates = _Candidates(self._free)
        candidates.add(self._search(self._free, moves))
        if moves == "both" and self._may_be_faster(candidates, self._free, "recompute"):
            candidates.add(self._recompute())
        if moves == "both" and self._may_be_faster(candidates, self._free, "offload"):
            candidates.add(self._search(self._free, "offload"))
        return candidates.choose()

    def _recompute(self) -> Plan:
        if self._recomputing is None:
            self._recomputing = self._search(self._free, "recompute")
        return self._recomputing

    def _may_be_faster(self, candidates: _Candidates, smaller: Problem, moves: Moves) -> bool:
        """Return whether the bound of a smaller problem permits a plan faster than the candidates."""
        seconds = candidates.seconds()
        if self._is_stopped or seconds <= self._problem.plain.step_seconds:
            return False
        fluid = solve_fluid(smaller, recompute=moves != "offload", offload=moves != "recompute")
        return fluid is not None and fluid.seconds < seconds

    def _search(self, problem: Problem, moves: Moves) -> Plan:
        """Search a problem; with effort 0 after an interruption."""
        found = search_choices(problem, self._strategy, moves, 0.0 if self._is_stopped else self._effort)
        self._is_stopped |= not found.is_whole
        return found.plan

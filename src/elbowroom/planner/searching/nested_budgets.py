"""The best plan for a problem and for the smaller problems inside it, so that more of something is not worse.

    both  --+-- recompute alone                     a plan for any of these is a plan for what it hangs from
            +-- offload alone
    host  --+-- smaller hosts: fixed shares of what is below in the plan for a host of any size
            +-- recompute alone
    host and a disk  --+-- that host without the disk
                       +-- smaller hosts with the disk: the same moves, carried out with less of the host

A search finds good plans, not always the best: within a larger problem it can miss what it finds within a smaller one.
So the plans of smaller problems are candidates, too, and the one simulator judges all of them. A smaller problem whose
bound (`fluid`) says that it has nothing faster is not searched. Hence, from one call to another:

- both manners of moving are never slower than one of them;
- a host is never slower than a smaller one, as long as it is too small for the plan for a host of any size; one that is
  large enough gets that plan. For this the tier below is searched at fixed shares of that plan's bytes only;
- a limited host is never slower than recomputation alone, and a disk behind a host never slower than none, with the
  host smaller by what the disk's bytes pass through.

What goes to the disk is decided first come, first served, so the same moves can be slower with a larger host. A plan
may therefore say how much of the host it uses (`Plan.host_bytes`), and takes the same time with any larger one. One
call tries its plans with smaller hosts, but does not search each of them with the disk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from elbowroom.ir.plan import Plan
from elbowroom.planner.bounds.fluid import solve_fluid
from elbowroom.planner.problem import Problem, pose
from elbowroom.planner.searching.choice_search import Moves, search_choices
from elbowroom.simulator.host_overflow import find_host_bytes

SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0625, 0.03125)
"""Of what the plan for any host has below: the hosts that are searched. None at all is recomputation alone."""

STEPS = 16
"""Hosts at equal distances, up to all of it, with which each plan is tried where there is a disk."""


def solve(problem: Problem, strategy: str, moves: Moves = "both", effort: float = 1.0) -> Plan:
    """The fastest plan found within the budget; that of the lowest peak if none is.

    Cost: a search; more of them where one manner of moving may be faster than both, or where the tier below is limited.
    """
    if problem.floor.peak_bytes > problem.budget_bytes:
        return search_choices(problem, strategy, moves, effort).plan
    return _Nest(problem, strategy, effort).solve(moves)


class _Pool:
    """Plans for one problem.

    Args:
        hosts: how much of the host a plan that needs the disk is tried with.
    """

    def __init__(self, problem: Problem, hosts: Sequence[int] = ()) -> None:
        self._problem, self._hosts = problem, hosts
        self._found: list[tuple[bool, float, int, Plan]] = []

    def add(self, plan: Plan) -> None:
        """One more; it need not fit."""
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
        """Of the fastest that fits; infinite if none does."""
        return min((rank for is_over, rank, _, _ in self._found if not is_over), default=np.inf)

    def choose(self) -> Plan:
        """The fastest that fits; the one of the lowest peak if none does."""
        return min(self._found)[-1]


class _Nest:
    """The searches that one problem takes."""

    def __init__(self, problem: Problem, strategy: str, effort: float) -> None:
        self._problem, self._strategy, self._effort = problem, strategy, effort
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
        """The best plan with such moves."""
        anywhere = self._solve_free(moves)
        forecast = self._problem.drafter.replay.run(anywhere)
        if self._host_bytes is None or (self._problem.fits(forecast) and not forecast.disk_bytes):
            return anywhere
        below_bytes = self._free.drafter.replay.run(anywhere).lower_tier_bytes
        steps = [find_host_bytes(step * below_bytes // STEPS) for step in range(STEPS + 1)]
        pool = _Pool(self._problem, [each for each in steps if each <= self._host_bytes])
        if self._has_disk:
            pool.add(anywhere)
        if moves != "offload":
            pool.add(self._recompute())
        for smaller in self._list_smaller(below_bytes) if moves != "recompute" else ():
            if self._may_be_faster(pool, smaller, moves):
                pool.add(self._search(smaller, moves))
        if moves == "both" and self._may_be_faster(pool, self._problem, "offload"):
            pool.add(self.solve("offload"))
        if pool.seconds() == np.inf and moves != "recompute":
            pool.add(self._search(self._problem, moves))
        return pool.choose()

    def _list_smaller(self, below_bytes: int) -> Iterator[Problem]:
        """Problems with smaller hosts and no disk; the whole host, if there is a disk behind it."""
        assert self._host_bytes is not None
        for room_bytes in (int(share * below_bytes) for share in SHARES):
            if (find_host_bytes(room_bytes) if self._has_disk else room_bytes) <= self._host_bytes:
                yield dataclasses.replace(self._free, host_bytes=room_bytes)
        if self._has_disk:
            yield self._problem

    def _solve_free(self, moves: Moves) -> Plan:
        """Where the tier below may hold any amount."""
        if moves == "recompute":
            return self._recompute()
        pool = _Pool(self._free)
        pool.add(self._search(self._free, moves))
        if moves == "both" and self._may_be_faster(pool, self._free, "recompute"):
            pool.add(self._recompute())
        if moves == "both" and self._may_be_faster(pool, self._free, "offload"):
            pool.add(self._search(self._free, "offload"))
        return pool.choose()

    def _recompute(self) -> Plan:
        if self._recomputing is None:
            self._recomputing = self._search(self._free, "recompute")
        return self._recomputing

    def _may_be_faster(self, pool: _Pool, smaller: Problem, moves: Moves) -> bool:
        """Whether a search of a smaller problem can end with something faster than what there is."""
        seconds = pool.seconds()
        if self._is_stopped or seconds <= self._problem.plain.step_seconds:
            return False
        fluid = solve_fluid(smaller, recompute=moves != "offload", offload=moves != "recompute")
        return fluid is not None and fluid.seconds < seconds

    def _search(self, problem: Problem, moves: Moves) -> Plan:
        """After an interruption, only what is found at once."""
        found = search_choices(problem, self._strategy, moves, 0.0 if self._is_stopped else self._effort)
        self._is_stopped |= not found.is_whole
        return found.plan

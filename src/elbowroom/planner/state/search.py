"""Plans state and activations together: an outer search over how much of the state is away.

    memory, everything on the device      /\\____/\\       = activations + state
    memory, activations at their lowest   __/```\\_       = what activations cannot give up + state
    share                                  how far activations may rise from the lower curve to the upper one

For a share of 0, state leaves only where activations at their lowest do not fit; for a share of 1, state makes room for
all activations. The state's moves are chosen for a share (`scheduler`) and written into the trace (`residence`), and
the activations are planned beside them. The fluid relaxation of the whole (`bounds.fluid`) gives further such curves.
Then the state's moves are chosen once more, for the memory and the part of the link that this plan leaves, and moves
for which the step still waits are shifted (`retiming`). A replay may read state that would be away: then that state
comes back before the replay. Curves are tried with little effort; beside the best state, the activations are planned
with full effort. The simulator judges the whole.

The plan that keeps all state on the device is a candidate, so no plan is slower than that of the activations alone. So
is the plan with the lowest peak, so every budget from there on has a plan.

Cost: one plan of the activations if the state need not move; else two, and five to eight with little effort. If the
search's own effort is at most `SMALL_EFFORT`: one, and quick ones until one fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from elbowroom.cost.transfers import STAGING_BYTES, offload_seconds, reload_seconds
from elbowroom.errors import TraceError
from elbowroom.ir.check import check
from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Choice, Decision, Plan
from elbowroom.ir.state import MoveKind, list_away, list_moves
from elbowroom.ir.trace import Trace
from elbowroom.planner.bounds.fluid import solve_fluid
from elbowroom.planner.bounds.gap_arrays import make_gap_arrays
from elbowroom.planner.options import Manages
from elbowroom.planner.problem import Problem, make_lowest, pose
from elbowroom.planner.schedule.draft import Key
from elbowroom.planner.searching.choice_search import Moves
from elbowroom.planner.state.cyclic_link import NO_TRAFFIC, list_traffic
from elbowroom.planner.state.residence import fix_state
from elbowroom.planner.state.retiming import Retimer
from elbowroom.planner.state.scheduler import EXPOSED, StateScheduler
from elbowroom.planner.state.windows import Array, Curve

SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Shares to try: two in the middle; from the better towards its side; and, if it is ahead of plans that follow
the relaxation, between it and its neighbours."""

FINE_SHARES = (0.05, 0.15, 0.2, 0.3, 0.4, 0.75)
"""Further shares for traces with at most `FEW_EVENTS` saves and needs, where a share costs little."""

RELAXED = (1.0, 0.95, 0.9)
"""Parts of the budget for which the relaxation is followed."""

FEW_EVENTS = 300
"""Saves and needs, with the ends of claims."""

NEGLIGIBLE = 1.002
"""A step that takes at most this multiple of the plain one is fast enough."""

NEAR = 1.03
"""The best share's activations are planned with full effort if its step takes at most this multiple of the fastest."""

SMALL_EFFORT = 0.2
"""At this effort and below, the first share that fits is enough."""

QUICK = 0.1
"""Effort for trying a share, as a multiple of the full one."""

LEAST_HOST_BYTES = 4 * STAGING_BYTES
"""Host memory that activations have beside the state's copies if there is a disk: enough to stage what goes there."""

LEAST_LINK = 0.2
"""The planner of the activations counts on at least this part of the link."""

WEIGHTS = (0.5, EXPOSED, 32.0)
"""Weights of transfer time that nothing hides, with which the state's moves are chosen beside a plan."""

RETIMED = 2
"""The fastest plans beside the same activations whose moves are shifted."""

ROUNDS = 3
"""Most plans of the activations for one share: each may replay ops that read state which is away."""

Pins = dict[int, set[int]]
"""Ticks at which replays read a storage of the state."""


class MakePlan(Protocol):
    """Plans the activations of a problem."""

    def __call__(self, problem: Problem, *, moves: Moves, effort: float) -> Plan:
        """Return a plan. `effort`: a multiple of the usual one."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class JointPlan:
    """A plan that fits, and the time of its step."""

    plan: Plan
    seconds: float


def solve(
    problem: Problem, strategy: str, make_plan: MakePlan, make_quickly: MakePlan, moves: Moves, effort: float
) -> Plan:
    """Return the fastest plan found within the budget; the plan with the lowest peak if none fits.

    Args:
        problem: manages everything.
        make_plan: plans the activations beside moves of the state.
        make_quickly: does so in less time; for trying shares.
    """
    plan = make_lowest(problem.drafter, problem.budget_bytes, Manages.EVERYTHING)
    if problem.floor.peak_bytes <= problem.budget_bytes:
        found = _ShareSearch(problem, make_plan, make_quickly, moves, effort).solve()
        plan = plan if found is None else found.plan
    return dataclasses.replace(plan, strategy=strategy)


class _ShareSearch:
    """The outer search for one problem."""

    def __init__(
        self, problem: Problem, make_plan: MakePlan, make_quickly: MakePlan, moves: Moves, effort: float
    ) -> None:
        self._problem = problem
        self._make_plan = make_plan
        self._make_quickly = make_quickly
        self._moves = moves
        self._effort = effort
        self._replay = problem.drafter.replay
        self._trace = self._replay.trace
        self._scheduler = StateScheduler(self._replay, problem.drafter.min_bytes, problem.host_bytes)
        self._retimer = Retimer(problem)
        self._resident = self._pose(())
        self._tried: set[tuple[Decision, ...]] = {()}  # the plan that keeps all state comes first
        self._highest = np.array(self._resident.plain.live_bytes, dtype=np.int64)
        self._lowest = np.array(self._resident.floor.live_bytes, dtype=np.int64)

    def solve(self) -> JointPlan | None:
        """Return the fastest candidate; None if there is none but the plan with the lowest peak."""
        resident = self._plan_resident()
        if resident is not None and self._is_fast(resident):
            return resident
        found = self._try_shares()
        best = _find_fastest(found)
        fastest = _find_fastest([best, resident])
        if best is None or fastest is None or self._is_enough([fastest]) or best.seconds > NEAR * fastest.seconds:
            return fastest
        return _find_fastest([fastest, self._plan_around(best.plan)])

    def _try_shares(self) -> list[JointPlan]:
        """Plan with little effort: as the relaxation says, and for several shares, until a step is fast enough."""
        found: list[JointPlan] = []
        seconds: dict[float, float] = {}

        def keep(made: JointPlan | None) -> float:
            found.extend([] if made is None else [made])
            return np.inf if made is None else made.seconds

        def rate(share: float) -> float:
            if share not in seconds and not self._is_enough(found):
                seconds[share] = keep(self._plan_share(share))
            return seconds.get(share, np.inf)

        if self._leaves_room_for_all():
            rate(SHARES[-1])
        for tighter in RELAXED:
            if not self._is_enough(found):
                keep(self._plan_relaxed(tighter))
        relaxed = min((each.seconds for each in found), default=np.inf)
        place = len(SHARES) // 2 + 1
        if rate(SHARES[place]) <= rate(SHARES[place - 1]):
            step = 1 if rate(SHARES[place]) < relaxed else 0
        else:
            place -= 1
            step = -1
        while step and 0 <= place + step < len(SHARES) and rate(SHARES[place + step]) < rate(SHARES[place]):
            place += step
        if not found or rate(SHARES[place]) < relaxed:
            for neighbour in SHARES[max(place - 1, 0) : place + 2]:
                rate((SHARES[place] + neighbour) / 2)
        if not found:
            for share in SHARES:
                rate(share)
        if len(self._replay.events) <= FEW_EVENTS:
            for share in FINE_SHARES:
                rate(share)
        return found

    def _leaves_room_for_all(self) -> bool:
        """Return True if moves of the state make room for all activations."""
        state = self._scheduler.schedule(self._highest - self._problem.budget_bytes)
        inner = self._pose(state)
        return inner.fits(inner.plain)

    def _is_enough(self, found: list[JointPlan]) -> bool:
        return any(map(self._is_fast, found)) or (bool(found) and self._effort <= SMALL_EFFORT)

    def _is_fast(self, candidate: JointPlan) -> bool:
        return candidate.seconds <= NEGLIGIBLE * self._problem.plain.step_seconds

    # -- one share ------------------------------------------------------------------------------------------------

    def _plan_resident(self) -> JointPlan | None:
        """Return the plan that keeps all state on the device; None if it does not fit."""
        if self._resident.floor.peak_bytes > self._problem.budget_bytes:
            return None
        plan = self._make_plan(self._resident, moves=self._moves, effort=self._effort)
        return self._judge(plan)

    def _plan_around(self, plan: Plan) -> JointPlan | None:
        """Plan the activations anew, with full effort, beside the moves of the state of a plan."""
        made = self._plan_beside(plan.state, self._moves, is_quick=False)
        return None if made is None else self._complete(made, list_state_reads(self._trace, made))

    def _plan_share(self, share: float) -> JointPlan | None:
        """Return a quick plan for one share; as for `_plan_under`."""
        return self._plan_under(self._lowest + share * (self._highest - self._lowest), {})

    def _plan_relaxed(self, tighter: float) -> JointPlan | None:
        """Return a quick plan that follows the fluid relaxation within a part of the budget; as for `_plan_under`."""
        budget_bytes = max(int(tighter * self._problem.budget_bytes), self._problem.floor.peak_bytes)
        problem = dataclasses.replace(self._problem, budget_bytes=budget_bytes)
        fluid = solve_fluid(problem, recompute=self._moves != "offload", offload=self._moves != "recompute")
        if fluid is None:
            return None
        gap_arrays = make_gap_arrays(problem)
        shares = fluid.recomputed + fluid.offloaded
        moved = {fluid.keys[index]: float(shares[index]) for index in gap_arrays.repeats.tolist()}
        shares[gap_arrays.repeats] = 0.0
        return self._plan_under(self._highest - gap_arrays.free(shares, len(self._highest)), moved)

    def _plan_under(self, limit: Array, preferred: Mapping[Key, float]) -> JointPlan | None:
        """Return a quick plan whose activations stay below a curve; without replays if none with them can be completed.

        None if none fits, or if the same moves of the state have been tried.
        """
        excess = np.ceil(limit).astype(np.int64) - self._problem.budget_bytes
        pins: Pins = {}
        for _ in range(ROUNDS):
            state = self._scheduler.schedule(excess, pins, preferred=preferred)
            if state in self._tried:
                return None
            self._tried.add(state)
            plan = self._plan_beside(state, self._moves, is_quick=True)
            if plan is None:
                break
            read = list_state_reads(self._trace, plan)
            found = self._complete(plan, read)
            if found is not None or self._moves == "offload":
                return found
            for storage, ticks in read.items():
                pins.setdefault(storage, set()).update(ticks)
        if self._moves != "both":
            return None
        plan = self._plan_beside(self._scheduler.schedule(excess), "offload", is_quick=True)
        return None if plan is None else self._complete(plan, {})

    def _plan_beside(self, state: tuple[Decision, ...], moves: Moves, *, is_quick: bool) -> Plan | None:
        """Plan the activations beside moves of the state; None if they do not fit beside them."""
        inner = self._pose(state)
        if inner.floor.peak_bytes > inner.budget_bytes:
            return None
        if is_quick:
            made = self._make_quickly(inner, moves=moves, effort=QUICK * self._effort)
        else:
            made = self._make_plan(inner, moves=moves, effort=self._effort)
        host_bytes = None if made.host_bytes is None else made.host_bytes + self._count_below(state)
        return dataclasses.replace(made, state=state, host_bytes=host_bytes)

    def _complete(self, plan: Plan, read: Pins) -> JointPlan | None:
        """Choose the moves of the state once more, for the memory that a plan leaves; return the better plan."""
        excess = self._find_excess(plan)
        traffic = list_traffic(self._replay, plan)
        states = {
            self._scheduler.schedule(excess, read, exposed=exposed, traffic=each)
            for exposed, each in [*((exposed, traffic) for exposed in WEIGHTS), (EXPOSED, NO_TRAFFIC)]
        }
        made = [self._judge(dataclasses.replace(plan, state=state)) for state in (plan.state, *states)]
        fastest = sorted((each for each in made if each is not None), key=lambda each: each.seconds)
        return _find_fastest(map(self._retime, fastest[:RETIMED]))

    def _retime(self, candidate: JointPlan) -> JointPlan:
        """Shift the moves for which the step waits."""
        return self._judge(self._retimer.shift(candidate.plan)) or candidate

    def _find_excess(self, plan: Plan) -> Curve:
        """Return the bytes by which each tick exceeds the budget if all state stays."""
        held = np.array(self._replay.run(plan).live_bytes, dtype=np.int64)
        for storage, spans in list_away(self._trace, plan).items():
            for begin, end in spans:
                held[begin:end] += int(self._replay.rounded[storage])
        return held - self._problem.budget_bytes

    def _judge(self, plan: Plan) -> JointPlan | None:
        """Return a plan with its forecast; None if it does not fit, or cannot be carried out."""
        try:
            check(self._trace, plan)
        except TraceError:
            return None
        forecast = self._replay.run(plan)
        return JointPlan(plan, forecast.step_seconds) if self._problem.fits(forecast) else None

    def _pose(self, state: tuple[Decision, ...]) -> Problem:
        """Return the problem of the activations beside moves of the state."""
        problem, host_bytes = self._problem, self._replay.host_bytes
        if host_bytes is not None and state:
            least = 0 if self._replay.overflow is None else min(host_bytes, LEAST_HOST_BYTES)
            host_bytes = max(host_bytes - self._count_below(state), least)
        trace = fix_state(self._trace, state) if state else self._trace
        return pose(trace, self._share_link(state), problem.budget_bytes, min_offload_bytes=problem.drafter.min_bytes,
                    host_bytes=host_bytes)  # fmt: skip

    def _share_link(self, state: tuple[Decision, ...]) -> Costs:
        """Return costs with the part of the link that the state's moves leave."""
        costs, step_seconds = self._replay.costs, self._problem.plain.step_seconds
        link, plan = (
            costs.link,
            Plan(trace_digest="", strategy="", budget_bytes=0, decisions=(), segments=(), state=state),
        )
        moves = list_moves(self._trace, plan)
        sizes = self._trace.storages
        out = sum(offload_seconds(link, sizes[each.storage].nbytes) for each in moves if each.kind is MoveKind.COPY)
        back = sum(reload_seconds(link, sizes[each.storage].nbytes) for each in moves if each.kind is MoveKind.RELOAD)
        if link.half_duplex:
            out = back = out + back
        left = [max(LEAST_LINK, 1.0 - seconds / step_seconds) if step_seconds else 1.0 for seconds in (out, back)]
        link = dataclasses.replace(link, out_bytes_per_second=link.out_bytes_per_second * left[0],
                                   back_bytes_per_second=link.back_bytes_per_second * left[1])  # fmt: skip
        return dataclasses.replace(costs, link=link)

    def _count_below(self, state: tuple[Decision, ...]) -> int:
        """Return the bytes of the state's copies in the tiers below."""
        return sum(int(self._replay.rounded[storage]) for storage in {decision.storage for decision in state})


def list_state_reads(trace: Trace, plan: Plan) -> Pins:
    """Return the ticks at which replays of a plan read the state, by storage."""
    replays: dict[int, int] = {}
    for decision in plan.decisions:
        if decision.choice is Choice.RECOMPUTE:
            closes = trace.gaps[decision.storage][decision.gap].closes
            replays[decision.segment] = min(replays.get(decision.segment, closes), closes)
    ops = {op.tick: op for op in trace.ops}
    read: Pins = {}
    for index, segment in enumerate(plan.segments):
        for storage in {view.storage for tick in segment.ops for view in ops[tick].reads}.intersection(trace.state):
            read.setdefault(storage, set()).add(replays[index])
    return read


def _find_fastest(candidates: Iterable[JointPlan | None]) -> JointPlan | None:
    return min((each for each in candidates if each is not None), key=lambda each: each.seconds, default=None)

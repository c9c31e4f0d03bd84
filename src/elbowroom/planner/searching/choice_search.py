"""Looks for the best choices within a budget: several starts, annealed side by side, the best of them to the end."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from elbowroom.ir.plan import Choice, Plan
from elbowroom.planner.bounds.fluid import FluidSolution, solve_fluid
from elbowroom.planner.heuristics.revolve import revolve
from elbowroom.planner.interruption import ends_search
from elbowroom.planner.options import find_strategy
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.choice_vectors import ChoiceVectorPlanner
from elbowroom.planner.schedule.draft import Option
from elbowroom.planner.schedule.merge_replays import merge_replays
from elbowroom.planner.searching.annealing import SearchSpace, SweepLimits, find_excess, polish, try_all
from elbowroom.planner.searching.annealing_runs import AnnealingRun, BestChoices, anneal_all
from elbowroom.planner.searching.cores import run_all
from elbowroom.planner.searching.low_peak_choices import WINDOWS, list_low, round_shares
from elbowroom.planner.searching.search_space import find_search_space
from elbowroom.simulator.compiled_loops.columns import Array
from elbowroom.simulator.compiled_loops.segments import CHOICES, KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_OWN
from elbowroom.simulator.compiled_loops.sweep import sweep

logger = logging.getLogger(__name__)

WORK = 11_000_000
"""Events swept in one search: about a second. A count and not a time, so that plans repeat."""

FEWEST_TURNS = 300
ENOUGH = 20_000
TURNS_A_GAP = 100
"""More sweeps than `ENOUGH` and than so many a gap are not worth it."""

TIGHTER = (1.0, 0.94, 0.88, 0.82)
"""Of the budget, for which the relaxation is solved: whole storages and whole transfers need some room."""

EVENTS_RELAXED = 12_000
"""For longer traces it is solved for the first two alone."""

BOTH = 2
"""The roundings that runs begin from; all of them are looked at as plans."""

ASKED, EVENTS_ASKED = ("capuchin",), 4_000
"""Strategies whose plans are begun from, too, where traces are no longer than this: what they take grows faster."""

LISTED = 10
"""Roundings that are looked at as plans."""

JOINED = 4
"""Plans in which replays are joined, the fastest without."""

SLACKS = (0.5, 0.0, 2.0)
"""Reloads begin this many of their own durations before they must."""

HEATS = ((4e-4, 5e-6), (1e-2, 1e-5))
"""Temperatures at the beginning and at the end of a walk, in plain steps."""

HARDLY = 0.1

FINISHERS = 4
"""Walks that go on from the best."""

FAR, MOST_ROUNDS = 1.15, 6
"""While the best takes more than so many times the bound, runs go on from it again, so many times in all."""

POLISH = 1
"""Walks' worth of turns for single changes in the end."""

AS_CHOICE = {Choice.OFFLOAD: OFFLOAD, Choice.RECOMPUTE: RECOMPUTE}

Moves = Literal["both", "offload", "recompute"]
"""How storages may leave."""


@dataclasses.dataclass(frozen=True, slots=True)
class SearchResult:
    """A plan, and whether the search for it came to its end."""

    plan: Plan
    is_whole: bool


def search_choices(
    problem: Problem, strategy: str, moves: Moves = "both", effort: float = 1.0, joined: int = JOINED
) -> SearchResult:
    """The plan of the best choices found within the budget; if none were, that of those nearest to it.

    An interruption (Ctrl-C) ends the search and not the program: what was best so far is returned. See `interruption`.
    """
    vectors = ChoiceVectorPlanner(problem)
    space, terms = _find_space(vectors, problem, moves), _terms(problem)
    starts = _simple_starts(space)
    best, plans = BestChoices(_find_lowest(vectors, starts, terms), np.inf, SLACKS[0]), list[Plan]()
    is_whole = True
    if _find_excess(vectors, best.choices, terms) == 0 or problem.floor.peak_bytes <= problem.budget_bytes:
        try:
            found, plans = _search(problem, vectors, space, starts, best, moves, effort)
            if best.seconds == np.inf:
                best.choices = _find_lowest(vectors, [best.choices, *found], terms)
            for choices in [best.choices, *found[:LISTED]]:
                plans += _list_plans(problem, vectors, choices, strategy)
        except KeyboardInterrupt:
            if not ends_search():
                raise
            logger.warning("planning was interrupted: going on with the best plan so far")
            is_whole = False
    plans = [vectors.make_plan(best.choices, strategy, best.slack), *plans]
    return SearchResult(dataclasses.replace(_choose(problem, plans, joined), strategy=strategy), is_whole)


def _choose(problem: Problem, plans: list[Plan], count: int) -> Plan:
    """The fastest that fits, the best of them with replays joined; if none does, the first."""
    plans = list(dict.fromkeys(plans))
    timed = sorted(_time(problem, plans))
    joined = [merge_replays(problem, plans[place]) for seconds, place in timed[:count] if seconds < np.inf]
    if not joined or count == 1:
        return [*joined, *plans][0]
    return merge_replays(problem, joined[min(_time(problem, joined))[1]])  # there may be more to join


def _time(problem: Problem, plans: list[Plan]) -> list[tuple[float, int]]:
    """Seconds of each plan, infinite if it does not fit, and its place."""
    forecasts = [problem.drafter.replay.run(plan) for plan in plans]
    return [(each.step_seconds if problem.fits(each) else np.inf, place) for place, each in enumerate(forecasts)]


def _list_plans(problem: Problem, vectors: ChoiceVectorPlanner, choices: Array, strategy: str) -> list[Plan]:
    """Return plans of the choices: with moves as early as memory allows, and with moves just in time."""
    ways = {OFFLOAD: Option(Choice.OFFLOAD), RECOMPUTE: Option(Choice.RECOMPUTE)}
    draft = {key: ways[min(choice, RECOMPUTE)] for key, choice in zip(vectors.keys, choices, strict=True) if choice}
    drafted = problem.drafter.finish(draft, strategy, problem.budget_bytes)
    return [vectors.make_plan(choices, strategy, SLACKS[0]), *([] if drafted is None else [drafted])]


def _search(
    problem: Problem,
    vectors: ChoiceVectorPlanner,
    space: SearchSpace,
    starts: list[Array],
    best: BestChoices,
    moves: Moves,
    effort: float,
) -> tuple[list[Array], list[Plan]]:
    """Improve `best`; returns choices and plans that may be worth a look, too."""
    columns, room, terms = vectors.columns, vectors.room, _terms(problem)
    is_short = len(columns.events) <= EVENTS_ASKED
    names = ASKED if is_short and moves == "both" else ()
    asked = [functools.partial(each, problem) for each in (*map(find_strategy, names), *_seeds(moves))]
    enough = max(ENOUGH, TURNS_A_GAP * len(space.alike))
    turns = int(effort * min(max(FEWEST_TURNS, WORK // len(columns.events)), enough))
    if CHOICES ** len(space.alike) <= turns:
        _try_all(vectors, space, terms, best)
        if best.seconds < np.inf:
            return [], _ask(asked)
    fluids = _relax(problem, moves, len(columns.events))
    found = [round_shares(vectors, fluid, space.allowed) for fluid in fluids] or [best.choices.copy()]
    if all(_find_excess(vectors, start, terms) for start in (*starts, *found)):
        low = list_low(problem, vectors, space.allowed, recompute=moves != "offload", offload=moves != "recompute")
        low.sort(key=lambda choices: _rate(vectors, choices, terms))
        found = [found[0], *low, *found[1:]]
        starts = [*starts, *low]
    # A step without compute has no time to measure heat by, but moving everything takes some.
    scale = max(problem.plain.step_seconds, HARDLY * problem.floor.step_seconds)
    prices = float(fluids[0].byte_prices.sum()) if fluids else 0.0
    price = 2 * max(prices, 1e-3 * scale / problem.budget_bytes)
    share = turns // (len(HEATS) * len(found[:BOTH]) + FINISHERS + POLISH)
    hot, cold = (heat * scale for heat in HEATS[0])

    def look(at: list[Array]) -> list[AnnealingRun]:
        return [AnnealingRun(start, cold, cold, 0, price, slack) for start in at for slack in SLACKS]

    runs = [
        AnnealingRun(start, hot * scale, cold * scale, share, price, SLACKS[0])
        for hot, cold in HEATS
        for start in found[:BOTH]
    ]
    plans = anneal_all(columns, space, terms, [*runs, *look(starts)], best, beside=asked)
    anneal_all(
        columns, space, terms, look([_read(vectors, plan, space) for plan in plans if plan.strategy in ASKED]), best
    )
    slacks = list(itertools.islice(itertools.cycle(SLACKS), FINISHERS))
    bound_seconds = fluids[0].seconds if fluids else np.inf
    for again in range(MOST_ROUNDS):
        if again and best.seconds <= FAR * bound_seconds:
            break
        runs = [AnnealingRun(best.choices.copy(), hot, cold, share, price, slack, again) for slack in slacks]
        anneal_all(columns, space, terms, runs, best)
    # A schedule of the chain that is ahead goes its own way, so that it never keeps the others from theirs.
    ahead = [plans[place] for seconds, place in _time(problem, plans) if seconds < best.seconds]
    starts = [_read(vectors, plan, space) for plan in ahead]
    runs = [AnnealingRun(start, hot, cold, share, price, slack) for start in starts for slack in slacks]
    anneal_all(columns, space, terms, runs, best)
    best.seconds = polish(columns, space, terms._replace(slack=best.slack), best.choices, POLISH * share, room)
    return found, plans


def _try_all(vectors: ChoiceVectorPlanner, space: SearchSpace, terms: SweepLimits, best: BestChoices) -> None:
    """Set `best` to the fastest of all vectors of choices, under each slack."""
    for slack in SLACKS:
        choices = best.choices.copy()
        seconds = try_all(vectors.columns, space, terms._replace(slack=slack), choices, vectors.room)
        if seconds < best.seconds:
            best.choices = choices
            best.seconds = seconds
            best.slack = slack


def _seeds(moves: Moves) -> Sequence[Callable[[Problem], Plan | None]]:
    return () if moves == "offload" else (revolve,)


def _ask(asked: Sequence[Callable[[], Plan | None]]) -> list[Plan]:
    return [plan for plan in run_all(asked) if plan is not None]


def _find_space(vectors: ChoiceVectorPlanner, problem: Problem, moves: Moves) -> SearchSpace:
    space = find_search_space(vectors.columns, problem.budget_bytes, vectors.room.segments)
    if moves == "recompute":
        space.allowed[:, OFFLOAD] = False
    elif moves == "offload":
        space.allowed[:, RECOMPUTE:] = False
    return space


def _find_excess(vectors: ChoiceVectorPlanner, choices: Array, terms: SweepLimits) -> int:
    """Bytes by which choices do not fit."""
    if not sweep(vectors.columns, choices, terms.budget_bytes, terms.slack, np.inf, vectors.room):
        return 1 << 62
    return find_excess(terms, vectors.room)


def _find_lowest(vectors: ChoiceVectorPlanner, starts: list[Array], terms: SweepLimits) -> Array:
    return min(starts, key=lambda start: _find_excess(vectors, start, terms))


def _rate(vectors: ChoiceVectorPlanner, choices: Array, terms: SweepLimits) -> tuple[int, float]:
    """Excess and seconds: the less of both the better."""
    return _find_excess(vectors, choices, terms), float(vectors.room.outcome[0].seconds)


def _relax(problem: Problem, moves: Moves, events: int) -> list[FluidSolution]:
    """Solve the relaxation for the budget, and for as many smaller budgets as the length of the trace allows."""

    def solve(tighter: float) -> FluidSolution | None:
        budget_bytes = max(int(tighter * problem.budget_bytes), problem.floor.peak_bytes)
        each = dataclasses.replace(problem, budget_bytes=budget_bytes)
        return solve_fluid(each, windows=WINDOWS, recompute=moves != "offload", offload=moves != "recompute")

    count = min(len(TIGHTER), max(BOTH, EVENTS_RELAXED // events))
    solved = run_all([functools.partial(solve, tighter) for tighter in TIGHTER[:count]])
    return [fluid for fluid in solved if fluid is not None]


def _read(vectors: ChoiceVectorPlanner, plan: Plan, space: SearchSpace) -> Array:
    """The choices of a plan, as far as they are allowed."""
    made = {(decision.storage, decision.gap): AS_CHOICE[decision.choice] for decision in plan.decisions}
    choices = np.asarray([made.get(key, KEEP) for key in vectors.keys])
    return np.where(space.allowed[np.arange(len(choices)), choices], choices, KEEP).astype(np.int8)


def _simple_starts(space: SearchSpace) -> list[Array]:
    """Return simple starts: keep everything; move everything in one way, or in the other where that is impossible."""
    starts = [np.zeros(len(space.allowed), dtype=np.int8)]
    for orders in ((OFFLOAD,), (RECOMPUTE, OFFLOAD), (RECOMPUTE,), (RECOMPUTE_OWN, OFFLOAD)):
        choices = np.full(len(space.allowed), KEEP, dtype=np.int8)
        for choice in reversed(orders):
            chosen = space.alike[space.allowed[space.alike, choice]]
            choices[chosen] = choice
        starts.append(choices)
    return starts


def _terms(problem: Problem) -> SweepLimits:
    host_bytes = 1 << 62 if problem.host_bytes is None else problem.host_bytes
    return SweepLimits(budget_bytes=problem.budget_bytes, host_bytes=host_bytes, slack=SLACKS[0])

"""Looks for the best choices within a budget: several starts, annealed side by side, the best of them to the end."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from elbowroom._compiled import IS_COMPILED
from elbowroom.ir.plan import Choice, Plan
from elbowroom.planner.annealing import Space, Terms, find_excess, polish, try_all
from elbowroom.planner.composer import Composer
from elbowroom.planner.cores import run_all
from elbowroom.planner.draft import Option
from elbowroom.planner.fluid import FluidSolution, solve_fluid
from elbowroom.planner.joining import join_replays
from elbowroom.planner.lowering import WINDOWS, list_low, round_shares
from elbowroom.planner.options import find_strategy
from elbowroom.planner.pricing import find_space
from elbowroom.planner.problem import Problem
from elbowroom.planner.revolve import revolve
from elbowroom.planner.walks import Best, Walk, walk_all
from elbowroom.simulator.columns import Array
from elbowroom.simulator.segments import ANEW, CHOICES, KEEP, OFFLOAD, RECOMPUTE
from elbowroom.simulator.sweep import sweep

logger = logging.getLogger(__name__)

WORK = 11_000_000 if IS_COMPILED else 0
"""Events swept in one search: about a second. A count and not a time, so that plans repeat. Without a compiler that
would be minutes, so there the best of the roundings must do."""

FEWEST_TURNS = 300 if IS_COMPILED else 0
ENOUGH = 20_000
TURNS_A_GAP = 100
"""More sweeps than `ENOUGH` and than so many a gap are not worth it."""

TIGHTER = (1.0, 0.94, 0.88, 0.82) if IS_COMPILED else (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.76, 0.7, 0.6)
"""Of the budget, for which the relaxation is solved: whole storages and whole transfers need some room."""

EVENTS_RELAXED = 12_000
"""For longer traces it is solved for the first two alone."""

BOTH = 2
"""The roundings that walks begin from; all of them are looked at as plans."""

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
"""While the best takes more than so many times the bound, walks go on from it again, so many times in all."""

POLISH = 1
"""Walks' worth of turns for single changes in the end."""

AS_CHOICE = {Choice.OFFLOAD: OFFLOAD, Choice.RECOMPUTE: RECOMPUTE}

Moves = Literal["both", "offload", "recompute"]
"""How storages may leave."""


@dataclasses.dataclass(frozen=True, slots=True)
class Explored:
    """A plan, and whether the search for it came to its end."""

    plan: Plan
    is_whole: bool


def explore(problem: Problem, strategy: str, moves: Moves = "both", effort: float = 1.0) -> Explored:
    """The plan of the best choices found within the budget; if none were, that of those nearest to it.

    An interruption (Ctrl-C) ends the search and not the program: what was best so far is returned.
    """
    composer = Composer(problem)
    space, terms = _find_space(composer, problem, moves), _terms(problem)
    starts = _simple_starts(space)
    best, plans = Best(_find_lowest(composer, starts, terms), np.inf, SLACKS[0]), list[Plan]()
    is_whole = True
    if _find_excess(composer, best.choices, terms) == 0 or problem.floor.peak_bytes <= problem.budget_bytes:
        try:
            found, plans = _search(problem, composer, space, starts, best, moves, effort)
            if best.seconds == np.inf:
                best.choices = _find_lowest(composer, [best.choices, *found], terms)
            for choices in [best.choices, *found[:LISTED]]:
                plans += _list_plans(problem, composer, choices, strategy)
        except KeyboardInterrupt:
            logger.warning("planning was interrupted: going on with the best plan so far")
            is_whole = False
    plans = [composer.make_plan(best.choices, strategy, best.slack), *plans]
    return Explored(dataclasses.replace(_choose(problem, plans), strategy=strategy), is_whole)


def _choose(problem: Problem, plans: list[Plan]) -> Plan:
    """The fastest that fits, the best of them with replays joined; if none does, the first."""
    plans = list(dict.fromkeys(plans))
    timed = sorted(_time(problem, plans))
    joined = [join_replays(problem, plans[place]) for seconds, place in timed[:JOINED] if seconds < np.inf]
    if not joined:
        return plans[0]
    return join_replays(problem, joined[min(_time(problem, joined))[1]])  # there may be more to join


def _time(problem: Problem, plans: list[Plan]) -> list[tuple[float, int]]:
    """Seconds of each plan, infinite if it does not fit, and its place."""
    forecasts = [problem.drafter.replay.run(plan) for plan in plans]
    return [(each.step_seconds if problem.fits(each) else np.inf, place) for place, each in enumerate(forecasts)]


def _list_plans(problem: Problem, composer: Composer, choices: Array, strategy: str) -> list[Plan]:
    """The same choices with moves as soon as there is room, and with moves just in time."""
    ways = {OFFLOAD: Option(Choice.OFFLOAD), RECOMPUTE: Option(Choice.RECOMPUTE)}
    draft = {key: ways[min(choice, RECOMPUTE)] for key, choice in zip(composer.keys, choices, strict=True) if choice}
    drafted = problem.drafter.finish(draft, strategy, problem.budget_bytes)
    return [composer.make_plan(choices, strategy, SLACKS[0]), *([] if drafted is None else [drafted])]


def _search(
    problem: Problem, composer: Composer, space: Space, starts: list[Array], best: Best, moves: Moves, effort: float
) -> tuple[list[Array], list[Plan]]:
    """Improve `best`; returns choices and plans that may be worth a look, too."""
    columns, room, terms = composer.columns, composer.room, _terms(problem)
    is_short = len(columns.events) <= EVENTS_ASKED
    names = ASKED if is_short and moves == "both" else ()
    asked = [functools.partial(each, problem) for each in (*map(find_strategy, names), *_seeds(moves))]
    enough = max(ENOUGH, TURNS_A_GAP * len(space.alike))
    turns = int(effort * min(max(FEWEST_TURNS, WORK // len(columns.events)), enough))
    if CHOICES ** len(space.alike) <= turns:
        for slack in SLACKS:
            choices, all_terms = best.choices.copy(), terms._replace(slack=slack)
            seconds = try_all(columns, space, all_terms, choices, room)
            if seconds < best.seconds:
                best.choices, best.seconds, best.slack = choices, seconds, slack
        if best.seconds < np.inf:
            return [], _ask(asked)
    fluids = _relax(problem, moves, len(columns.events))
    found = [round_shares(composer, fluid, space.allowed) for fluid in fluids] or [best.choices.copy()]
    if all(_find_excess(composer, start, terms) for start in (*starts, *found)):
        low = list_low(problem, composer, space.allowed, recompute=moves != "offload", offload=moves != "recompute")
        low.sort(key=lambda choices: _rate(composer, choices, terms))
        found = [found[0], *low, *found[1:]]
        starts = [*starts, *low]
    if not WORK:
        logger.warning("numba is not installed, so this plan is a rough one: pip install numba")
        return found, _ask(asked)
    # A step without compute has no time to measure heat by, but moving everything takes some.
    scale = max(problem.plain.step_seconds, HARDLY * problem.floor.step_seconds)
    prices = float(fluids[0].byte_prices.sum()) if fluids else 0.0
    price = 2 * max(prices, 1e-3 * scale / problem.budget_bytes)
    share = turns // (len(HEATS) * len(found[:BOTH]) + FINISHERS + POLISH)
    hot, cold = (heat * scale for heat in HEATS[0])

    def look(at: list[Array]) -> list[Walk]:
        return [Walk(start, cold, cold, 0, price, slack) for start in at for slack in SLACKS]

    walks = [
        Walk(start, hot * scale, cold * scale, share, price, SLACKS[0]) for hot, cold in HEATS for start in found[:BOTH]
    ]
    plans = walk_all(columns, space, terms, [*walks, *look(starts)], best, beside=asked)
    walk_all(
        columns, space, terms, look([_read(composer, plan, space) for plan in plans if plan.strategy in ASKED]), best
    )
    slacks = list(itertools.islice(itertools.cycle(SLACKS), FINISHERS))
    bound_seconds = fluids[0].seconds if fluids else np.inf
    for again in range(MOST_ROUNDS):
        if again and best.seconds <= FAR * bound_seconds:
            break
        walks = [Walk(best.choices.copy(), hot, cold, share, price, slack, again) for slack in slacks]
        walk_all(columns, space, terms, walks, best)
    # A schedule of the chain that is ahead goes its own way, so that it never keeps the others from theirs.
    ahead = [plans[place] for seconds, place in _time(problem, plans) if seconds < best.seconds]
    walks = [Walk(_read(composer, plan, space), hot, cold, share, price, slack) for plan in ahead for slack in slacks]
    walk_all(columns, space, terms, walks, best)
    best.seconds = polish(columns, space, terms._replace(slack=best.slack), best.choices, POLISH * share, room)
    return found, plans


def _seeds(moves: Moves) -> Sequence[Callable[[Problem], Plan | None]]:
    return () if moves == "offload" else (revolve,)


def _ask(asked: Sequence[Callable[[], Plan | None]]) -> list[Plan]:
    return [plan for plan in run_all(asked) if plan is not None]


def _find_space(composer: Composer, problem: Problem, moves: Moves) -> Space:
    space = find_space(composer.columns, problem.budget_bytes, composer.room.segments)
    if moves == "recompute":
        space.allowed[:, OFFLOAD] = False
    elif moves == "offload":
        space.allowed[:, RECOMPUTE:] = False
    return space


def _find_excess(composer: Composer, choices: Array, terms: Terms) -> int:
    """Bytes by which choices do not fit."""
    if not sweep(composer.columns, choices, terms.budget_bytes, terms.slack, np.inf, composer.room):
        return 1 << 62
    return find_excess(terms, composer.room)


def _find_lowest(composer: Composer, starts: list[Array], terms: Terms) -> Array:
    return min(starts, key=lambda start: _find_excess(composer, start, terms))


def _rate(composer: Composer, choices: Array, terms: Terms) -> tuple[int, float]:
    """Excess and seconds: the less of both the better."""
    return _find_excess(composer, choices, terms), float(composer.room.outcome[0].seconds)


def _relax(problem: Problem, moves: Moves, events: int) -> list[FluidSolution]:
    """Of the budget itself, and of smaller ones, as many as the length of the trace allows."""

    def solve(tighter: float) -> FluidSolution | None:
        budget_bytes = max(int(tighter * problem.budget_bytes), problem.floor.peak_bytes)
        each = dataclasses.replace(problem, budget_bytes=budget_bytes)
        return solve_fluid(each, windows=WINDOWS, recompute=moves != "offload", offload=moves != "recompute")

    count = min(len(TIGHTER), max(BOTH, EVENTS_RELAXED // events))
    solved = run_all([functools.partial(solve, tighter) for tighter in TIGHTER[:count]])
    return [fluid for fluid in solved if fluid is not None]


def _read(composer: Composer, plan: Plan, space: Space) -> Array:
    """The choices of a plan, as far as they are allowed."""
    made = {(decision.storage, decision.gap): AS_CHOICE[decision.choice] for decision in plan.decisions}
    choices = np.asarray([made.get(key, KEEP) for key in composer.keys])
    return np.where(space.allowed[np.arange(len(choices)), choices], choices, KEEP).astype(np.int8)


def _simple_starts(space: Space) -> list[Array]:
    """Nothing away, and everything in one manner, or in the other where that is possible."""
    starts = [np.zeros(len(space.allowed), dtype=np.int8)]
    for orders in ((OFFLOAD,), (RECOMPUTE, OFFLOAD), (RECOMPUTE,), (ANEW, OFFLOAD)):
        choices = np.full(len(space.allowed), KEEP, dtype=np.int8)
        for choice in reversed(orders):
            chosen = space.alike[space.allowed[space.alike, choice]]
            choices[chosen] = choice
        starts.append(choices)
    return starts


def _terms(problem: Problem) -> Terms:
    host_bytes = 1 << 62 if problem.host_bytes is None else problem.host_bytes
    return Terms(budget_bytes=problem.budget_bytes, host_bytes=host_bytes, slack=SLACKS[0])

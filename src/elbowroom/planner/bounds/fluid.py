"""Joint fluid linear program: a bound on the time of every plan, fractional choices, and dual prices.

    memory of the plain step      /\\___/\\
    budget              ---------/--------\\-----------
    pivots                 |    | |  |  || |    |        ticks that the program constrains
    price of a byte        0    0 0  p  q0 r    0        seconds saved per byte of extra memory at the pivot

Ticks between pivots are unconstrained, so the result is a bound for any set of pivots. Where the solution exceeds the
budget between them, pivots are added and the program is solved again.

Each gap may be dropped or offloaded in part, copies proceed byte by byte in any order, everything that a replay reads
is on the device, and replays take no memory. So no plan is faster; an integral plan may be slower.

Source: planning as a linear program over what spans each tick follows the interval-packing view of caching (A. Bar-Noy,
R. Bar-Yehuda, A. Freund, J. Naor, B. Schieber, "A unified approach to approximating resource allocation and
scheduling", Journal of the ACM 48, 2001). Ours: offloads in it as cumulative flows over two lanes, lower bounds on
replays, and the pivots.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from elbowroom.planner.bounds.fluid_model import Model, ModelBuilder
from elbowroom.planner.bounds.gap_arrays import Integers, Numbers, make_gap_arrays
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.draft import Key

FEW_TICKS = 256
"""In a trace with at most this many ticks, every tick is a pivot."""

WINDOWS = 56
"""Initial pivots, spread over time and over ticks; also the most that a round adds."""

MOST_ROUNDS = 5

WORTH_A_ROUND = 2e-5
"""Share of the plain step: the rounds end when one raises the bound by less."""

TOLERANCE = 2e-4
"""Share of the plain peak: excess between pivots that is accepted without more pivots."""

CAUTION = 1e-9
"""Share of the plain step: subtracted from the bound to cover rounding errors in sums."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FluidSolution:
    """Solution of the linear program; arrays are indexed by gap as in `keys`, or by pivot.

    Attributes:
        seconds: no plan takes less. The dual prices alone prove it, however accurate the solver was.
        keys: the gaps that can lower memory use where it exceeds the budget, in order of opening.
        recomputed, offloaded: the share of each gap.
        pivots: ticks; the last is the end of the trace.
        byte_prices: seconds that the step saves per byte of extra memory at the pivot.
        extra_seconds: replays and waits between the previous pivot and this one.
        out_prices, back_prices: between the same pivots: seconds that the step saves per extra second of the lane;
            equal on a link with one lane.
    """

    seconds: float
    keys: tuple[Key, ...]
    recomputed: Numbers
    offloaded: Numbers
    pivots: Integers
    byte_prices: Numbers
    extra_seconds: Numbers
    out_prices: Numbers
    back_prices: Numbers


def solve_fluid(
    problem: Problem, *, recompute: bool = True, offload: bool = True, windows: int = WINDOWS
) -> FluidSolution | None:
    """Solve the relaxation; return the bound, the shares and the prices.

    Args:
        recompute, offload: whether plans may do so.
        windows: number of initial pivots; a bound is valid with any, and tighter with more.

    Returns:
        None if no such plan fits.

    Cost: several runs of HiGHS, each about a tenth of a second per few hundred gaps.
    """
    builder = ModelBuilder(problem, make_gap_arrays(problem), recompute=recompute, offload=offload)
    pivots = np.union1d(_place_pivots(problem, windows), [builder.first_replay])
    best: FluidSolution | None = None
    for _ in range(MOST_ROUNDS):
        model = builder.build(pivots)
        solved = find_fluid(model)
        if solved is None:
            return best
        if solved.status == 2:
            return None
        found = _read(problem, builder, model, solved)
        gain = np.inf if best is None else (found.seconds - best.seconds) / model.unit_seconds
        best = found if gain >= 0 else best
        more = _find_more(problem, builder, model, solved.x, windows)
        if not len(more) or gain < WORTH_A_ROUND:
            break
        pivots = np.union1d(pivots, more)
    return best


def _place_pivots(problem: Problem, windows: int) -> Integers:
    """Return the ticks of highest plain memory use in equal intervals of time and of ticks, and the end."""
    live = np.array(problem.plain.live_bytes)
    end = len(live)
    if end <= FEW_TICKS:
        return np.arange(end + 1)
    begins = problem.drafter.replay.begins
    by_time = np.searchsorted(begins[:end], np.linspace(0.0, begins[end], windows + 1)[:-1])
    by_tick = np.linspace(0, end, windows // 4 + 1).astype(np.int64)[:-1]
    edges = np.unique(np.concatenate((by_time, by_tick)).clip(0, end - 1))
    highest = [begin + int(np.argmax(live[begin:until])) for begin, until in zip(edges, [*edges[1:], end], strict=True)]
    return np.union1d(highest, [end])


def find_fluid(model: Model, begin: Numbers | None = None, end: Numbers | None = None) -> Any:
    """Run HiGHS on a model.

    Args:
        begin, end: lower and upper bounds of the columns, as for `Model.prove`.

    Returns:
        A result of status 0, or 2 if the model is infeasible; None if HiGHS fails otherwise.
    """
    from scipy.optimize import linprog

    equal = model.equal
    between = np.zeros(len(model.most)) if begin is None else begin, model.most if end is None else end
    solved = linprog(
        model.cost, A_ub=-model.matrix[equal:], b_ub=-model.least[equal:], A_eq=model.matrix[:equal],
        b_eq=model.least[:equal], bounds=np.column_stack(between), method="highs-ds",
    )  # fmt: skip
    return solved if solved.status in (0, 2) else None


def list_prices(solved: Any) -> Numbers:
    """Return the dual price of each row, from a result of `find_fluid`."""
    return np.concatenate((solved.eqlin.marginals, np.maximum(0.0, -solved.ineqlin.marginals)))


def _read(problem: Problem, builder: ModelBuilder, model: Model, solved: Any) -> FluidSolution:
    prices = list_prices(solved)
    extra = model.prove(prices) - CAUTION  # so that it does not depend on the solver's tolerances
    count, gaps = len(model.pivots), len(builder.gap_arrays.keys)

    def read(name: str, size: int) -> Numbers:
        return np.asarray(solved.x[model.columns[name] : model.columns[name] + size])

    def price(name: str) -> Numbers:
        return np.asarray(prices[model.rows[name] : model.rows[name] + count])

    out_prices = price("out lane")
    return FluidSolution(
        seconds=problem.plain.step_seconds + max(0.0, extra) * model.unit_seconds,
        keys=builder.gap_arrays.keys,
        recomputed=read("dropped", gaps),
        offloaded=read("moved", gaps),
        pivots=model.pivots,
        byte_prices=(price("cover") + price("flow")) * (model.unit_seconds / model.unit_bytes),
        extra_seconds=read("extra", count) * model.unit_seconds,
        out_prices=out_prices,
        back_prices=price("back lane") if "back lane" in model.rows else out_prices,
    )


def _find_more(problem: Problem, builder: ModelBuilder, model: Model, found: Numbers, windows: int) -> Integers:
    """Return the ticks that exceed the budget most under a solution: at most one between two pivots."""
    over = _find_excess(problem, builder, model, found)
    before = np.searchsorted(model.pivots, np.arange(len(over)))
    order = np.lexsort((np.arange(len(over)), -over))
    order = order[over[order] > TOLERANCE * model.unit_bytes]
    _, first = np.unique(before[order], return_index=True)
    return np.sort(order[np.sort(first)[:windows]])


def _find_excess(problem: Problem, builder: ModelBuilder, model: Model, found: Numbers) -> Numbers:
    """Return the bytes over the budget at each tick, with copies between pivots as favourable as their lanes allow."""
    gap_arrays = builder.gap_arrays
    columns = model.columns
    end = len(problem.plain.live_bytes)
    gaps = len(gap_arrays.keys)
    count = len(model.pivots)
    unit = model.unit_bytes

    def read(name: str, size: int) -> Numbers:
        return np.asarray(found[columns[name] : columns[name] + size])

    moved, dirty = read("moved", gaps), builder.find_copying(found, model)
    again = gap_arrays.sum_by(gap_arrays.opens + 1, moved - dirty, end)
    saved = gap_arrays.sum_by(gap_arrays.claim_begins + 1, dirty, end)
    needed = gap_arrays.sum_by(gap_arrays.closes + 1, moved, end)
    begins = problem.drafter.replay.begins
    nearest = np.searchsorted(model.pivots, np.arange(end))  # the first pivot not before each tick
    extra = read("extra", count)[nearest] * model.unit_seconds
    since = begins[:end] - np.concatenate(([0.0], begins[model.pivots]))[nearest] + extra
    left = begins[model.pivots][nearest] - begins[:end] + extra
    out, back = read("out", count) * unit, read("back", count) * unit
    begun = read("begun", 2) * unit if len(gap_arrays.repeats) else np.zeros(2)
    sent = np.append(begun[0], out)[nearest] + _divide(since, builder.out_pace)
    sent = np.minimum(np.minimum(out[nearest], saved), sent)
    come = np.maximum(
        np.maximum(np.append(begun[1], back)[nearest], needed), back[nearest] - _divide(left, builder.back_pace)
    )
    free = gap_arrays.free(read("dropped", gaps), end)
    gone = np.minimum(gap_arrays.free(moved, end), sent + again - come)
    return np.asarray(gap_arrays.live_bytes - problem.budget_bytes - free - gone)


def _divide(seconds: Numbers, pace: float) -> Numbers:
    return seconds / pace if pace > 0 else np.full(len(seconds), np.inf)

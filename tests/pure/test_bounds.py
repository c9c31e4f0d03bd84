"""The bound holds for every plan, and the best plans come close to it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from elbowroom.errors import Infeasible, TraceError
from elbowroom.ir.check import check
from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.plan import Choice, Plan
from elbowroom.ir.trace import Role, Trace
from elbowroom.planner.bounds import fluid
from elbowroom.planner.bounds.bound import Bound, find_bound
from elbowroom.planner.bounds.fluid_model import ModelBuilder
from elbowroom.planner.bounds.gap_arrays import make_gap_arrays
from elbowroom.planner.problem import Problem, plan, pose
from elbowroom.planner.schedule.assembly import ReplayStep, assemble, list_replays
from elbowroom.planner.schedule.choice_vectors import ChoiceVectorPlanner
from elbowroom.planner.schedule.draft import Drafter, Option
from elbowroom.planner.schedule.timing import Times
from elbowroom.simulator.compiled_loops.segments import CHOICES
from elbowroom.simulator.compiled_loops.sweep import sweep
from tests.generators import KIB, Program, jobs, make_chain, make_costs, make_link, make_residual_net

QUICK = (
    "auto:effort=0.1", "keep_all", "offload_all", "recompute_all", "chen_sqrt", "vdnn", "superneurons", "capuchin",
    "tvdnn_heuristic",
)  # fmt: skip
MOST_VECTORS = 2500
EXACTLY = 1 + 1e-12


def pose_at(job: tuple[Trace, Costs], budget_bytes: int) -> Problem:
    return pose(*job, budget_bytes, min_offload_bytes=1)


def within(problem: Problem, budget_bytes: int, host_bytes: int | None = None) -> Problem:
    return dataclasses.replace(problem, budget_bytes=budget_bytes, host_bytes=host_bytes)


@given(job=jobs(), share=some.floats(0.2, 1.0))
@settings(max_examples=25)
def test_no_strategy_beats_the_bound(job: tuple[Trace, Costs], share: float) -> None:
    problem = pose_at(job, 1)
    budget_bytes = max(problem.floor.peak_bytes, int(problem.plain.peak_bytes * share))
    bound = find_bound(within(problem, budget_bytes))
    assert math.isfinite(bound.seconds)
    for strategy in QUICK:
        try:
            made = plan(*job, budget_bytes, strategy=strategy, min_offload_bytes=1)
        except Infeasible:
            continue
        seconds = problem.drafter.replay.run(made).step_seconds
        assert bound.seconds <= seconds * EXACTLY, strategy
        if all(decision.choice is Choice.RECOMPUTE for decision in made.decisions):
            assert bound.cover_seconds <= seconds * EXACTLY, strategy


def draw_plan(drafter: Drafter, dice: random.Random) -> Plan | None:
    """Return a plan with random ticks for random gaps; half of the plans may drop intermediate results of replays."""
    drops, moves = dice.random(), dice.random()
    dropped, moved = [], {}
    for key, gap in drafter.gaps.items():
        ticks = [tick for tick in drafter.event_ticks if gap.opens <= tick <= gap.closes]
        if dice.random() < drops:
            dropped.append(key)
        elif dice.random() < moves:
            release = dice.choice([gap.opens, dice.choice(ticks[:-1]), dice.randrange(gap.opens, gap.closes)])
            back = dice.choice([gap.closes, dice.randint(release, gap.closes)])
            moved[key] = Times(release=release, back=back)
    if dice.random() < 0.5:
        draft = {key: Option(Choice.OFFLOAD, release=times.release, back=times.back) for key, times in moved.items()}
        return drafter.finish(draft | dict.fromkeys(dropped, Option(Choice.RECOMPUTE)), "drawn", 1)
    replays = list(list_replays(drafter, dropped, lambda key, tick: dice.random() < 0.5))
    whole = [replay for replay in replays if isinstance(replay, ReplayStep)]
    if len(whole) < len(replays) or any(leave >= replay.tick for replay in whole for leave in replay.leaves):
        return None
    return assemble(drafter, "drawn", 1, offloads=moved, replays=whole)


def draw_plans(problem: Problem, dice: random.Random, count: int) -> Iterator[Forecast]:
    trace, replay = problem.drafter.replay.trace, problem.drafter.replay
    for _ in range(count):
        drawn = draw_plan(problem.drafter, dice)
        try:
            if drawn is not None:
                check(trace, drawn)
                yield replay.run(drawn)
        except TraceError:
            continue


@given(job=jobs(), seed=some.integers(0, 1 << 30), drag=some.sampled_from([0.0, 0.0, 1e-9]))
def test_no_random_plan_beats_the_bound(job: tuple[Trace, Costs], seed: int, drag: float) -> None:
    trace, costs = job
    costs = dataclasses.replace(costs, link=dataclasses.replace(costs.link, drag_seconds_per_byte=drag))
    problem, dice = pose_at((trace, costs), 1), random.Random(seed)
    drawn = list(draw_plans(problem, dice, 40))
    peaks = sorted({each.peak_bytes for each in drawn if each.peak_bytes < problem.plain.peak_bytes})
    assume(peaks)
    for budget_bytes in dice.sample(peaks, min(3, len(peaks))):
        fitting = [each for each in drawn if each.peak_bytes <= budget_bytes]
        bound = find_bound(within(problem, budget_bytes))
        assert bound.seconds <= min(each.step_seconds for each in fitting) * EXACTLY
        host_bytes = dice.choice([each.lower_tier_bytes for each in fitting])
        narrower = find_bound(within(problem, budget_bytes, host_bytes))
        fitting = [each for each in fitting if each.lower_tier_bytes <= host_bytes]
        assert narrower.seconds <= min(each.step_seconds for each in fitting) * EXACTLY
        assert narrower.seconds >= bound.seconds * (1 - 1e-6)


@given(job=jobs(), seed=some.integers(0, 1 << 30))
def test_fewer_pivots_give_a_weaker_but_valid_bound(job: tuple[Trace, Costs], seed: int) -> None:
    problem = pose_at(job, 1)
    drawn = list(draw_plans(problem, random.Random(seed), 20))
    peaks = sorted({each.peak_bytes for each in drawn if each.peak_bytes < problem.plain.peak_bytes})
    assume(peaks)
    budget_bytes = peaks[seed % len(peaks)]
    fastest = min(each.step_seconds for each in drawn if each.peak_bytes <= budget_bytes)
    narrow = within(problem, budget_bytes)
    everywhere = fluid.solve_fluid(narrow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fluid, "FEW_TICKS", 0)
        sparse = fluid.solve_fluid(narrow, windows=3)
    assert everywhere is not None and sparse is not None
    assert sparse.seconds <= everywhere.seconds * (1 + 1e-6) and sparse.seconds <= fastest * EXACTLY


def try_all(problem: Problem, budget_bytes: int) -> tuple[int, float, float]:
    """Return, over all choices, the lowest peak, and the fastest step within a budget: of all, and without offloads."""
    vectors = ChoiceVectorPlanner(problem)
    lowest, fastest, replayed = problem.plain.peak_bytes, math.inf, math.inf
    for vector in itertools.product(range(CHOICES), repeat=len(vectors.keys)):
        choices = np.asarray(vector, dtype=np.int8)
        for slack in (0.0, 1.0):
            if sweep(vectors.columns, choices, budget_bytes, slack, np.inf, vectors.room):
                outcome = vectors.room.outcome[0]
                lowest = min(lowest, int(outcome.peak_bytes))
                if outcome.peak_bytes <= budget_bytes:
                    fastest = min(fastest, float(outcome.seconds))
                    replayed = min(replayed, float(outcome.seconds) if 1 not in vector else math.inf)
    return lowest, fastest, replayed


@given(job=jobs(), share=some.floats(0.0, 1.0))
@settings(max_examples=30)
def test_no_choice_vector_beats_the_bound(job: tuple[Trace, Costs], share: float) -> None:
    problem = pose_at(job, 1)
    assume(0 < CHOICES ** len(problem.drafter.gaps) <= MOST_VECTORS)
    floor, peak = problem.floor.peak_bytes, problem.plain.peak_bytes
    budget_bytes = int(floor + share * (peak - floor))
    lowest, fastest, replayed = try_all(within(problem, budget_bytes), budget_bytes)
    assert lowest >= floor
    bound = find_bound(within(problem, budget_bytes))
    assert bound.floor_bytes == floor
    assert bound.seconds <= fastest * EXACTLY and bound.cover_seconds <= replayed * EXACTLY


@given(job=jobs())
def test_the_bound_is_infinite_only_below_the_floor(job: tuple[Trace, Costs]) -> None:
    problem = pose_at(job, 1)
    floor = problem.floor.peak_bytes
    below, at = find_bound(within(problem, floor - 1)), find_bound(within(problem, floor))
    assert below.seconds == below.fluid_seconds == below.cover_seconds == math.inf
    assert below.floor_bytes == at.floor_bytes == floor
    assert at.seconds <= problem.floor.step_seconds * EXACTLY


@given(job=jobs())
@settings(max_examples=25)
def test_a_larger_budget_never_raises_a_bound(job: tuple[Trace, Costs]) -> None:
    """Without latency: with it, a larger gap that counts only at the tighter budget may lower the seconds per byte."""
    trace, costs = job
    link = dataclasses.replace(costs.link, out_latency_seconds=0.0, back_latency_seconds=0.0)
    problem = pose_at((trace, dataclasses.replace(costs, link=link)), 1)
    floor, peak = problem.floor.peak_bytes, problem.plain.peak_bytes
    bounds = [find_bound(within(problem, floor + (peak - floor) * step // 6)) for step in range(7)]
    for tight, loose in itertools.pairwise(bounds):
        assert loose.seconds <= tight.seconds * (1 + 1e-6)
        assert loose.cover_seconds <= tight.cover_seconds * (1 + 1e-6)
    assert bounds[-1].seconds == problem.plain.step_seconds


@given(job=jobs(), share=some.floats(0.0, 0.99), seed=some.integers(0, 1 << 30))
@settings(max_examples=25)
def test_no_prices_prove_a_better_bound_than_the_solution(job: tuple[Trace, Costs], share: float, seed: int) -> None:
    problem = pose_at(job, 1)
    floor, peak = problem.floor.peak_bytes, problem.plain.peak_bytes
    problem = within(problem, int(floor + share * (peak - floor)))
    assume(problem.budget_bytes < peak)
    builder = ModelBuilder(problem, make_gap_arrays(problem))
    model = builder.build(np.arange(len(problem.plain.live_bytes) + 1))
    solved = fluid.find_fluid(model)
    assert solved is not None and solved.status == 0
    proved = model.prove(fluid.list_prices(solved))
    assert proved == pytest.approx(solved.fun, rel=1e-6, abs=1e-7)
    dice = np.random.default_rng(seed)
    for spread in (1e-3, 0.1, 1.0):
        prices = fluid.list_prices(solved) * dice.uniform(1 - spread, 1 + spread, len(model.least))
        assert model.prove(prices) <= solved.fun + 1e-9 * (1 + solved.fun)


def bound_of(job: tuple[Trace, Costs], budget_bytes: int) -> Bound:
    return find_bound(pose_at(job, budget_bytes))


def make_two() -> Trace:
    """Return a step that saves two results of 1000 KiB, with a third next to them, and later a temporary."""
    program = Program()
    batch = program.resident(KIB, Role.INPUT)
    first = program.op("first", [batch], 1000 * KIB)
    kept = program.save(first)
    second = program.op("second", [first], 1000 * KIB)
    saved = program.save(second)
    program.release(storage=first)
    third = program.op("third", [second], 1000 * KIB)
    program.release(storage=second)
    program.release(storage=third)
    pause = program.op("pause", [batch], 1000 * KIB, role=Role.TEMPORARY)
    program.release(storage=pause)
    for save in (saved, kept):
        need = program.need(save)
        program.op("back", [program._saves[save].storage], KIB, role=Role.TEMPORARY)
        program.release(need=need)
        program.release(save=save)
    return program.finish("two")


def test_a_bound_computed_by_hand() -> None:
    """Three blocks of 1000 KiB are live at `third`, where two fit: `first` must be away then."""
    trace = make_two()
    seconds = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    for per_second, expected in (
        (1000 * KIB / 1.0, 0.0),  # the copy out of `first` overlaps with `second`
        (1000 * KIB / 1e9, 1.0),  # replaying `first` is cheaper than waiting
        (1000 * KIB / 2.5, 0.2),  # four fifths are copied out when `third` begins; the rest is dropped
    ):
        costs = make_costs(trace, op_seconds=seconds, link=make_link(per_second=per_second, latency_seconds=0.0))
        bound = bound_of((trace, costs), 2001 * KIB)
        assert bound.seconds == pytest.approx(sum(seconds) + expected, rel=1e-6)
        assert bound.cover_seconds == pytest.approx(sum(seconds) + 1.0, rel=1e-6)
        assert bound.compute_seconds == sum(seconds)


def test_the_bound_includes_waits_for_a_slow_link() -> None:
    trace = make_chain([64 * KIB] * 8, barriers=frozenset(range(8)))
    costs = make_costs(trace, op_seconds=1e-6, link=make_link(per_second=1e6, latency_seconds=0.0))
    problem = pose_at((trace, costs), 1)
    peak = problem.plain.peak_bytes
    bound = find_bound(within(problem, peak - 192 * KIB))
    moved = 2 * 192 * KIB / 1e6  # out, and back
    assert bound.cover_seconds == math.inf
    assert 0.9 * moved < bound.link_seconds - bound.compute_seconds <= moved
    assert 0.9 * moved < bound.seconds - bound.compute_seconds <= moved


def test_the_bound_includes_replays_if_the_link_is_slow() -> None:
    trace = make_residual_net(4, 256 * KIB)
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1e3))
    problem = pose_at((trace, costs), 1)
    bound = find_bound(within(problem, int(0.6 * problem.plain.peak_bytes)))
    made = plan(trace, costs, int(0.6 * problem.plain.peak_bytes), min_offload_bytes=1)
    seconds = problem.drafter.replay.run(made).step_seconds
    assert bound.compute_seconds * 1.03 < bound.seconds <= seconds <= 1.03 * bound.seconds
    assert bound.seconds == pytest.approx(bound.cover_seconds, rel=1e-4)
    assert bound.over(seconds) == pytest.approx(seconds / bound.seconds - 1)


def make_rounds(rounds: int) -> Trace:
    """Return a step of rounds: an op needs 1000 KiB while a result of that size, which cannot be replayed, is saved."""
    program = Program()
    batch = program.resident(KIB, Role.INPUT)
    for _ in range(rounds):
        result = program.op("result", [batch], 1000 * KIB, barrier="draws numbers")
        save = program.save(result)
        program.release(storage=result)
        pause = program.op("pause", [batch], 1000 * KIB, role=Role.TEMPORARY)
        program.release(storage=pause)
        need = program.need(save)
        back = program.op("back", [result], KIB, role=Role.TEMPORARY)
        for held in ({"need": need}, {"save": save}, {"storage": back}):
            program.release(**held)
    return program.finish("rounds")


def test_host_memory_is_free_again_once_a_claim_ends() -> None:
    trace = make_rounds(3)
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1000 * KIB / 1.0, latency_seconds=0.0))
    problem = pose_at((trace, costs), 1)
    problem = within(problem, problem.floor.peak_bytes)
    roomy, narrow = (find_bound(within(problem, problem.budget_bytes, host_bytes)) for host_bytes in (None, 1000 * KIB))
    assert narrow.fluid_seconds == pytest.approx(roomy.fluid_seconds, rel=1e-6)
    assert 5.9 < narrow.seconds - narrow.compute_seconds <= 6.0  # the step waits for each copy out and back
    assert problem.floor.lower_tier_bytes == 1000 * KIB and narrow.seconds <= problem.floor.step_seconds * EXACTLY

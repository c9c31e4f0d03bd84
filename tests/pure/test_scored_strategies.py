"""AutoSwap, Capuchin, TENSILE and Checkmate, and their parts. No torch."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from elbowroom.errors import Infeasible, UsageError
from elbowroom.ir.check import check
from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.plan import Choice, Plan
from elbowroom.ir.trace import Role, Trace
from elbowroom.planner.heuristics.feedback import feed_back, find_late_reloads
from elbowroom.planner.heuristics.msps import Recomputation
from elbowroom.planner.heuristics.scores import GapCandidates, choose, make_scorer
from elbowroom.planner.ilp.recompute_graph import make_graph
from elbowroom.planner.ilp.recompute_program import RecomputeProgram
from elbowroom.planner.ilp.solver_limits import SolverLimits
from elbowroom.planner.problem import Problem, plan, pose
from elbowroom.planner.schedule.draft import Key
from elbowroom.planner.schedule.link_timetable import LinkTimetable
from elbowroom.planner.schedule.memory_curve import MemoryCurve
from elbowroom.planner.schedule.realize import RealizedChoices, realize
from elbowroom.planner.schedule.timing import CopyTimetable, list_moments
from elbowroom.planner.strategies import checkmate
from elbowroom.residency import plan_policy
from elbowroom.residency.machine import Machine
from elbowroom.simulator.simulate import simulate
from tests.generators import (
    KIB,
    Layer,
    Program,
    example,
    jobs,
    keep_everything,
    make_chain,
    make_costs,
    make_link,
    make_residual_net,
    make_trace,
    make_unet,
)
from tests.oracles import follow

CHAIN = make_chain([256 * KIB] * 8)
UNET = make_unet(4, 1024 * KIB)
LIMITS = SolverLimits(gap=5e-3, nodes=7, seconds=20.0)


def pose_at(trace: Trace, costs: Costs, share: float, *, host_bytes: int | None = None) -> Problem:
    """Return a problem with a budget at this share of the way from the lowest peak to the plain one."""
    problem = pose(trace, costs, 1, min_offload_bytes=1, host_bytes=host_bytes)
    low, high = problem.floor.peak_bytes, problem.plain.peak_bytes
    return dataclasses.replace(problem, budget_bytes=low + int((high - low) * share))


def plan_at(trace: Trace, costs: Costs, share: float, strategy: str) -> tuple[Plan, Forecast]:
    budget_bytes = pose_at(trace, costs, share).budget_bytes
    made = plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1)
    return made, simulate(trace, costs, made)


def choices(made: Plan) -> set[Choice]:
    return {decision.choice for decision in made.decisions}


# -- memory curve and realize --------------------------------------------------------------------------------------


@given(job=jobs(), seed=some.integers(0, 1 << 30), share=some.floats(0.0, 1.0))
def test_the_counted_memory_equals_the_forecast(job: tuple[Trace, Costs], seed: int, share: float) -> None:
    """With any gaps offloaded or dropped at any time, the plan is valid, and the counted memory is that of its
    forecast.
    """
    problem = pose_at(*job, share)
    draw = random.Random(seed)
    kinds = {key: draw.choice(("keep", "offload", "drop")) for key in sorted(problem.drafter.gaps)}
    offloaded = {key for key, kind in kinds.items() if kind == "offload"}
    dropped = {key for key, kind in kinds.items() if kind == "drop"}
    gaps, moments = problem.drafter.gaps, list_moments(job[0])
    since = {
        key: draw.choice([tick for tick in moments if gaps[key].opens <= tick < gaps[key].closes])
        for key in sorted(dropped)
        if draw.random() < 0.5
    }
    plain = MemoryCurve(problem.drafter, problem.plain.live_bytes)
    while True:
        realized = realize(problem, CopyTimetable(problem.drafter), plain, offloaded, dropped, since=since)
        if isinstance(realized, RealizedChoices):
            break
        assert realized in dropped
        dropped.remove(realized)
    made = realized.plan(problem, "some")
    check(job[0], made)
    follow(job[0], Machine(plan_policy.Policy(plan_policy.list_moves(made)), made.segments))
    assert problem.drafter.replay.run(made).live_bytes == tuple(realized.load.live)
    assert plain.peak_bytes == problem.plain.peak_bytes  # it is unchanged


@given(job=jobs(), seed=some.integers(0, 1 << 30))
def test_lay_out_never_stalls(job: tuple[Trace, Costs], seed: int) -> None:
    problem = pose_at(*job, 0.5)
    draw = random.Random(seed)
    keys = [key for key in sorted(problem.drafter.gaps) if draw.random() < 0.7]
    times = CopyTimetable(problem.drafter).lay_out(keys)
    assert times.keys() <= set(keys)
    made = RealizedChoices(times=times, replays=(), load=MemoryCurve(problem.drafter, [])).plan(problem, "some")
    check(job[0], made)
    assert problem.drafter.replay.run(made).stall_seconds == pytest.approx(0.0, abs=1e-15)


@given(job=jobs(), share=some.floats(0.0, 1.0))
def test_hold_under_keeps_the_limit(job: tuple[Trace, Costs], share: float) -> None:
    """If everything is offloaded, any limit down to the lowest peak can be kept."""
    problem = pose_at(*job, share)
    load = MemoryCurve(problem.drafter, problem.plain.live_bytes)
    wanted = {key: gap.closes for key, gap in problem.drafter.gaps.items()}
    CopyTimetable(problem.drafter).hold_under(load, wanted, problem.budget_bytes)
    assert load.peak_bytes <= problem.budget_bytes


@given(
    taken=some.lists(some.tuples(some.integers(0, 40), some.integers(1, 6)), max_size=8),
    at=some.integers(0, 50),
    length=some.integers(1, 7),
)
def test_a_timetable_finds_the_first_and_the_last_free_interval(
    taken: list[tuple[int, int]], at: int, length: int
) -> None:
    timetable = LinkTimetable()
    busy: set[int] = set()
    for begin, seconds in taken:
        begin = int(timetable.earliest(begin, seconds))
        assert not busy & set(range(begin, begin + seconds))
        timetable.take(begin, seconds)
        busy |= set(range(begin, begin + seconds))

    def is_free(begin: int) -> bool:
        return not busy & set(range(begin, begin + length))

    assert timetable.earliest(at, length) == next(begin for begin in itertools.count(at) if is_free(begin))
    assert timetable.latest(at, length) == next(begin for begin in itertools.count(at - length, -1) if is_free(begin))


# -- AutoSwap ---------------------------------------------------------------------------------------------------------


def test_scores_match_their_definitions() -> None:
    costs = make_costs(UNET, op_seconds=1e-3, link=make_link(per_second=1e9, latency_seconds=1e-5))
    problem = pose_at(UNET, costs, 0.5)
    load = MemoryCurve(problem.drafter, problem.plain.live_bytes)
    candidates = GapCandidates(problem.drafter, load)
    assert candidates.keys
    limit_bytes = problem.budget_bytes
    wdoa = candidates.wdoa(load.live, limit_bytes)
    for index, key in enumerate(candidates.keys):
        gap, nbytes = problem.drafter.gaps[key], UNET.storages[key[0]].nbytes
        ops = sum(gap.opens < op.tick < gap.closes for op in UNET.ops)
        spare = ops * 1e-3 - 2 * (1e-5 + nbytes / 1e9)
        assert candidates.doa[index] == pytest.approx(spare)
        assert candidates.aoa[index] == pytest.approx(spare * nbytes if spare >= 0 else spare / nbytes)
        begin = max(gap.opens + 1, UNET.storages[key[0]].released)
        assert wdoa[index] == sum(problem.plain.live_bytes[tick] - limit_bytes for tick in range(begin, gap.closes))
    assert min(candidates.doa) < 0 < max(candidates.doa)


@pytest.mark.parametrize("score", ["doa", "aoa", "wdoa", "swdoa", "vote"])
@given(job=jobs(), share=some.floats(0.0, 1.0))
@settings(max_examples=15)
def test_choose_is_greedy(score: str, job: tuple[Trace, Costs], share: float) -> None:
    problem = pose_at(*job, share)
    load = MemoryCurve(problem.drafter, problem.plain.live_bytes)
    candidates = GapCandidates(problem.drafter, load)
    limit_bytes = problem.budget_bytes
    found = choose(candidates, load.live, limit_bytes, make_scorer(candidates, load.live, limit_bytes, score))
    places = range(len(candidates.keys))
    live = list(problem.plain.live_bytes)

    def excess(index: int, live: Sequence[int]) -> int:
        return sum(live[tick] - limit_bytes for tick in range(candidates.begin[index], candidates.end[index]))

    plain = {index: excess(index, problem.plain.live_bytes) for index in places}
    votes = dict.fromkeys(places, 0)
    for values in (candidates.doa, candidates.aoa, plain):
        for rank, index in enumerate(sorted(places, key=lambda index: (-values[index], index))):
            votes[index] -= rank
    left = set(places)
    expected: list[Key] = []
    while max(live) > limit_bytes:
        tick = live.index(max(live))
        scores = {
            "doa": candidates.doa,
            "aoa": candidates.aoa,
            "wdoa": plain,
            "swdoa": {index: excess(index, live) for index in left},
            "vote": votes,
        }[score]
        offered = [index for index in left if candidates.begin[index] <= tick < candidates.end[index]]
        if not offered:
            break
        best = min(offered, key=lambda index: (-scores[index], index))
        left.remove(best)
        expected.append(candidates.keys[best])
        for tick in range(candidates.begin[best], candidates.end[best]):
            live[tick] -= int(candidates.nbytes[best])
    assert found == expected


@given(job=jobs(), share=some.floats(0.0, 1.0))
def test_zero_overhead_never_slows_the_step(job: tuple[Trace, Costs], share: float) -> None:
    trace, costs = job
    plain = simulate(trace, costs, keep_everything(costs))
    try:
        made, forecast = plan_at(trace, costs, share, "autoswap:mode=zero_overhead")
    except Infeasible as error:
        needed_bytes = error.needed_bytes
        made = plan(trace, costs, needed_bytes, strategy="autoswap:mode=zero_overhead", min_offload_bytes=1)
        forecast = simulate(trace, costs, made)
        assert forecast.peak_bytes == needed_bytes
    assert choices(made) <= {Choice.OFFLOAD}
    assert forecast.step_seconds == pytest.approx(plain.step_seconds, rel=1e-12)


def test_zero_overhead_offloads_as_much_as_the_link_allows() -> None:
    plain = peak_of(CHAIN, make_costs(CHAIN))
    needed = []
    for per_second in (1e6, 1e9, 1e10):
        costs = make_costs(CHAIN, op_seconds=1e-4, link=make_link(per_second=per_second))
        with pytest.raises(Infeasible) as caught:
            plan(CHAIN, costs, 1, strategy="autoswap:mode=zero_overhead")
        needed.append(caught.value.needed_bytes)
    assert plain == needed[0] > needed[1] > needed[2] >= pose_at(CHAIN, make_costs(CHAIN), 0).floor.peak_bytes


def peak_of(trace: Trace, costs: Costs) -> int:
    return simulate(trace, costs, keep_everything(costs)).peak_bytes


def make_two_peaks() -> Trace:
    """Return a step with two forward and backward passes, the second slightly smaller."""
    program = Program()
    batch = program.resident(KIB, Role.INPUT)
    for layers in (6, 5):
        result, saves = batch, []
        for _ in range(layers):
            below, result = result, program.op("forward", [result], 64 * KIB)
            saves.append(program.save(result))
            if below != batch:
                program.release(storage=below)
        program.release(storage=result)
        for save in reversed(saves):
            need = program.need(save)
            gradient = program.op("backward", [program._saves[save].storage], KIB, role=Role.TEMPORARY)
            program.release(need=need)
            program.release(save=save)
            program.release(storage=gradient)
    return program.finish("two peaks")


def test_lay_out_serves_both_directions_on_one_lane() -> None:
    """Reloads of the first pass do not block copies out of the second, or the other way round."""
    trace = make_two_peaks()
    for half_duplex in (False, True):
        costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=64 * KIB / 1e-3, half_duplex=half_duplex))
        problem = pose_at(trace, costs, 0.0)
        times = CopyTimetable(problem.drafter).lay_out(problem.drafter.gaps)
        assert {key[0] > 8 for key in times} == {False, True}  # of both passes
        made = RealizedChoices(times=times, replays=(), load=MemoryCurve(problem.drafter, [])).plan(problem, "some")
        assert problem.drafter.replay.run(made).stall_seconds == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("half_duplex", [False, True])
def test_lay_out_lets_no_copies_overlap_on_one_lane(half_duplex: bool) -> None:
    """The copy out of the second block would overlap with the reload of the first."""
    program = Program()
    batch = program.resident(KIB, Role.INPUT)

    def save_one() -> int:
        made = program.op("forward", [batch], 64 * KIB)
        save = program.save(made)
        program.release(storage=made)
        return save

    def work(ops: int) -> None:
        for _ in range(ops):
            program.release(storage=program.op("work", [batch], KIB))
            program.save(batch)  # so that moves can happen after each

    def need_after(ops: int, save: int) -> None:
        work(ops)
        need = program.need(save)
        program.release(need=need)
        program.release(save=save)

    first = save_one()
    work(6)
    second = save_one()
    third = save_one()
    need_after(2, first)
    need_after(6, second)
    need_after(6, third)
    trace = program.finish("meeting")
    link = make_link(per_second=64 * KIB / 2e-3, latency_seconds=0.0, half_duplex=half_duplex)
    problem = pose_at(trace, make_costs(trace, op_seconds=1e-3, link=link), 0.0)
    times = CopyTimetable(problem.drafter).lay_out(problem.drafter.gaps)
    made = RealizedChoices(times=times, replays=(), load=MemoryCurve(problem.drafter, [])).plan(problem, "some")
    assert problem.drafter.replay.run(made).stall_seconds == pytest.approx(0.0, abs=1e-12)
    assert len(times) == (2 if half_duplex else 3)


@pytest.mark.parametrize("workspace_bytes", [0, 512 * KIB])
def test_reloads_are_in_time_if_memory_suffices(workspace_bytes: int) -> None:
    """With a workspace in the last forward op, there is free memory after it. Without, the choices leave none."""
    costs = make_costs(CHAIN, op_seconds=1e-3, link=make_link(per_second=1e10))
    last = sum(op.tick < CHAIN.needs[0].tick for op in CHAIN.ops) - 1
    workspace = tuple(workspace_bytes * (index == last) for index in range(len(CHAIN.ops)))
    costs = dataclasses.replace(costs, workspace_bytes=workspace)
    made, forecast = plan_at(CHAIN, costs, 0.3, "autoswap")
    gaps = pose_at(CHAIN, costs, 0.3).drafter.gaps
    moments = list_moments(CHAIN)
    moved = [(each.back, gaps[each.storage, each.gap]) for each in made.decisions]
    early = [back < gap.closes for back, gap in moved if any(gap.opens < tick < gap.closes for tick in moments)]
    assert len(early) >= 4
    assert early == [workspace_bytes > 0] * len(early)
    copy_seconds = 1e-6 + 256 * KIB / 1e10
    # The step waits both ways for storages needed as soon as saved; for the others only if reloaded on demand.
    waits = 2 * (len(moved) - len(early)) + early.count(False)
    assert forecast.stall_seconds == pytest.approx(waits * copy_seconds, abs=1e-9)


def test_the_published_search_lowers_one_peak_only() -> None:
    trace = make_two_peaks()
    costs = make_costs(trace, op_seconds=1e-3)
    budget_bytes = peak_of(trace, costs) - 3 * 64 * KIB
    with pytest.raises(Infeasible) as caught:
        plan(trace, costs, budget_bytes, strategy="autoswap:peaks=first")
    assert caught.value.needed_bytes == peak_of(trace, costs) - 64 * KIB  # the second peak, unchanged
    made = plan(trace, costs, budget_bytes, strategy="autoswap")
    assert simulate(trace, costs, made).peak_bytes <= budget_bytes


def test_tuned_weights_are_as_good_as_any_score_alone() -> None:
    trace, costs = example()
    times = {
        score: plan_at(trace, costs, 0.4, f"autoswap:score={score}")[1].step_seconds
        for score in ("tuned", "doa", "aoa", "wdoa", "swdoa")
    }
    assert times["tuned"] <= min(times.values())
    assert plan_at(trace, costs, 0.4, "autoswap:score=tuned") == plan_at(trace, costs, 0.4, "autoswap:score=tuned")


def test_tuning_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"pip install 'elbowroom\[tuning\]'"):
        plan_at(*example(), 0.4, "autoswap:score=tuned")


# -- Capuchin ---------------------------------------------------------------------------------------------------------


def test_a_choice_raises_the_cost_of_related_candidates() -> None:
    """A chain a -> b -> c -> d; an op of one second makes each."""
    chain = make_chain([KIB] * 5)
    problem = pose_at(chain, make_costs(chain, op_seconds=1.0), 0.5)
    made = [op.writes[0].storage for op in chain.ops[:4]]
    a, b, c, d = ((storage, 0) for storage in made)
    recomputation = Recomputation(problem.drafter, dict.fromkeys(problem.drafter.gaps, KIB))
    assert [recomputation.seconds(key) for key in (a, b, c, d)] == [1, 1, 1, 1]
    recomputation.choose(c)
    assert recomputation.seconds(d) == 2  # it is now made from b
    assert recomputation.seconds(b) == 2  # and once more for c
    recomputation.choose(b)
    assert recomputation.seconds(d) == 3
    assert recomputation.seconds(a) == 3  # for itself, for b and for c
    assert recomputation.best([a, d]) == a
    assert recomputation.chosen == {b, c}
    recomputation.refuse(a)
    assert recomputation.best([a, d]) == d


def test_capuchin_offloads_without_stalls_on_a_fast_link() -> None:
    costs = make_costs(CHAIN, op_seconds=1e-3, link=make_link(per_second=1e10))
    made, forecast = plan_at(CHAIN, costs, 0.3, "capuchin")
    assert choices(made) == {Choice.OFFLOAD}
    assert forecast.stall_seconds == pytest.approx(0.0, abs=1e-9)


def test_capuchin_recomputes_if_waiting_costs_more() -> None:
    costs = make_costs(CHAIN, op_seconds=1e-5, link=make_link(per_second=1e7))
    made, forecast = plan_at(CHAIN, costs, 0.5, "capuchin")
    assert choices(made) == {Choice.RECOMPUTE}
    assert forecast.recompute_seconds < 26e-3  # one block on the link


def test_capuchin_offloads_and_recomputes_on_a_medium_link() -> None:
    costs = make_costs(CHAIN, op_seconds=2e-4, link=make_link(per_second=4e8))
    made, _ = plan_at(CHAIN, costs, 0.3, "capuchin")
    assert choices(made) == {Choice.OFFLOAD, Choice.RECOMPUTE}


@given(job=jobs())
def test_late_reloads_account_for_all_stalls(job: tuple[Trace, Costs]) -> None:
    """If every copy out ends before its release, the step waits for reloads alone."""
    assume(not job[1].link.half_duplex)  # otherwise reloads delay copies out
    problem = pose_at(*job, 0.5)
    gaps = problem.drafter.gaps
    times = {
        key: dataclasses.replace(each, back=gaps[key].closes)  # on demand
        for key, each in CopyTimetable(problem.drafter).lay_out(gaps).items()
    }
    made = RealizedChoices(times=times, replays=(), load=MemoryCurve(problem.drafter, [])).plan(problem, "some")
    late = find_late_reloads(problem.drafter.replay, made)
    forecast = problem.drafter.replay.run(made)
    assert set(late) <= {(key[0], gaps[key].closes) for key in times}
    assert sum(late.values()) == pytest.approx(forecast.stall_seconds)
    assert (forecast.reloaded_bytes > 0) == bool(late)


@given(job=jobs(), share=some.floats(0.0, 1.0))
def test_feedback_never_makes_a_plan_slower(job: tuple[Trace, Costs], share: float) -> None:
    problem = pose_at(*job, share)
    before, after = realize_and_feed_back(problem)
    assert after.step_seconds <= before.step_seconds
    assert after.peak_bytes <= problem.budget_bytes


def realize_and_feed_back(problem: Problem) -> tuple[Forecast, Forecast]:
    timetable, replay = CopyTimetable(problem.drafter), problem.drafter.replay
    plain = MemoryCurve(problem.drafter, problem.plain.live_bytes)
    realized = realize(problem, timetable, plain, problem.drafter.gaps, ())
    assert isinstance(realized, RealizedChoices)
    return replay.run(realized.plan(problem, "some")), replay.run(feed_back(problem, timetable, realized, "some"))


def test_feedback_reduces_stalls() -> None:
    """Reloads share the lane with copies out, which the plan does not model at its own times."""
    trace = make_residual_net(4, 256 * KIB)
    costs = make_costs(trace, op_seconds=2e-4, link=make_link(per_second=1e9, half_duplex=True))
    before, after = realize_and_feed_back(pose_at(trace, costs, 0.9))
    assert after.stall_seconds < before.stall_seconds


# -- TENSILE ----------------------------------------------------------------------------------------------------------


def test_tensile_swaps_first() -> None:
    costs = make_costs(CHAIN, op_seconds=1e-3, link=make_link(per_second=1e10))
    made, _ = plan_at(CHAIN, costs, 0.3, "tensile")
    assert choices(made) == {Choice.OFFLOAD}


def test_tensile_recomputes_from_kept_storages() -> None:
    trace = make_residual_net(4, 256 * KIB)
    costs = make_costs(trace, op_seconds=1e-5, link=make_link(per_second=1e7))
    made, _ = plan_at(trace, costs, 0.6, "tensile")
    assert choices(made) == {Choice.RECOMPUTE}
    drafter = pose_at(trace, costs, 0.6).drafter
    assert len(made.decisions) > 1
    for decision in made.decisions:
        alone = drafter.find_closure(
            decision.storage,
            drafter.gaps[decision.storage, decision.gap].closes,
            lambda storage: storage == decision.storage,  # noqa: B023
        )
        assert alone is not None
        assert made.segments[decision.segment].ops == alone.ops


@given(job=jobs())
def test_tensile_extends_the_plan_of_a_larger_budget(job: tuple[Trace, Costs]) -> None:
    trace, costs = job
    found = []
    for share in (0.8, 0.5, 0.2):
        try:
            made, _ = plan_at(trace, costs, share, "tensile")
        except Infeasible:
            break
        found.append({(decision.storage, decision.gap, decision.choice) for decision in made.decisions})
    for larger, smaller in itertools.pairwise(found):
        assert larger <= smaller


def test_tensile_schedules_both_directions_on_one_channel() -> None:
    """On a half-duplex link, its plan runs as scheduled."""
    costs = make_costs(CHAIN, op_seconds=1e-3, link=make_link(per_second=5e8, half_duplex=True))
    made, forecast = plan_at(CHAIN, costs, 0.5, "tensile")
    assert made.decisions
    assert forecast.stall_seconds == pytest.approx(0.0, abs=1e-9)


# -- Checkmate --------------------------------------------------------------------------------------------------------


def least_recomputation(problem: Problem) -> float:
    """Return the least recomputed seconds within the budget, over all sets of dropped gaps; infinite if none fits."""
    keys = sorted(problem.drafter.gaps)
    plain = MemoryCurve(problem.drafter, problem.plain.live_bytes)
    best = float("inf")
    for count in range(len(keys) + 1):
        for dropped in itertools.combinations(keys, count):
            for keeps in (lambda key, tick: True, lambda key, tick: False):
                realized = realize(problem, CopyTimetable(problem.drafter), plain, (), dropped, keeps)
                if isinstance(realized, RealizedChoices) and realized.load.peak_bytes <= problem.budget_bytes:
                    forecast = problem.drafter.replay.run(realized.plan(problem, "some"))
                    best = min(best, forecast.recompute_seconds)
    return best


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_checkmate_finds_the_least_recomputation(share: float) -> None:
    trace = make_chain([count * 64 * KIB for count in (1, 3, 2, 2, 4, 1, 2)])
    costs = make_costs(trace, op_seconds=[1e-3 * (1 + index % 4) for index in range(len(trace.ops))])
    problem = pose_at(trace, costs, share)
    least = least_recomputation(problem)
    if least == float("inf"):
        with pytest.raises(Infeasible):
            plan(trace, costs, problem.budget_bytes, strategy="checkmate", min_offload_bytes=1)
        return
    made, forecast = plan_at(trace, costs, share, "checkmate")
    assert choices(made) == {Choice.RECOMPUTE}
    assert forecast.recompute_seconds <= least * 1.005 + 1e-12


def make_dense_net(seed: int) -> Trace:
    """Return ten layers, each of which reads up to two more than the previous one."""
    draw = random.Random(seed)
    layers = []
    for position in range(10):
        others = [draw.randrange(position) for _ in range(2) if position > 1 and draw.random() < 0.6]
        inputs = tuple(sorted({position - 1, *others}))
        nbytes = draw.choice([64, 128, 192]) * KIB
        layers.append(Layer(inputs=inputs, nbytes=nbytes, parameter_bytes=KIB, keeps=draw.choice("io")))
    return make_trace(layers)


@pytest.mark.parametrize(
    "trace",
    [make_chain([64 * KIB] * 9), *(make_dense_net(seed) for seed in (3, 8, 11, 13))],
    ids=["chain", *(f"dense {seed}" for seed in (3, 8, 11, 13))],
)
def test_the_program_does_not_undercount_memory(trace: Trace) -> None:
    """If the graph is not coarse, solutions keep the limit without repairs.

    The published program lets a value be freed twice if two nodes are made from it and one of them is not recomputed.
    """
    solved = 0
    for eighths in range(8):
        limited = pose_at(trace, make_costs(trace, op_seconds=1e-3), eighths / 8)
        rematerialization = checkmate._Rematerialization(limited, 40)
        solution = rematerialization._program.solve(limited.budget_bytes, LIMITS, LIMITS.seconds)
        if solution is not None:
            solved += 1
            _, realized = rematerialization._carry_out(rematerialization._list_dropped(solution), solution)
            assert realized.load.peak_bytes <= limited.budget_bytes
    assert solved > 2


def test_a_large_step_becomes_a_small_graph() -> None:
    trace = make_residual_net(40, 64 * KIB)
    problem = pose_at(trace, make_costs(trace, op_seconds=1e-4), 0.5)
    load = MemoryCurve(problem.drafter, problem.plain.live_bytes)
    whole, small = (make_graph(problem.drafter, load, most) for most in (10_000, 12))
    assert len(small.nodes) <= 12 and len(small.windows) <= 13
    assert len(whole.nodes) > 100
    assert {storage for node in small.nodes for storage in node.storages} == {
        storage for node in whole.nodes for storage in node.storages
    }
    for graph in (small, whole):
        for index, node in enumerate(graph.nodes):
            assert all(source < index for source in node.made_from)
            assert node.seconds > 0
        for fixed, sizes, ticks in zip(graph.fixed_bytes, graph.node_bytes, graph.ticks, strict=True):
            assert np.array_equal(fixed + sizes.sum(axis=1), load.live[list(ticks)])
    # Coarse nodes do not cost much more to recompute than fine ones.
    assert sum(node.seconds for node in small.nodes) <= 3 * sum(node.seconds for node in whole.nodes)


def test_a_solver_without_time_still_gives_a_plan(caplog: pytest.LogCaptureFixture) -> None:
    trace = make_residual_net(8, 64 * KIB)
    problem = pose_at(trace, make_costs(trace, op_seconds=1e-4), 0.6)
    load = MemoryCurve(problem.drafter, problem.plain.live_bytes)
    program = RecomputeProgram(make_graph(problem.drafter, load, 40))
    solution = program.solve(problem.budget_bytes, LIMITS, 1e-6)
    assert solution is None or solution.rounded
    made = checkmate.make_plan(problem, seconds=1e-6)
    assert problem.fits(problem.drafter.replay.run(made))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "whole runs are recomputed: no bound is known; it stopped at its limit" in caplog.text


def test_a_reached_limit_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="elbowroom"):
        for gap in (0.004, 0.02, float("inf")):
            LIMITS.log_gap("checkmate", gap, "a program")
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING"]
    assert [record.message for record in caplog.records] == [
        "checkmate: a program: within 0.40% of the best",
        "checkmate: a program: within 2.00% of the best; it stopped at its limit of 7 nodes or 20 s",
        "checkmate: a program: no bound is known; it stopped at its limit of 7 nodes or 20 s",
    ]


def test_checkmate_logs_its_gap(caplog: pytest.LogCaptureFixture) -> None:
    trace = make_residual_net(8, 64 * KIB)
    with caplog.at_level(logging.INFO, logger="elbowroom"):
        plan_at(trace, make_costs(trace, op_seconds=1e-4), 0.5, "checkmate")
    said = [record for record in caplog.records if "of the best" in record.message]
    assert len(said) == 1 and said[0].levelname == "INFO"


def test_runs_are_recomputed_if_that_is_faster() -> None:
    """Three nodes are too coarse for a long chain."""
    trace = make_chain([64 * KIB] * 40)
    costs = make_costs(trace, op_seconds=1e-3)
    problem = pose_at(trace, costs, 0.4)
    in_runs = problem.drafter.replay.run(checkmate._recompute_runs(problem))
    made = problem.drafter.replay.run(checkmate.make_plan(problem, stages=3))
    assert problem.fits(in_runs) and problem.fits(made)
    assert made.step_seconds <= in_runs.step_seconds


@pytest.mark.parametrize("option", ["nodes=0", "seconds=0", "seconds=nan"])
@pytest.mark.parametrize("strategy", ["checkmate", "tvdnn_ilp"])
def test_invalid_limits_are_rejected(strategy: str, option: str) -> None:
    with pytest.raises(UsageError, match=r"nodes >= 1 and seconds > 0|takes float from 0 on, not 'nan'"):
        plan_at(CHAIN, make_costs(CHAIN), 0.5, f"{strategy}:{option}")


def test_negative_numbers_are_rejected() -> None:
    with pytest.raises(UsageError, match="effort takes float from 0 on, not '-1'"):
        plan_at(CHAIN, make_costs(CHAIN), 0.5, "auto:effort=-1")


def test_checkmate_rejects_too_few_stages() -> None:
    with pytest.raises(UsageError, match="3 stages"):
        plan_at(CHAIN, make_costs(CHAIN), 0.5, "checkmate:stages=2")


# -- all of them ------------------------------------------------------------------------------------------------------

VARIANTS = (
    *(f"autoswap:score={score}" for score in ("doa", "aoa", "wdoa", "vote")),
    "autoswap:score=vote,mode=zero_overhead",
    "autoswap:peaks=first",
    "autoswap:peaks=first,mode=zero_overhead",
    "checkmate:stages=3",
    "checkmate:stages=6",
)


@pytest.mark.parametrize("strategy", VARIANTS)
@given(job=jobs(), share=some.floats(0.0, 1.0))
@settings(max_examples=15)
def test_plans_with_options_are_valid_fit_and_repeat(strategy: str, job: tuple[Trace, Costs], share: float) -> None:
    trace, costs = job
    budget_bytes = pose_at(trace, costs, share).budget_bytes
    try:
        made = plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1)
    except Infeasible as error:
        budget_bytes = error.needed_bytes
        made = plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1)
    check(trace, made)
    follow(trace, Machine(plan_policy.Policy(plan_policy.list_moves(made)), made.segments))
    assert simulate(trace, costs, made).peak_bytes <= budget_bytes
    assert made == plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1)


@pytest.mark.parametrize(
    "strategy", ["autoswap", "autoswap:mode=zero_overhead", "capuchin", "tensile", "checkmate:stages=6"]
)
@given(job=jobs(), share=some.floats(0.0, 1.0), room=some.floats(0.0, 1.0))
@settings(max_examples=15)
def test_plans_do_not_exceed_the_host(strategy: str, job: tuple[Trace, Costs], share: float, room: float) -> None:
    trace, costs = job
    free = pose_at(trace, costs, share)
    host_bytes = int(free.floor.lower_tier_bytes * room)
    try:
        made = plan(trace, costs, free.budget_bytes, strategy=strategy, min_offload_bytes=1, host_bytes=host_bytes)
    except Infeasible:
        return
    assert simulate(trace, costs, made).lower_tier_bytes <= host_bytes

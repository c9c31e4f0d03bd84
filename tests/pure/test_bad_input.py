"""Invalid and extreme input: rejected with its place, or planned with finite figures."""

from __future__ import annotations

import dataclasses
import logging
import math
import pathlib
import pickle
from typing import Any

import numpy as np
import pytest

from elbowroom.cost.price import price
from elbowroom.errors import (
    ArenaTooSmall,
    ElbowroomError,
    Infeasible,
    MemoryRefused,
    Thrashing,
    TierFull,
    TraceError,
    UnknownMember,
    UsageError,
    find_nearer,
)
from elbowroom.hardware.shipped import load_shipped
from elbowroom.ir import updates
from elbowroom.ir.check import check, check_trace
from elbowroom.ir.costs import Costs
from elbowroom.ir.files import load, save
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.trace import Op, Trace
from elbowroom.planner.options import list_options
from elbowroom.planner.problem import list_strategies, plan, pose
from elbowroom.planner.schedule.choice_vectors import ChoiceVectorPlanner
from elbowroom.planner.searching import choice_search
from elbowroom.simulator.admission import LARGEST_BYTES
from elbowroom.simulator.compiled_loops.segments import OFFLOAD
from elbowroom.simulator.compiled_loops.sweep import sweep
from elbowroom.simulator.simulate import simulate
from tests.generators import KIB, example, keep_everything, make_chain, make_costs, make_link, make_residual_net

STRATEGIES = list_strategies()


def assert_finite(forecast: Forecast) -> None:
    for name in dataclasses.asdict(forecast):
        value = getattr(forecast, name)
        if isinstance(value, int | float):
            assert math.isfinite(value) and value >= 0, name
    assert min(forecast.live_bytes, default=0) >= 0


# -- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget_bytes", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_budgets_below_the_floor_are_infeasible(strategy: str, budget_bytes: int) -> None:
    trace, costs = example()
    floor_bytes = pose(trace, costs, 1, min_offload_bytes=1).floor.peak_bytes
    with pytest.raises(Infeasible) as caught:
        plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1)
    assert caught.value.budget_bytes == budget_bytes
    assert caught.value.needed_bytes >= floor_bytes
    if strategy == "auto":
        assert caught.value.needed_bytes == floor_bytes
    assert str(caught.value.needed_bytes) in str(caught.value)


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_storages_without_bytes_can_be_planned(strategy: str) -> None:
    for trace in (make_chain([0, KIB, 0, 8 * KIB, 0, KIB], keeps="io"), make_chain([0, 0, 0])):
        costs = make_costs(trace)
        plain = simulate(trace, costs, keep_everything(costs))
        made = None
        for share in (0.6, 1.0):
            try:
                made = plan(trace, costs, int(plain.peak_bytes * share), strategy=strategy, min_offload_bytes=0)
            except Infeasible:
                continue
            check(trace, made)
            assert_finite(simulate(trace, costs, made))
        assert made is not None


def scale(trace: Trace, factor: int) -> Trace:
    """Return the step with its storages scaled."""
    storages = tuple(dataclasses.replace(home, nbytes=home.nbytes * factor) for home in trace.storages)
    return dataclasses.replace(trace, storages=storages)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_enormous_storages_can_be_planned(strategy: str) -> None:
    """A pebibyte each: sums still fit into 64 bits."""
    trace = scale(make_residual_net(2, KIB), 1 << 40)
    assert max(home.nbytes for home in trace.storages) >= 1 << 50
    costs = make_costs(trace, op_seconds=1.0, link=make_link(per_second=1e15), disk=make_link(per_second=1e15))
    problem = pose(trace, costs, 1, min_offload_bytes=1)
    budget_bytes = (problem.floor.peak_bytes + problem.plain.peak_bytes) // 2
    try:
        made = plan(trace, costs, budget_bytes, strategy=strategy)
    except Infeasible as error:
        budget_bytes = error.needed_bytes
        made = plan(trace, costs, budget_bytes, strategy=strategy)
    forecast = simulate(trace, costs, made, host_bytes=1 << 52, allocator="caching")
    assert_finite(forecast)
    assert forecast.peak_bytes <= budget_bytes
    assert forecast.reserved_bytes >= forecast.peak_bytes


def test_enormous_storages_have_the_same_peak_in_sweep_and_replay() -> None:
    trace = scale(make_residual_net(2, KIB), 1 << 40)
    costs = make_costs(trace, op_seconds=1.0, link=make_link(per_second=1e18))
    problem = pose(trace, costs, 1 << 61)
    vectors = ChoiceVectorPlanner(problem)
    choices = np.full(len(vectors.keys), OFFLOAD, dtype=np.int8)
    assert sweep(vectors.columns, choices, problem.budget_bytes, 0.0, np.inf, vectors.room)
    forecast = problem.drafter.replay.run(vectors.make_plan(choices, "test"))
    assert vectors.room.outcome[0].peak_bytes == forecast.peak_bytes > 1 << 50


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda trace, costs: plan(costs, trace, 1), "trace takes a Trace .*, not a Costs"),
        (lambda trace, _: plan(trace, None, 1), "costs takes a Costs"),  # type: ignore[arg-type]
        (lambda trace, costs: plan(trace, costs, None), "budget_bytes is None"),  # type: ignore[arg-type]
        (lambda trace, costs: plan(trace, costs, "1GiB"), "budget_bytes is '1GiB'"),  # type: ignore[arg-type]
        (lambda trace, costs: plan(trace, costs, True), "budget_bytes is True"),
        (lambda trace, costs: simulate(trace, costs, trace), "plan takes a Plan .*, not a Trace"),
        (lambda trace, costs: simulate(trace, costs, policy="lru", budget_bytes=0.5), "budget_bytes is 0.5"),  # type: ignore[arg-type]
        (lambda trace, _: price(trace, "rtx3090"), "profile takes a HardwareProfile .*, not 'rtx3090'"),  # type: ignore[arg-type]
        (lambda trace, _: check(trace, None), "plan takes a Plan .*, not None"),  # type: ignore[arg-type]
        (lambda *_: load("Trace", "trace.json"), "a 'Trace' is not a file; these are: Trace, "),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_arguments_of_other_types_are_named(call: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call(*example())


@pytest.mark.parametrize("factor", [1 << 50, 1 << 53, 1 << 70])
def test_storages_whose_sum_overflows_64_bits_are_rejected(factor: int) -> None:
    trace = scale(make_residual_net(2, KIB), factor)
    costs = make_costs(trace)
    for work in (lambda: plan(trace, costs, 1 << 40), lambda: simulate(trace, costs, keep_everything(costs))):
        with pytest.raises(TraceError, match=r"storages\[\d+\]") as caught:
            work()
        assert str(LARGEST_BYTES) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"alignment_bytes": 0}, "alignment_bytes"),
        ({"alignment_bytes": -512}, "alignment_bytes"),
        ({"alignment_bytes": 1 << 62}, "more than can be counted"),
        ({"hook_seconds": math.nan}, "hook_seconds"),
        ({"overhead_seconds": math.inf}, "overhead_seconds"),
        ({"overhead_seconds": -1.0}, "overhead_seconds"),
    ],
)
def test_invalid_costs_are_rejected(change: dict[str, Any], place: str) -> None:
    trace, costs = example()
    with pytest.raises(TraceError, match=place):
        plan(trace, dataclasses.replace(costs, **change), 10**9)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_invalid_op_times_are_rejected_with_the_op(wrong: float) -> None:
    trace, costs = example()
    seconds = (*costs.op_seconds[:3], wrong, *costs.op_seconds[4:])
    with pytest.raises(TraceError, match=rf"ops\[3\] \({trace.ops[3].name}\)"):
        plan(trace, dataclasses.replace(costs, op_seconds=seconds), 10**9)


@pytest.mark.parametrize("wrong", [-1, 1 << 62])
def test_invalid_workspaces_are_rejected(wrong: int) -> None:
    trace, costs = example()
    workspace_bytes = (*costs.workspace_bytes[:3], wrong, *costs.workspace_bytes[4:])
    with pytest.raises(TraceError, match=str(wrong) if wrong < 0 else "largest workspace"):
        plan(trace, dataclasses.replace(costs, workspace_bytes=workspace_bytes), 10**9)


# -- traces -----------------------------------------------------------------------------------------------------------


def change_op(trace: Trace, index: int, **changes: Any) -> Trace:
    ops = list(trace.ops)
    ops[index] = dataclasses.replace(ops[index], **changes)
    return dataclasses.replace(trace, ops=tuple(ops))


def make_broken_traces() -> dict[str, tuple[Trace, Op]]:
    """Return invalid traces, each with the op that shows it."""
    trace = make_chain([KIB] * 4, keeps="i")
    first, second = trace.ops[0], trace.ops[1]
    later = dataclasses.replace(trace.ops[2].writes[0])
    beyond = dataclasses.replace(first.reads[0], storage=10**6)
    before = dataclasses.replace(first.reads[0], storage=-3)
    newer = dataclasses.replace(second.reads[0], version=7)
    return {
        "reads the result of a later op that reads its own": (change_op(trace, 1, reads=(later,)), second),
        "reads its own result": (change_op(trace, 1, reads=second.writes), second),
        "reads a storage that does not exist": (change_op(trace, 0, reads=(beyond,)), first),
        "writes to a storage that does not exist": (change_op(trace, 0, writes=(beyond,)), first),
        "reads a storage with a negative id": (change_op(trace, 0, reads=(before,)), first),
        "reads a version that no op wrote": (change_op(trace, 1, reads=(newer,)), second),
        "overwrites the result of another op with the same version": (
            change_op(trace, 2, writes=second.writes),
            trace.ops[2],
        ),
    }


@pytest.mark.parametrize("what", make_broken_traces())
def test_cyclic_and_dangling_traces_are_rejected_with_the_op(what: str) -> None:
    trace, op = make_broken_traces()[what]
    costs = make_costs(trace)
    with pytest.raises(TraceError, match=rf"ops\[{trace.ops.index(op) if op in trace.ops else '.*'}\]|ops\[\d+\]"):
        check_trace(trace)
    for strategy in ("auto", "keep_all"):
        with pytest.raises(TraceError) as caught:
            plan(trace, costs, 10**9, strategy=strategy)
        assert op.name in str(caught.value)


# -- hardware ---------------------------------------------------------------------------------------------------------


def test_hardware_without_a_link_is_rejected() -> None:
    trace = example()[0]
    profile = dataclasses.replace(load_shipped("v100"), links=())
    with pytest.raises(TraceError, match="no link to a tier below"):
        price(trace, profile)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("speed", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("field", ["out_bytes_per_second", "back_bytes_per_second"])
def test_links_without_speed_are_rejected(place: int, speed: float, field: str) -> None:
    trace, costs = example()
    profile = load_shipped("v100")
    links = list(profile.links)
    links[place] = dataclasses.replace(links[place], **{field: speed})
    with pytest.raises(TraceError, match=f"from {links[place].upper} to {links[place].lower}"):
        price(trace, dataclasses.replace(profile, links=tuple(links)))
    with pytest.raises(TraceError, match=f"from {links[place].upper} to {links[place].lower}"):
        plan(trace, dataclasses.replace(costs, link=links[0], further_links=(links[1],)), 10**9)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_very_slow_link_gives_finite_plans(strategy: str) -> None:
    """A byte takes ten days, and each copy an hour to begin."""
    trace, costs = example()
    slow = dataclasses.replace(make_link(per_second=1e-6), out_latency_seconds=3600.0)
    costs = dataclasses.replace(costs, link=slow)
    problem = pose(trace, costs, 1, min_offload_bytes=1)
    budget_bytes = (problem.floor.peak_bytes + 2 * problem.plain.peak_bytes) // 3
    try:
        made = plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1)
    except Infeasible as error:
        made = plan(trace, costs, error.needed_bytes, strategy=strategy, min_offload_bytes=1)
    assert_finite(simulate(trace, costs, made))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_that_takes_no_time_gives_finite_plans(strategy: str) -> None:
    trace = example()[0]
    costs = make_costs(trace, op_seconds=0.0, link=make_link(per_second=1e30, latency_seconds=0.0))
    problem = pose(trace, costs, 1, min_offload_bytes=1)
    budget_bytes = (problem.floor.peak_bytes + 2 * problem.plain.peak_bytes) // 3
    try:
        made = plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1)
    except Infeasible as error:
        made = plan(trace, costs, error.needed_bytes, strategy=strategy, min_offload_bytes=1)
    assert_finite(simulate(trace, costs, made))


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["magic", "", "Auto", "auto ", "../auto", "__init__", "auto.py"])
def test_an_unknown_strategy_is_rejected_with_the_known_names(name: str) -> None:
    trace, costs = example()
    with pytest.raises((UnknownMember, UsageError)) as caught:
        plan(trace, costs, 10**9, strategy=name)
    assert all(known in str(caught.value) for known in STRATEGIES)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_unknown_option_is_rejected_with_the_known_options(strategy: str) -> None:
    trace, costs = example()
    with pytest.raises(UsageError, match="speed") as caught:
        plan(trace, costs, 10**9, strategy=f"{strategy}:speed=9")
    assert all(option in str(caught.value) for option in list_options(strategy))


# -- time -------------------------------------------------------------------------------------------------------------


def hard_job() -> tuple[Trace, Costs, int]:
    """Return a step too long for enumeration, with a budget at which something has to leave."""
    trace = make_residual_net(6, 64 * KIB)
    costs = make_costs(trace, op_seconds=1e-4, link=make_link(per_second=3e8))
    return trace, costs, simulate(trace, costs, keep_everything(costs)).peak_bytes * 6 // 10


@pytest.mark.parametrize("strategy", ["tvdnn_ilp:seconds=0.000001", "checkmate:seconds=0.000001"])
def test_a_solver_that_runs_out_of_time_logs_it_and_returns_a_plan(
    strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    trace, costs, budget_bytes = hard_job()
    budget_bytes = budget_bytes * 4 // 3  # four fifths of the plain peak: the fallback fits
    with caplog.at_level(logging.INFO):
        made = plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1)
    assert simulate(trace, costs, made).peak_bytes <= budget_bytes
    assert "1e-06 s" in caplog.text and caplog.records[-1].levelno >= logging.INFO


def test_the_error_names_no_op_of_ours() -> None:
    error = Infeasible(needed_bytes=2, budget_bytes=1, op=updates.BEGIN, is_whole_step=True, line="train.py:7")
    assert "(2 bytes) are needed at once when the optimizer updates some parameters (train.py:7)." in str(error)


@pytest.mark.parametrize("step", ["anneal_all", "polish", "solve_fluid"])
def test_an_interrupted_search_returns_the_best_plan_so_far(
    step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trace, costs, budget_bytes = hard_job()
    asked = []

    def interrupt(*_: object, **__: object) -> None:
        asked.append(step)
        raise KeyboardInterrupt

    monkeypatch.setattr(choice_search, step, interrupt)
    with caplog.at_level(logging.WARNING):
        made = plan(trace, costs, budget_bytes, min_offload_bytes=1)
    assert set(asked) == {step}
    assert "interrupted" in caplog.text
    assert made.strategy == "auto"
    assert simulate(trace, costs, made).peak_bytes <= budget_bytes


@pytest.mark.parametrize(
    "error",
    [
        Infeasible(
            needed_bytes=1 << 30, budget_bytes=1 << 20, op="aten.mm", in_the_way=(("input", 9),), is_whole_step=False
        ),
        ArenaTooSmall(1 << 20, 1 << 30, (("input", 9),), is_proven=True),
        UnknownMember("policy", "x", ("lru", "dtr")),
        Thrashing(1.0, 2.0, 3.0, 1 << 20),
        TierFull("disk", 2 << 20, 1 << 20, "Use another folder."),
        UsageError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_can_be_pickled(error: ElbowroomError) -> None:
    """But for what they hold of the job."""
    expected = str(error).rstrip()
    if isinstance(error, Infeasible):
        error.evidence = lambda: None
        error.completion = lambda each: each.advise(["Use less."])
        expected += " Use less."
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error) and str(found) == str(error)
    assert str(found).replace("\n", " ") == expected.replace("\n", " ")
    assert vars(found) == {**vars(error), **error.left_out_of_pickles}


def test_the_refusal_that_needs_least_is_kept() -> None:
    large, small = (Infeasible(needed_bytes=each, budget_bytes=5, op="", is_whole_step=False) for each in (20, 10))
    assert find_nearer(None, large) is large
    assert find_nearer(large, small) is find_nearer(small, large) is small
    refused = MemoryRefused(1, 2, 3, ())
    assert find_nearer(small, refused) is refused and find_nearer(refused, large) is large


def test_a_full_tier_says_if_what_is_free_is_in_pieces() -> None:
    assert "1.0 KiB are free. Make" in str(TierFull("the file", 2048, 1024, "Make room."))
    assert "4.0 KiB are free, in smaller pieces. Make" in str(TierFull("the file", 2048, 4096, "Make room."))


@pytest.mark.parametrize("latency", ["out_latency_seconds", "back_latency_seconds"])
def test_a_latency_that_no_link_has(tmp_path: pathlib.Path, latency: str) -> None:
    profile = load_shipped("v100")
    link = dataclasses.replace(profile.links[0], **{latency: 1e308})
    save(dataclasses.replace(profile, links=(link, *profile.links[1:])), tmp_path / "profile.json")
    with pytest.raises(TraceError, match=r"links\[0\] has a latency of 1e\+308 seconds"):
        load(HardwareProfile, tmp_path / "profile.json")

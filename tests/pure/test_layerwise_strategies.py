"""Published strategies that work on layers, stages and caches, and their common parts. No torch."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.errors import Infeasible, UsageError
from elbowroom.ir.check import check
from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.plan import Choice, Plan
from elbowroom.ir.trace import Role, Trace
from elbowroom.planner.heuristics.eviction import EvictionSweep, draft_offloads, farthest_next_use, list_evictable_gaps
from elbowroom.planner.heuristics.layers import find_layers
from elbowroom.planner.heuristics.stages import Cutter
from elbowroom.planner.ilp.coarsening import cut_stretches, make_bundles
from elbowroom.planner.problem import Problem, plan, pose
from elbowroom.planner.schedule.draft import Drafter
from elbowroom.planner.schedule.memory_curve import MemoryCurve
from elbowroom.planner.schedule.timing import list_moments
from elbowroom.planner.strategies import superneurons, tvdnn_ilp
from elbowroom.planner.strategies.vdnn import _prefetch
from elbowroom.simulator.simulate import simulate
from tests.generators import (
    KIB,
    Program,
    jobs,
    keep_everything,
    make_chain,
    make_costs,
    make_link,
)

CONVOLUTION = "aten.convolution.default"


def peak(trace: Trace, costs: Costs) -> int:
    return simulate(trace, costs, keep_everything(costs)).peak_bytes


def make(trace: Trace, costs: Costs, share: float, strategy: str) -> tuple[Plan, Forecast]:
    """Return a valid plan within a share of the plain peak, and its forecast."""
    made = plan(trace, costs, int(peak(trace, costs) * share), strategy=strategy)
    check(trace, made)
    return made, simulate(trace, costs, made)


NAMES = {
    "c": CONVOLUTION,
    "p": "aten.mm.default",
    "f": "aten.bmm.default",
    ".": "aten.gelu.default",
    "+": "aten.add.Tensor",
}


def make_net(kinds: str, nbytes: int = 256 * KIB) -> Trace:
    """Return a chain of convolutions (c) and products (p), both with weights, and other layers (.).

    Each saves its inputs before it runs. A sum (+) saves nothing, and also reads the result of the last sum, or else of
    the first layer; a fork (f) is a product that reads and saves both inputs.
    """
    program = Program()
    results = [program.resident(nbytes, Role.INPUT)]
    saves: dict[int, list[int]] = {}
    skip = 1
    for position, kind in enumerate(kinds):
        reads = [results[position], *([results[skip]] if kind in "+f" else [])]
        weights = [program.resident(KIB, Role.PARAMETER)] if kind in "cp" else []
        saves[position] = [] if kind == "+" else [program.save(storage) for storage in (*reads, *weights)]
        results.append(program.op(NAMES[kind], [*reads, *weights], nbytes))
        is_kept = any(later in "+f" for later in kinds[position + 1 :])
        if kind in "+f" and not (is_kept and kind == "f"):
            program.release(storage=results[skip])
        if kind == "+":
            skip = position + 1
        if position and not (position == skip and is_kept):
            program.release(storage=results[position])
    gradient = program.op("seed", [results[-1]], nbytes, role=Role.TEMPORARY)
    program.release(storage=results[-1])
    for position in reversed(range(len(kinds))):
        needs = [program.need(save) for save in saves[position]]
        if needs:
            made = program.op("back", [gradient, results[position]], nbytes, role=Role.TEMPORARY)
            program.release(storage=gradient)
            gradient = made
        for need in needs:
            program.release(need=need)
        for save in saves[position]:
            program.release(save=save)
    trace = program.finish("net")
    flops = {NAMES[kind]: 10**6 for kind in "cpf"}
    ops = tuple(dataclasses.replace(op, flops=flops.get(op.name, 0)) for op in trace.ops)
    return dataclasses.replace(trace, ops=ops)


def list_results(trace: Trace) -> list[int]:
    """Return the result of each layer of a `make_net`."""
    return [op.writes[0].storage for op in trace.ops if op.name.startswith("aten.")]


# -- layers -----------------------------------------------------------------------------------------------------------


def test_layers_are_ops_with_saves() -> None:
    program = Program()
    batch = program.resident(KIB, Role.INPUT)
    weight = program.resident(KIB, Role.PARAMETER)
    saves = [program.save(batch), program.save(weight)]
    first = program.op(CONVOLUTION, [batch, weight], KIB)
    unsaved = program.op("aten.add.Tensor", [first], KIB)
    program.op_in_place("aten.relu_.default", [unsaved], unsaved)
    saves += [program.save(unsaved), program.save(unsaved)]  # by the activation, and by the pooling
    pooled = program.op("aten.max_pool2d.default", [unsaved], KIB)
    saves.append(program.save(pooled))
    program.op("aten.sum.default", [pooled], KIB)
    needs = [program.need(save) for save in reversed(saves)]
    trace = program.finish("layers")
    layers = find_layers(trace)
    ticks = {op.name.split(".")[1]: op.tick for op in trace.ops}
    assert [layer.tick for layer in layers] == [ticks[name] for name in ("convolution", "relu_", "max_pool2d", "sum")]
    assert [layer.is_convolution for layer in layers] == [True, False, False, False]
    assert [layer.is_costly for layer in layers] == [True, False, False, False]
    assert [layer.inputs for layer in layers] == [(batch, weight), (), (unsaved,), (pooled,)]
    assert [layer.saved for layer in layers] == [(batch, weight), (unsaved,), (unsaved,), (pooled,)]
    by_save = dict(zip(reversed(saves), needs, strict=True))
    begins = [trace.needs[by_save[save]].tick for save in (saves[1], saves[2], saves[3], saves[4])]
    assert [layer.backward for layer in layers] == begins


def test_layers_of_a_trace_without_needs_have_no_backward() -> None:
    program = Program()
    batch = program.resident(KIB, Role.INPUT)
    program.save(batch)
    program.op(CONVOLUTION, [batch], KIB)
    assert [layer.backward for layer in find_layers(program.finish("forward"))] == [-1]


# -- the sweep --------------------------------------------------------------------------------------------------------


def sweep(problem: Problem) -> tuple[MemoryCurve, Plan]:
    drafter = problem.drafter
    load = MemoryCurve(drafter, problem.plain.live_bytes)
    times = EvictionSweep(
        drafter, load, problem.budget_bytes, list_evictable_gaps(drafter), farthest_next_use(drafter)
    ).run()
    made = drafter.finish(draft_offloads(times), "sweep", problem.budget_bytes)
    assert made is not None
    return load, made


@given(job=jobs(), share=some.floats(0.0, 1.1))
def test_a_sweep_counts_exactly_and_fits_wherever_offloading_can(job: tuple[Trace, Costs], share: float) -> None:
    trace, costs = job
    problem = pose(trace, costs, max(1, int(peak(trace, costs) * share)), min_offload_bytes=1)
    load, made = sweep(problem)
    forecast = problem.drafter.replay.run(made)
    assert list(forecast.live_bytes) == load.live.tolist()
    assert forecast.peak_bytes <= max(problem.budget_bytes, problem.floor.peak_bytes)
    if problem.plain.peak_bytes <= problem.budget_bytes:
        assert made.decisions == ()


def test_the_farthest_use_is_evicted_first_and_reloads_follow_the_order_of_use() -> None:
    trace = make_chain([256 * KIB] * 16)
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1e9))
    made, forecast = make(trace, costs, 0.7, "tvdnn_heuristic")
    assert {decision.choice for decision in made.decisions} == {Choice.OFFLOAD}
    gaps = pose(trace, costs, 1).drafter.gaps
    moved = {(decision.storage, decision.gap) for decision in made.decisions}
    stayed = gaps.keys() - moved
    assert len(moved) > 2
    assert min(gaps[key].closes for key in moved) > max(gaps[key].closes for key in stayed)
    backs = sorted((gaps[decision.storage, decision.gap].closes, decision.back) for decision in made.decisions)
    assert [back for _, back in backs] == sorted(back for _, back in backs)
    assert forecast.offloaded_bytes == forecast.reloaded_bytes == len(moved) * 256 * KIB


def test_a_reload_begins_as_soon_as_memory_suffices() -> None:
    """With memory for one more storage, each reload begins one step ahead of its use."""
    trace = make_chain([256 * KIB] * 16)
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1e9))
    made, _ = make(trace, costs, 0.7, "tvdnn_heuristic")
    gaps = pose(trace, costs, 1).drafter.gaps
    assert all(decision.back < gaps[decision.storage, decision.gap].closes for decision in made.decisions)
    forward_end = trace.needs[0].tick
    assert all(decision.back >= forward_end for decision in made.decisions)


def test_reloads_do_not_queue_up_at_one_moment() -> None:
    """After an op with a large workspace, everything fits. Reloads that begin together would run in order of id."""
    trace = make_chain([256 * KIB] * 16)
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1e8))
    last = sum(op.tick < trace.needs[0].tick for op in trace.ops) - 1
    workspace = tuple(2048 * KIB * (index == last) for index in range(len(trace.ops)))
    costs = dataclasses.replace(costs, workspace_bytes=workspace)
    made, _ = make(trace, costs, 0.75, "tvdnn_heuristic")
    backs = [decision.back for decision in made.decisions]
    assert len(backs) > 3
    assert len(set(backs)) == len(backs)  # a reload takes longer than the op between two moments


def test_a_copied_storage_that_can_return_in_time_is_evicted_first() -> None:
    trace = make_chain([256 * KIB] * 8)
    costs = make_costs(trace, op_seconds=1e-3)
    drafter = pose(trace, costs, 1).drafter
    _, near, *_, far = sorted(list_evictable_gaps(drafter), key=lambda each: each.closes)
    rank = farthest_next_use(drafter)
    assert rank(far, near.opens, False) > rank(near, near.opens, False)
    assert rank(near, near.opens, True) > rank(far, near.opens, False)
    assert rank(far, near.opens, True) > rank(near, near.opens, True)
    slow = pose(trace, make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1e6)), 1).drafter
    assert farthest_next_use(slow)(near, near.opens, True) < farthest_next_use(slow)(far, near.opens, False)


# -- chen_sqrt --------------------------------------------------------------------------------------------------------


def test_a_chain_is_cut_into_equal_stages() -> None:
    trace = make_chain([64 * KIB] * 36)
    cutter = Cutter(trace)
    assert (cutter.saved_count, cutter.saved_bytes) == (35, 35 * 64 * KIB)  # the last layer's result is not saved
    for length in (4, 8):
        stages = cutter.cut(length * 64 * KIB - 1)
        assert length <= stages.largest_bytes / (64 * KIB) <= length * 1.5
        assert stages.kept_bytes == len(stages.kept) * 64 * KIB
        assert all(length <= end - begin <= length + 1 for begin, end in itertools.pairwise(sorted(stages.kept)))
    assert cutter.cut(cutter.saved_bytes).kept == frozenset()


def test_cuts_are_placed_where_few_bytes_cross() -> None:
    """One storage crosses between the blocks of a residual net, two within them."""
    trace = make_net("c" + "c.c+" * 12, 64 * KIB)
    results = list_results(trace)
    between = {results[0], *(results[position] for position in range(4, 49, 4))}
    stages = Cutter(trace).cut(6 * 64 * KIB)
    assert len(stages.kept) >= 3
    assert stages.kept < between
    assert not Cutter(trace).cut(0).kept <= between  # without a choice, everything that crosses is kept


def test_the_number_of_stages_is_about_the_square_root_of_the_saves() -> None:
    trace = make_chain([256 * KIB] * 64)
    costs = make_costs(trace, op_seconds=1e-3)
    made, forecast = make(trace, costs, 0.5, "chen_sqrt")
    assert {decision.choice for decision in made.decisions} == {Choice.RECOMPUTE}
    saved = 63
    assert math.isqrt(saved) - 2 <= len(made.segments) <= math.isqrt(saved) + 2
    # The stages' inputs, and one stage with its gradients.
    assert forecast.peak_bytes <= (2.5 * math.isqrt(saved) + 6) * 256 * KIB
    forward = sum(op.tick < trace.needs[0].tick for op in trace.ops)
    assert 0.7 * forward <= forecast.recompute_seconds / 1e-3 <= forward
    assert forecast.offloaded_bytes == 0


def test_the_search_finds_lower_peaks_than_sqrt_n_stages() -> None:
    trace = make_chain([256 * KIB] * 64)
    costs = make_costs(trace, op_seconds=1e-3)
    with pytest.raises(Infeasible) as caught:
        plan(trace, costs, 1, strategy="chen_sqrt")
    least = caught.value.needed_bytes
    first = simulate(trace, costs, plan(trace, costs, peak(trace, costs) - 1, strategy="chen_sqrt")).peak_bytes
    assert least < first
    assert simulate(trace, costs, plan(trace, costs, least, strategy="chen_sqrt")).peak_bytes == least


def test_nothing_is_recomputed_if_everything_fits() -> None:
    trace = make_chain([256 * KIB] * 8)
    costs = make_costs(trace)
    assert make(trace, costs, 1.0, "chen_sqrt")[0].decisions == ()


# -- vdnn -------------------------------------------------------------------------------------------------------------

MIXED = make_net("c..c..c.")
MIXED_RESULTS = list_results(MIXED)
MIXED_COSTS = make_costs(MIXED, op_seconds=1e-3, link=make_link(per_second=1e8, latency_seconds=0.0))


def test_the_barrier_makes_every_layer_wait_for_its_copy() -> None:
    made, forecast = make(MIXED, MIXED_COSTS, 1.0, "vdnn:policy=all")
    layers, moments = find_layers(MIXED), list_moments(MIXED)
    releases = {decision.storage: decision.release for decision in made.decisions}
    assert releases == {
        layer.inputs[0]: next(tick for tick in moments if tick > layer.tick) for layer in layers[1:7]
    }  # the first reads the batch, which stays; the input of the last one is needed at once
    # A copy takes 2.6 ms and an op 1 ms. The input of layer 6 is requested with layer 7, so six wait both ways.
    assert forecast.stall_seconds == pytest.approx(12 * (256 * KIB / 1e8 - 1e-3))


def test_conv_offloads_the_inputs_of_convolutions() -> None:
    made, _ = make(MIXED, MIXED_COSTS, 1.0, "vdnn:policy=conv")
    assert {decision.storage for decision in made.decisions} == {MIXED_RESULTS[2], MIXED_RESULTS[5]}
    assert {decision.choice for decision in made.decisions} == {Choice.OFFLOAD}


def test_each_layer_prefetches_for_the_closest_earlier_layer() -> None:
    layers = find_layers(MIXED)
    made, _ = make(MIXED, MIXED_COSTS, 1.0, "vdnn:policy=all")
    backs = {decision.storage: decision.back for decision in made.decisions}
    # Layer k reads the result of layer k - 1; layer k + 1 requests it as its own backward pass begins.
    assert backs == {MIXED_RESULTS[k - 1]: layers[k + 1].backward for k in range(1, 7)}


def test_an_input_of_two_layers_is_prefetched_for_the_first_to_run_backward() -> None:
    trace = make_net("c.f.")
    costs = make_costs(trace, op_seconds=1e-3)
    layers, results = find_layers(trace), list_results(trace)
    made, _ = make(trace, costs, 1.0, "vdnn:policy=all")
    backs = {decision.storage: decision.back for decision in made.decisions}
    assert layers[1].inputs[0] == results[0] and results[0] in layers[2].inputs
    assert backs[results[0]] == layers[3].backward


def test_a_prefetch_does_not_look_past_the_next_convolution() -> None:
    layers = find_layers(MIXED)
    made, _ = make(MIXED, MIXED_COSTS, 1.0, "vdnn:policy=conv")
    backs = {decision.storage: decision.back for decision in made.decisions}
    # Layer 7 requests the input of convolution 6. Layer 6 skips 5 and 4 and requests the input of convolution 3.
    assert backs == {MIXED_RESULTS[5]: layers[7].backward, MIXED_RESULTS[2]: layers[6].backward}
    trace = make_net("c.cp...")
    moved = {2: [0], 3: [0]}
    layers = find_layers(trace)
    assert _prefetch(layers, moved) == {3: layers[6].backward, 2: layers[5].backward}
    # The input of layer 1 lies beyond convolution 2: only that convolution itself may request it.
    assert _prefetch(layers, {1: [0]}) == {1: layers[2].backward}


def test_dyn_takes_the_first_policy_that_fits() -> None:
    peaks = {
        policy: simulate(
            MIXED, MIXED_COSTS, plan(MIXED, MIXED_COSTS, 10**9, strategy=f"vdnn:policy={policy}")
        ).peak_bytes
        for policy in ("conv", "all")
    }
    plain = peak(MIXED, MIXED_COSTS)
    assert plain > peaks["conv"] > peaks["all"]
    count = {
        budget_bytes: len(plan(MIXED, MIXED_COSTS, budget_bytes, strategy="vdnn").decisions)
        for budget_bytes in (plain, plain - 1, peaks["conv"] - 1)
    }
    assert list(count.values()) == [0, 2, 6]
    with pytest.raises(Infeasible) as caught:
        plan(MIXED, MIXED_COSTS, peaks["all"] - 1, strategy="vdnn")
    assert caught.value.needed_bytes == peaks["all"]


def test_without_the_barrier_the_same_budget_takes_less_time() -> None:
    slow = simulate(MIXED, MIXED_COSTS, plan(MIXED, MIXED_COSTS, 10**9, strategy="vdnn:policy=all"))
    fast = simulate(MIXED, MIXED_COSTS, plan(MIXED, MIXED_COSTS, slow.peak_bytes, strategy="tvdnn_heuristic"))
    assert fast.step_seconds < 0.9 * slow.step_seconds


# -- superneurons -----------------------------------------------------------------------------------------------------


def make_segments(cheap: int, blocks: int = 4) -> Trace:
    """Return convolutions with cheap layers after each."""
    return make_net(("c" + "." * cheap) * blocks + "c")


def test_checkpoints_are_offloaded_and_cheap_layers_replayed() -> None:
    trace = make_segments(2)
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1e9))
    made, forecast = make(trace, costs, 0.5, "superneurons")
    ops = {op.tick: op for op in trace.ops}
    costly = {op.writes[0].storage for op in trace.ops if op.flops}
    choices = {choice: {each.storage for each in made.decisions if each.choice is choice} for choice in Choice}
    assert choices[Choice.OFFLOAD] and choices[Choice.OFFLOAD] <= costly
    assert choices[Choice.RECOMPUTE] and not choices[Choice.RECOMPUTE] & costly
    assert all(not ops[tick].flops for segment in made.segments for tick in segment.ops)
    assert forecast.recompute_seconds > 0 and forecast.offloaded_bytes > 0


def test_no_more_is_offloaded_than_the_budget_requires() -> None:
    trace = make_segments(2)
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1e9))
    moved = [make(trace, costs, share, "superneurons")[1].offloaded_bytes for share in (1.0, 0.8, 0.6, 0.5)]
    assert moved[0] == 0 and moved == sorted(moved) and moved[-1] > moved[1]
    assert make(trace, costs, 1.0, "superneurons")[0].decisions == ()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.4])
@pytest.mark.parametrize(
    "kinds", ["c.." * 6 + "c", "c...." * 4 + "p", "c" + "c.c.+." * 5], ids=["short", "long", "residual"]
)
def test_leaves_of_replays_are_reloaded_and_counted(kinds: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[MemoryCurve] = []

    class Spied(EvictionSweep):
        def __init__(self, drafter: Drafter, load: MemoryCurve, *others: Any) -> None:
            loads.append(load)
            super().__init__(drafter, load, *others)

    monkeypatch.setattr(superneurons, "EvictionSweep", Spied)
    trace = make_net(kinds)
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1e9))
    problem = pose(trace, costs, max(1, int(peak(trace, costs) * share)))
    forecast = problem.drafter.replay.run(superneurons.make_plan(problem))
    assert list(forecast.live_bytes) == loads[0].live.tolist()
    assert forecast.recompute_seconds > 0


def test_a_checkpoint_running_backward_prefetches_for_the_next_one() -> None:
    trace = make_segments(2, 6)
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1e9))
    made, _ = make(trace, costs, 0.4, "superneurons")
    moved = [each for each in made.decisions if each.choice is Choice.OFFLOAD]
    begins = {layer.backward for layer in find_layers(trace) if layer.is_costly}
    assert len(moved) > 2
    assert {each.back for each in moved} <= begins


def test_the_least_recently_used_is_offloaded_first() -> None:
    trace = make_segments(2)
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1e9))
    made, _ = make(trace, costs, 0.5, "superneurons")
    moved = sorted(each.storage for each in made.decisions if each.choice is Choice.OFFLOAD)
    checkpoints = [op.writes[0].storage for op in trace.ops if op.name == CONVOLUTION]
    assert moved == checkpoints[: len(moved)]  # the forward pass uses them in this order


@pytest.mark.parametrize(("workspace_bytes", "is_fast"), [(256 * KIB, True), (256 * KIB - 1, False)])
def test_a_segment_is_replayed_once_if_it_is_no_larger_than_the_largest_layer(
    workspace_bytes: int, is_fast: bool
) -> None:
    """A segment makes four storages; an op of the backward pass uses three."""
    trace = make_segments(4)
    costs = make_costs(trace, op_seconds=1e-3, workspace_bytes=workspace_bytes)
    made, forecast = make(trace, costs, 0.9, "superneurons")
    dropped = [each for each in made.decisions if each.choice is Choice.RECOMPUTE]
    assert len(dropped) == 16
    assert len(made.segments) == (4 if is_fast else 16)
    assert max(len(segment.outputs) for segment in made.segments) == (4 if is_fast else 1)
    # Once for each layer: 4 + 3 + 2 + 1 ops a segment instead of 4.
    assert forecast.recompute_seconds == pytest.approx(1e-3 * 4 * (4 if is_fast else 10))


def test_a_storage_that_crosses_a_checkpoint_is_a_checkpoint() -> None:
    """The sum that ends a residual block is read by the next block's convolution and by its sum."""
    trace = make_net("c" + "c.c.+." * 5)
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1e9))
    made, _ = make(trace, costs, 0.7, "superneurons")
    results = list_results(trace)
    dropped = {each.storage for each in made.decisions if each.choice is Choice.RECOMPUTE}
    # The activations that convolutions read, and the last sum: no convolution comes after it.
    assert dropped == {results[position] for position in (*range(2, 31, 6), *range(6, 30, 6), 29)}


# -- tvdnn_ilp --------------------------------------------------------------------------------------------------------


@given(job=jobs(), count=some.integers(2, 40), data=some.data())
def test_whatever_fits_the_stretches_fits_the_step(job: tuple[Trace, Costs], count: int, data: some.DataObject) -> None:
    trace, costs = job
    drafter = (problem := pose(trace, costs, 1, min_offload_bytes=1)).drafter
    load = MemoryCurve(drafter, problem.plain.live_bytes)
    stretches = cut_stretches(drafter, load, count)
    bundles = make_bundles(drafter, load, stretches)
    assert len(stretches) <= count
    moments = list_moments(trace)
    held = [stretch.live_bytes for stretch in stretches]
    keys = [key for bundle in bundles for key in bundle.keys]
    assert len(keys) == len(set(keys))
    for bundle in bundles:
        assert bundle.copied < bundle.first <= bundle.last < len(stretches) - 1
        first = data.draw(some.integers(bundle.first, bundle.last))
        last = data.draw(some.integers(first, bundle.last))
        assert bundle.nbytes == sum(load.nbytes[key] for key in bundle.keys)
        for k in range(first, last + 1):
            held[k] -= bundle.nbytes
        back = next(tick for tick in moments if tick > stretches[last].end)
        for key in bundle.keys:
            assert drafter.gaps[key].opens <= stretches[first].begin and back <= drafter.gaps[key].closes
            load.take(key, stretches[first].begin, back)
    for stretch, most in zip(stretches, held, strict=True):
        assert load.live[stretch.begin + 1 : stretch.end + 1].max() <= most
    if stretches:
        assert (stretches[0].begin, stretches[-1].end) == (moments[0], trace.end - 1)
        assert [each.begin for each in stretches[1:]] == [each.end for each in stretches[:-1]]
        whole = sum(stretch.seconds for stretch in stretches)
        assert whole == pytest.approx(drafter.begins[trace.end] - drafter.begins[moments[0]])


SIZES = [256, 64, 192, 128, 320, 64, 256, 128]


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_the_program_is_within_two_percent_of_enumeration(share: float, caplog: pytest.LogCaptureFixture) -> None:
    trace = make_chain([size * KIB for size in SIZES])
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1.5e8))
    problem = pose(trace, costs, int(peak(trace, costs) * share))
    run = problem.drafter.replay.run
    keys = sorted(problem.drafter.gaps)
    best = min(
        run(tvdnn_ilp._sweep(problem, frozenset(chosen))).step_seconds
        for count in range(len(keys) + 1)
        for chosen in itertools.combinations(keys, count)
    )
    with caplog.at_level(logging.INFO):
        made = tvdnn_ilp.make_plan(problem, steps=200)
    assert run(made).step_seconds <= best * 1.02
    found = re.search(r"within (\S+)% of the best", caplog.text)
    assert found is not None and float(found[1]) <= 100 * tvdnn_ilp.GAP


def test_a_short_time_limit_returns_the_heuristics_plan_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    trace = make_chain([256 * KIB] * 24)
    costs = make_costs(trace, op_seconds=1e-3)
    budget_bytes = int(peak(trace, costs) * 0.5)
    with caplog.at_level(logging.WARNING):
        made = plan(trace, costs, budget_bytes, strategy="tvdnn_ilp:seconds=1e-9")
    assert "no solution within 20 nodes and 1e-09 s" in caplog.text
    heuristic = plan(trace, costs, budget_bytes, strategy="tvdnn_heuristic")
    assert made == dataclasses.replace(heuristic, strategy="tvdnn_ilp")


def test_the_solver_does_not_run_without_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = make_chain([256 * KIB] * 8)
    costs = make_costs(trace)
    monkeypatch.setattr(tvdnn_ilp, "_Program", None)
    assert plan(trace, costs, peak(trace, costs), strategy="tvdnn_ilp").decisions == ()
    with pytest.raises(Infeasible):
        plan(trace, costs, pose(trace, costs, 1).floor.peak_bytes - 1, strategy="tvdnn_ilp")


@pytest.mark.parametrize("options", ["steps=1", "steps=many"])
def test_invalid_options_are_rejected(options: str) -> None:
    trace = make_chain([256 * KIB] * 4)
    with pytest.raises(UsageError, match=r"tvdnn_ilp.*steps"):
        plan(trace, make_costs(trace), 10**9, strategy=f"tvdnn_ilp:{options}")


@pytest.mark.parametrize("share", [0.4, 0.6])
@pytest.mark.parametrize("per_second", [2e8, 1e8, 4e7])
def test_the_program_predicts_the_waits(per_second: float, share: float) -> None:
    """With fine stretches, the step time of the solution is that of the forecast of its plan."""
    trace = make_chain([256 * KIB] * 24)
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=per_second))
    problem = pose(trace, costs, int(peak(trace, costs) * share))
    drafter = problem.drafter
    load = MemoryCurve(drafter, problem.plain.live_bytes)
    stretches = cut_stretches(drafter, load, 60)
    program = tvdnn_ilp._Program(stretches, make_bundles(drafter, load, stretches), costs.link, problem.budget_bytes)
    whole, bounds = np.array(program._whole, dtype=float), np.array(program._bounds)
    found = program._optimise(program._constrain(), whole, bounds, {"mip_rel_gap": 1e-4}).fun * program._unit
    forecast = drafter.replay.run(tvdnn_ilp.make_plan(problem, steps=60))
    assert drafter.begins[stretches[0].begin] + found == pytest.approx(forecast.step_seconds, rel=1e-3)


@pytest.mark.parametrize("half_duplex", [False, True])
def test_copies_share_a_half_duplex_link(half_duplex: bool) -> None:
    trace = make_chain([256 * KIB] * 24)
    link = make_link(half_duplex=half_duplex)
    problem = pose(trace, make_costs(trace, op_seconds=1e-3, link=link), int(peak(trace, make_costs(trace)) * 0.4))
    load = MemoryCurve(problem.drafter, problem.plain.live_bytes)
    stretches = cut_stretches(problem.drafter, load, 10)
    program = tvdnn_ilp._Program(stretches, make_bundles(problem.drafter, load, stretches), link, problem.budget_bytes)
    out = {variable for columns in program._columns for variable in columns.out.values()}
    back = {variable for columns in program._columns for variable in columns.back.values()}
    assert any(row.keys() & out and row.keys() & back for row, _ in program._rows) == half_duplex


def test_a_slower_solution_is_not_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    trace = make_chain([256 * KIB] * 16)
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=2e8))
    problem = pose(trace, costs, int(peak(trace, costs) * 0.7))
    soonest = frozenset(sorted(problem.drafter.gaps, key=lambda key: problem.drafter.gaps[key].closes)[:5])
    monkeypatch.setattr(tvdnn_ilp._Program, "solve", lambda self, limits: soonest)
    with caplog.at_level(logging.INFO):
        made = tvdnn_ilp.make_plan(problem)
    assert made == tvdnn_ilp._sweep(problem, frozenset()) != tvdnn_ilp._sweep(problem, soonest)
    assert "the heuristic's plan is faster" in caplog.text

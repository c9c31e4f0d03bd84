"""Steps of several ranks: closed forms of schedules and memory, one rank as one device, and the command. No torch."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as some
from typer.testing import CliRunner, Result

from elbowroom.cli.main import make_app
from elbowroom.cost.collectives import price_collective
from elbowroom.errors import UsageError
from elbowroom.ir import files
from elbowroom.ir.costs import Costs
from elbowroom.ir.network import CollectiveKind, Network
from elbowroom.ir.parallelism import MicroBatchOrder, Parallel, Parallelism, RanksForecast, ShardDtype
from elbowroom.ir.plan import Choice, Decision
from elbowroom.ir.trace import Role, Trace, View
from elbowroom.planner.problem import plan
from elbowroom.simulator.ranks.blocks import find_block
from elbowroom.simulator.ranks.data_parallel import fill_buckets
from elbowroom.simulator.ranks.pipeline_stages import split_evenly
from elbowroom.simulator.ranks.pipelined import order_work, time_flush
from elbowroom.simulator.ranks.rank_step import RankStep
from elbowroom.simulator.ranks.simulate_ranks import simulate_ranks
from elbowroom.simulator.ranks.turns import gather_in_turns, replays_freed_weights
from elbowroom.simulator.simulate import simulate
from tests.generators import Layer, Optimizer, cyclic_traces, keep_everything, make_costs, make_link, make_trace
from tests.pure.test_collectives import make_network

KIB, MIB = 1 << 10, 1 << 20
FREE = make_network((None, 1e30, 0.0), name="free")
SLOW = make_network((None, 1e9, 1e-6), name="slow")


def name_blocks(trace: Trace) -> Trace:
    """The same trace, with layer n in module h.n.linear."""
    numbers = itertools.count()
    states = sum(home.role is Role.OPTIMIZER_STATE for home in trace.storages)
    weights = sum(home.role is Role.PARAMETER for home in trace.storages)
    state_numbers = (number // max(states // max(weights, 1), 1) for number in itertools.count())

    def find(label: str) -> str | None:
        number = re.search(r"\d+", label)
        return f"h.{number[0]}.linear" if number else None

    def place(home: Any) -> Any:
        if home.role is Role.PARAMETER:
            return dataclasses.replace(home, module=f"h.{next(numbers)}.linear")
        if home.role is Role.OPTIMIZER_STATE:
            return dataclasses.replace(home, module=f"h.{next(state_numbers)}.linear")
        return dataclasses.replace(home, module=find(home.label))

    return dataclasses.replace(
        trace,
        ops=tuple(dataclasses.replace(op, module=find(op.name)) for op in trace.ops),
        storages=tuple(place(home) for home in trace.storages),
    )


def make_blocks(count: int, *, weight_bytes: int = MIB, nbytes: int = KIB) -> Trace:
    """A chain of equal blocks, trained by Adam."""
    layers = [Layer(inputs=(index - 1,), nbytes=nbytes, parameter_bytes=weight_bytes) for index in range(count)]
    return name_blocks(make_trace(layers, batch_bytes=nbytes, name="blocks", optimizer=Optimizer()))


def time_blocks(trace: Trace, forward: float = 1e-3, backward: float = 2e-3) -> Costs:
    """Costs with which all blocks take the same time, although the first one makes no gradient of what it reads."""
    seconds = []
    for op in trace.ops:
        is_first = op.name == "weight0"
        seconds.append(
            forward if op.name.startswith("layer")
            else backward if is_first
            else backward / 2 if op.name.startswith(("weight", "back"))
            else 0.0
        )  # fmt: skip
    return make_costs(trace, op_seconds=seconds)


def run(trace: Trace, costs: Costs, network: Network, kind: Parallel, ranks: int, **options: Any) -> RanksForecast:
    return simulate_ranks(trace, costs, keep_everything(costs), network, Parallelism(kind=kind, ranks=ranks, **options))


# -- one rank is one device -------------------------------------------------------------------------------------------


@given(trace=cyclic_traces(), alignment_bytes=some.sampled_from([1, 512]), kind=some.sampled_from(list(Parallel)))
def test_one_rank_is_one_device(trace: Trace, alignment_bytes: int, kind: Parallel) -> None:
    trace = name_blocks(trace)
    costs = make_costs(trace, workspace_bytes=1000, alignment_bytes=alignment_bytes, hook_seconds=1e-6)
    alone = simulate(trace, costs, keep_everything(costs))
    if not any(home.role is Role.GRADIENT and home.created >= 0 for home in trace.storages):
        with pytest.raises(UsageError, match=r"nothing to exchange|no gradients to exchange"):
            run(trace, costs, SLOW, kind, 1)
        return
    found = run(trace, costs, SLOW, kind, 1)
    assert found.peak_bytes == alone.peak_bytes
    assert (found.step_seconds, found.alone_seconds) == pytest.approx((alone.step_seconds,) * 2, rel=1e-12)
    assert found.exposed_seconds == found.network_seconds == found.sent_bytes == 0
    if kind is not Parallel.PIPELINED:  # whose seconds are sums over its entries
        assert found.step_seconds == alone.step_seconds


@pytest.mark.parametrize("kind", list(Parallel))
def test_one_rank_under_a_plan(kind: Parallel) -> None:
    trace = make_blocks(6, weight_bytes=4 * KIB, nbytes=MIB)
    costs = make_costs(trace, op_seconds=1e-3)
    plain = simulate(trace, costs, keep_everything(costs))
    made = plan(trace, costs, plain.peak_bytes * 2 // 3)
    assert made.decisions
    alone = simulate(trace, costs, made)
    found = simulate_ranks(trace, costs, made, SLOW, Parallelism(kind=kind, ranks=1))
    assert found.peak_bytes == alone.peak_bytes < plain.peak_bytes
    assert found.step_seconds == pytest.approx(alone.step_seconds, rel=1e-12)


# -- data parallel ----------------------------------------------------------------------------------------------------


def test_buckets_as_ddp_fills_them() -> None:
    trace = make_blocks(60)
    costs = make_costs(trace)
    step = RankStep(trace, costs, keep_everything(costs))
    assert [bucket.nbytes // MIB for bucket in fill_buckets(step, None)] == [1, 25, 25, 9]
    assert [bucket.nbytes // MIB for bucket in fill_buckets(step, 2 * MIB + 1)] == [3] * 20
    assert len(fill_buckets(step, 1 << 40)) == 1


@given(
    seconds=some.lists(some.floats(1e-5, 1e-2), min_size=3, max_size=3),
    ranks=some.integers(2, 2000),
    bucket=some.integers(1, 4),
)
def test_exposed_time_of_buckets(seconds: list[float], ranks: int, bucket: int) -> None:
    """Reductions queue up: the last one is over at the latest of (bucket ready + all reductions from it on)."""
    trace = make_blocks(8)
    costs = time_blocks(trace, seconds[0], seconds[1])
    found = run(trace, costs, SLOW, Parallel.DATA, ranks, bucket_bytes=bucket * MIB)
    sizes = [bucket] * (8 // bucket) + ([8 % bucket] if 8 % bucket else [])
    prices = [price_collective(SLOW, CollectiveKind.ALL_REDUCE, size * MIB, ranks) for size in sizes]
    begins = simulate(trace, costs, keep_everything(costs)).begin_seconds
    ready = [begins[op.tick + 1] for op in trace.ops if op.name.startswith("weight")]
    lasts = [ready[min(sum(sizes[: index + 1]), 8) - 1] for index in range(len(sizes))]
    over = max(last + sum(prices[index:]) for index, last in enumerate(lasts))
    backward_end = next(begins[op.tick] for op in trace.ops if op.name == "update")
    assert found.exposed_seconds == pytest.approx(max(0.0, over - backward_end), abs=1e-12)
    assert found.step_seconds == pytest.approx(found.alone_seconds + found.exposed_seconds)
    assert found.network_seconds == pytest.approx(sum(prices))
    assert found.sent_bytes == sum(2 * size * MIB * (ranks - 1) // ranks for size in sizes)


def test_memory_of_buckets() -> None:
    trace = make_blocks(8)
    costs = make_costs(trace)
    alone = simulate(trace, costs, keep_everything(costs)).peak_bytes
    assert run(trace, costs, SLOW, Parallel.DATA, 4).peak_bytes == alone + 8 * MIB
    # As views the gradients are their buckets, which are there all the time; a new one is made beside its bucket.
    views = run(trace, costs, SLOW, Parallel.DATA, 4, gradient_as_bucket_view=True)
    assert alone + MIB <= views.peak_bytes <= alone + MIB + 9 * KIB


# -- sharded ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("reshards", [True, False])
def test_memory_of_shards(ranks: int, reshards: bool) -> None:
    """Weights and two moments in shards; a block's gradient, and the one before it in the buffer of its reduction,
    beside the shards of all before; and the block and the one that is gathered next, or all that are to come."""
    count, weight = 6, 8 * MIB
    trace = make_blocks(count, weight_bytes=weight)
    found = run(trace, make_costs(trace), FREE, Parallel.SHARDED, ranks, reshard_after_forward=reshards)
    shard = weight // ranks
    state = 3 * count * shard
    gathered = [2 if number else 1 for number in range(count)] if reshards else [number + 1 for number in range(count)]
    whole = [2 if number < count - 1 else 1 for number in range(count)]
    peak = max(
        state + (gathered[number] + whole[number]) * weight + (count - 1 - number) * shard for number in range(count)
    )
    activations = 4 * count * KIB
    assert peak <= found.peak_bytes <= peak + activations
    assert found.peak_bytes < run(trace, make_costs(trace), FREE, Parallel.DATA, ranks).peak_bytes


def test_collectives_of_shards() -> None:
    trace = make_blocks(5)
    costs = make_costs(trace)
    for reshards, gathers in ((True, 10), (False, 5)):
        found = run(trace, costs, SLOW, Parallel.SHARDED, 8, reshard_after_forward=reshards)
        counts = {total.kind: (total.count, total.nbytes) for total in found.collectives}
        assert counts == {
            CollectiveKind.ALL_GATHER: (gathers, gathers * MIB),
            CollectiveKind.REDUCE_SCATTER: (5, 5 * MIB),
        }
        assert found.sent_bytes == (gathers + 5) * MIB * 7 // 8


@given(rate=some.floats(1e6, 1e12), factor=some.floats(1.0, 100.0), reshards=some.booleans())
def test_faster_networks_are_no_slower(rate: float, factor: float, reshards: bool) -> None:
    trace = make_blocks(5)
    costs = time_blocks(trace)
    slow, fast, free = (
        run(trace, costs, network, Parallel.SHARDED, 16, reshard_after_forward=reshards)
        for network in (make_network((None, rate, 1e-6)), make_network((None, rate * factor, 1e-6)), FREE)
    )
    assert fast.step_seconds <= slow.step_seconds * (1 + 1e-12) and fast.peak_bytes <= slow.peak_bytes
    assert free.step_seconds <= fast.step_seconds and free.exposed_seconds == pytest.approx(0.0, abs=1e-12)
    # Nothing overlaps with the first gather and with the last reduce-scatter, and at most all of compute with the rest.
    assert slow.exposed_seconds <= slow.network_seconds
    assert slow.exposed_seconds >= max(slow.network_seconds / 16, slow.network_seconds - slow.alone_seconds)


def test_gathers_that_nothing_hides() -> None:
    """A forward pass of no time waits for each gather in turn; the backward pass for its first one, and for the last
    reduction, but hides all others."""
    count = 5
    trace = make_blocks(count)
    costs = time_blocks(trace, forward=0.0, backward=1.0)
    gather, scatter = (
        price_collective(SLOW, kind, MIB, 16) for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
    )
    for reshards, waits in ((True, count + 1), (False, count)):
        found = run(trace, costs, SLOW, Parallel.SHARDED, 16, reshard_after_forward=reshards)
        assert found.exposed_seconds == pytest.approx(waits * gather + scatter)


def test_updates_of_shards_take_a_share_of_the_time() -> None:
    trace = make_blocks(4)
    seconds = [8e-3 if op.name == "update" else 1e-3 for op in trace.ops]
    found = run(trace, make_costs(trace, op_seconds=seconds), FREE, Parallel.SHARDED, 2)
    assert found.alone_seconds - found.step_seconds == pytest.approx(4 * 4e-3)
    most = run(trace, make_costs(trace, op_seconds=seconds), FREE, Parallel.SHARDED, 1024)
    assert most.alone_seconds - most.step_seconds == pytest.approx(4 * 7e-3), "no op is shorter than a launch"


def test_shards_in_another_dtype() -> None:
    trace = make_blocks(4, weight_bytes=8 * MIB)
    half = dataclasses.replace(
        trace,
        ops=tuple(
            dataclasses.replace(
                op,
                reads=tuple(dataclasses.replace(view, dtype="bfloat16") for view in op.reads),
                writes=tuple(dataclasses.replace(view, dtype="bfloat16") for view in op.writes),
            )
            if op.name != "update"  # as a fused optimizer, which is seen to touch bytes
            else op
            for op in trace.ops
        ),
    )
    costs = make_costs(half)

    def measure(network: Network, dtype: ShardDtype | None) -> tuple[int, dict[CollectiveKind, int]]:
        found = run(half, costs, network, Parallel.SHARDED, 8, shard_dtype=dtype)
        return found.peak_bytes, {total.kind: total.nbytes for total in found.collectives}

    (same, sizes), (mixed, mixed_sizes) = (measure(FREE, dtype) for dtype in (None, ShardDtype.FLOAT32))
    # Four weights, eight moments and two gradients in shards of 1 MiB are twice as large, and so is the buffer in which
    # a block's gradients are reduced.
    assert mixed - same == 14 * MIB + 8 * MIB
    assert mixed_sizes[CollectiveKind.ALL_GATHER] == sizes[CollectiveKind.ALL_GATHER] == 8 * 8 * MIB
    assert mixed_sizes[CollectiveKind.REDUCE_SCATTER] == 2 * sizes[CollectiveKind.REDUCE_SCATTER] == 2 * 4 * 8 * MIB


# -- pipelined --------------------------------------------------------------------------------------------------------


@given(
    stages=some.integers(1, 9), micro_batches=some.integers(1, 20), forward=some.floats(0.1, 2.0),
    backward=some.floats(0.1, 2.0), schedule=some.sampled_from(list(MicroBatchOrder)),
)  # fmt: skip
def test_bubble_of_equal_stages(
    stages: int, micro_batches: int, forward: float, backward: float, schedule: MicroBatchOrder
) -> None:
    flushed = time_flush([forward] * stages, [backward] * stages, [0.0] * stages, micro_batches, schedule)
    assert max(flushed) == flushed[0] == pytest.approx((micro_batches + stages - 1) * (forward + backward))


@given(
    forward=some.lists(some.floats(0.1, 2.0), min_size=2, max_size=6), micro_batches=some.integers(1, 12),
    send=some.floats(0.0, 3.0), schedule=some.sampled_from(list(MicroBatchOrder)),
)  # fmt: skip
def test_bounds_of_a_pipeline(forward: list[float], micro_batches: int, send: float, schedule: MicroBatchOrder) -> None:
    backward = [2 * seconds for seconds in forward]
    sends = [send] * len(forward)
    end = max(time_flush(forward, backward, sends, micro_batches, schedule))
    through = 3 * sum(forward) + 2 * send * (len(forward) - 1)
    assert end >= max(through, 3 * micro_batches * max(forward), micro_batches * send) - 1e-9
    assert end >= max(time_flush(forward, backward, [0.0] * len(forward), micro_batches, schedule)) - 1e-9
    serial = micro_batches * through
    assert end <= serial + 1e-9


def test_a_slow_link_carries_one_micro_batch_after_another() -> None:
    flushed = time_flush([0.1, 0.1], [0.2, 0.2], [3.0, 3.0], 12, MicroBatchOrder.GPIPE)
    # The last activation is there after 0.1 + 12 * 3; the last gradient 12 * 3 after the first backward pass.
    assert flushed == pytest.approx([0.1 + 36 + 0.1 + 0.2 + 36 + 0.2, 36.2 + 12 * 0.2])


@pytest.mark.parametrize("schedule", list(MicroBatchOrder))
def test_micro_batches_that_are_alive(schedule: MicroBatchOrder) -> None:
    for stages, micro_batches in itertools.product((1, 2, 5), (1, 3, 8)):
        for stage in range(stages):
            work = order_work(stage, stages, micro_batches, schedule)
            alive = list(itertools.accumulate(1 if each.is_forward else -1 for each in work))
            most = micro_batches if schedule is MicroBatchOrder.GPIPE else min(stages - stage, micro_batches)
            assert max(alive) == most and min(alive) == 0
            for is_forward in (True, False):
                assert [each.micro_batch for each in work if each.is_forward is is_forward] == list(
                    range(micro_batches)
                )


@given(weights=some.lists(some.floats(0.0, 10.0), min_size=1, max_size=8), parts=some.integers(1, 8))
def test_stages_are_as_even_as_can_be(weights: list[float], parts: int) -> None:
    assume(parts <= len(weights))
    ends = split_evenly(weights, parts)
    found = [weights[begin:end] for begin, end in itertools.pairwise((0, *ends))]
    assert all(found) and [each for part in found for each in part] == weights
    best = min(
        max(sum(weights[begin:end]) for begin, end in itertools.pairwise((0, *cuts, len(weights))))
        for cuts in itertools.combinations(range(1, len(weights)), parts - 1)
    )
    assert max(map(sum, found)) == pytest.approx(best)


def test_a_pipeline_of_blocks() -> None:
    trace = make_blocks(8, nbytes=64 * KIB)
    costs = time_blocks(trace)
    found = run(trace, costs, FREE, Parallel.PIPELINED, 4, stages=4, micro_batches=6)
    assert [(stage.first, stage.last) for stage in found.stages] == [
        ("h.0", "h.1"), ("h.2", "h.3"), ("h.4", "h.5"), ("h.6", "h.7")
    ]  # fmt: skip
    step = (6 + 3) * 2 * 3e-3
    assert found.step_seconds == pytest.approx(step)
    assert found.bubble_seconds / step == pytest.approx(3 / 9), "(p - 1) / (m + p - 1)"
    assert found.efficiency == pytest.approx(6 / 9)
    assert [stage.alive for stage in found.stages] == [4, 3, 2, 1]
    assert [stage.sent_bytes for stage in found.stages] == [64 * KIB] * 3 + [0]
    # Each block saves what it reads; later stages also hold what they have received.
    assert [stage.activation_bytes for stage in found.stages] == [2 * 64 * KIB] + [3 * 64 * KIB] * 3
    replicas = run(trace, costs, SLOW, Parallel.PIPELINED, 12, stages=4, micro_batches=6)
    assert [(total.kind, total.nbytes) for total in replicas.collectives] == [
        (CollectiveKind.SEND, 6 * 2 * 64 * KIB), (CollectiveKind.ALL_REDUCE, 2 * MIB)
    ]  # fmt: skip
    assert replicas.exposed_seconds >= price_collective(SLOW, CollectiveKind.ALL_REDUCE, 2 * MIB, 3)
    assert replicas.step_seconds == pytest.approx(step + replicas.exposed_seconds)


def test_memory_of_a_pipeline() -> None:
    trace = make_blocks(8, weight_bytes=4 * KIB, nbytes=64 * KIB)
    costs = time_blocks(trace)

    def measure(micro_batches: int, schedule: MicroBatchOrder) -> list[int]:
        found = run(trace, costs, FREE, Parallel.PIPELINED, 4, stages=4, micro_batches=micro_batches, schedule=schedule)
        return [stage.peak_bytes for stage in found.stages]

    seven, eight = measure(7, MicroBatchOrder.GPIPE), measure(8, MicroBatchOrder.GPIPE)
    assert [more - less for less, more in zip(seven, eight, strict=True)] == [2 * 64 * KIB] + [3 * 64 * KIB] * 3
    assert measure(7, MicroBatchOrder.ONE_F_ONE_B) == measure(800, MicroBatchOrder.ONE_F_ONE_B)
    assert measure(4, MicroBatchOrder.ONE_F_ONE_B)[0] == measure(4, MicroBatchOrder.GPIPE)[0]
    state = 2 * 4 * 4 * KIB
    assert all(peak > state for peak in measure(7, MicroBatchOrder.ONE_F_ONE_B))


def test_each_stage_updates_its_own_weights() -> None:
    trace = make_blocks(8)
    seconds = [5e-3 if op.name == "update" else 1e-3 for op in trace.ops]
    found = run(trace, make_costs(trace, op_seconds=seconds), FREE, Parallel.PIPELINED, 4, stages=4, micro_batches=4)
    blocks = [int(stage.last[2:]) - int(stage.first[2:]) + 1 for stage in found.stages]
    assert sum(blocks) == 8
    assert [stage.update_seconds for stage in found.stages] == pytest.approx([5e-3 * count for count in blocks])


def test_gradients_are_added_up_over_micro_batches() -> None:
    """All sums are there from the beginning, and one more gradient while it is added."""
    trace = make_blocks(4)
    costs = make_costs(trace)
    one, two = (
        run(trace, costs, FREE, Parallel.PIPELINED, 1, stages=1, micro_batches=count).peak_bytes for count in (1, 2)
    )
    assert MIB <= two - one <= MIB + 8 * KIB


def test_what_skips_stages_passes_through_them() -> None:
    layers = [Layer(inputs=(index - 1,), nbytes=KIB, parameter_bytes=MIB) for index in range(3)]
    layers.append(Layer(inputs=(0, 2), nbytes=KIB, parameter_bytes=MIB))
    trace = name_blocks(make_trace(layers, batch_bytes=KIB, name="skip"))
    found = run(trace, make_costs(trace), SLOW, Parallel.PIPELINED, 4, stages=4, micro_batches=1)
    assert [stage.sent_bytes for stage in found.stages] == [KIB, 2 * KIB, 2 * KIB, 0]


def test_a_weight_of_two_stages() -> None:
    """A head that reads the embedding's weight: both stages hold it, and add up its gradient at the end."""
    trace = make_blocks(4)
    weight = next(home.id for home in trace.storages if home.role is Role.PARAMETER)
    tied = dataclasses.replace(
        trace,
        ops=tuple(
            dataclasses.replace(
                op, reads=(*op.reads, View(storage=weight, version=0, dtype="float32", shape=(MIB // 4,)))
            )
            if op.name == "layer3"
            else op
            for op in trace.ops
        ),
    )
    options = {"stages": 4, "micro_batches": 4}
    plain, both = (run(each, time_blocks(each), SLOW, Parallel.PIPELINED, 4, **options) for each in (trace, tied))
    assert both.step_seconds - plain.step_seconds == pytest.approx(MIB / 1e9 + 1e-6)
    grown = [more.peak_bytes - less.peak_bytes for less, more in zip(plain.stages, both.stages, strict=True)]
    assert grown[:3] == [0, 0, 0] and grown[3] >= 4 * MIB, "weight, gradient and two moments"


def test_blocks() -> None:
    assert [find_block(path) for path in ("h.3.mlp.c_fc", "layer1.0.bn1", "encoder.layer.11", "lm_head", "", None)] == [
        "h.3", "layer1.0", "encoder.layer.11", "", "", ""
    ]  # fmt: skip


# -- what cannot be simulated -----------------------------------------------------------------------------------------


def test_refused() -> None:
    trace = make_blocks(4)
    costs = make_costs(trace)
    pipeline = {"stages": 4, "micro_batches": 1}
    with pytest.raises(UsageError, match="6 ranks do not divide into 4 stages"):
        run(trace, costs, SLOW, Parallel.PIPELINED, 6, **pipeline)
    with pytest.raises(UsageError, match=r"blocks has 4 blocks .* do not make 5 stages: take at most 4"):
        run(trace, costs, SLOW, Parallel.PIPELINED, 5, stages=5, micro_batches=1)
    with pytest.raises(UsageError, match="1 micro-batch or more, not 4 and 0"):
        run(trace, costs, SLOW, Parallel.PIPELINED, 4, stages=4, micro_batches=0)
    again = dataclasses.replace(
        trace,
        ops=tuple(dataclasses.replace(op, module="h.0.linear") if op.name == "layer2" else op for op in trace.ops),
    )
    with pytest.raises(UsageError, match=r"h\.0 of blocks runs again after h\.1"):
        run(again, make_costs(again), SLOW, Parallel.PIPELINED, 4, **pipeline)
    forward = make_trace([Layer(inputs=(-1,), nbytes=KIB, keeps="")], name="forward only")
    for each, message in ((forward, "forward only has no backward pass"), (_untrained(), "no op of untrained makes")):
        with pytest.raises(UsageError, match=message):
            run(each, make_costs(each), SLOW, Parallel.DATA, 2)


def _untrained() -> Trace:
    return make_trace([Layer(inputs=(index - 1,), nbytes=KIB) for index in range(3)], name="untrained")


def test_a_plan_that_moves_the_state_is_refused() -> None:
    trace = make_blocks(4)
    costs = make_costs(trace)
    storage, gaps = next((storage, gaps) for storage, gaps in trace.state_gaps.items() if gaps)
    moved = Decision(
        storage=storage,
        gap=0,
        choice=Choice.OFFLOAD,
        leave=gaps[0].opens,
        release=gaps[0].opens,
        back=gaps[0].closes,
        segment=-1,
    )
    made = dataclasses.replace(keep_everything(costs), state=(moved,))
    with pytest.raises(UsageError, match=r"moves the model's state.*--manages activations"):
        simulate_ranks(trace, costs, made, SLOW, Parallelism(kind=Parallel.DATA, ranks=2))


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("ranks") / "trace.json"
    trace = make_blocks(8)
    files.save(trace, path)
    files.save(make_costs(trace, op_seconds=1e-3), path.with_name("costs.json"))
    return path


def call(trace_file: pathlib.Path, *arguments: object) -> Result:
    """The command, with costs from a file, so that nothing of torch is needed."""
    hardware = ("--hardware", "h100", "--costs", trace_file.with_name("costs.json"))
    return CliRunner().invoke(make_app(), ["simulate", *map(str, (trace_file, *arguments, *hardware))])


def test_the_command(trace_file: pathlib.Path) -> None:
    shown = call(trace_file, "--ranks", 1024, "--network", "dgx-h100")
    assert shown.exit_code == 0, shown.output
    assert "1024 ranks, data" in shown.stdout and "efficiency" in shown.stdout and "all-reduce" in shown.stdout
    pipeline = call(trace_file, "--ranks", 64, "--network", "dgx-h100", "--stages", 8, "--micro-batches", 32)
    assert pipeline.exit_code == 0 and "64 ranks, pipelined" in pipeline.stdout and "h.7" in pipeline.stdout
    table = call(trace_file, "--ranks", "1,8,64", "--network", "dgx-h100", "--parallel", "sharded")
    assert [line.split()[0] for line in table.stdout.splitlines()[1:]] == ["ranks", "1", "8", "64"]
    for each in (shown, pipeline, table):
        assert max(len(line.rstrip()) for line in each.stdout.splitlines()) <= 80


def test_a_plan_that_replays_weights(tmp_path: pathlib.Path) -> None:
    trace = make_blocks(6, weight_bytes=4 * KIB, nbytes=MIB)
    costs = make_costs(trace, op_seconds=1e-6, link=make_link(per_second=1e6))
    made = plan(trace, costs, simulate(trace, costs, keep_everything(costs)).peak_bytes * 2 // 3)
    for name, value in (("trace", trace), ("costs", costs), ("plan", made)):
        files.save(value, tmp_path / f"{name}.json")
    job = (tmp_path / "trace.json", tmp_path / "plan.json", "--ranks", 8, "--network", "dgx-h100")
    sharded, data = call(*job, "--parallel", "sharded"), call(*job)
    assert sharded.exit_code == data.exit_code == 0
    assert "this plan replays ops that read weights" in sharded.stderr
    assert "replays" not in data.stderr


@pytest.mark.parametrize("reshards", [True, False])
def test_replays_of_shards_read_weights_while_a_block_has_its_turn(reshards: bool) -> None:
    trace = make_blocks(6, weight_bytes=4 * KIB, nbytes=MIB)
    gathered = gather_in_turns(trace, reshard_after_forward=reshards)
    costs = make_costs(gathered, op_seconds=1e-6, link=make_link(per_second=1e6))
    made = plan(gathered, costs, simulate(gathered, costs, keep_everything(costs)).peak_bytes * 2 // 3)
    weights = {home.id for home in trace.storages if home.role is Role.PARAMETER}
    assert not replays_freed_weights(trace, made, reshard_after_forward=reshards)
    reading = [segment for segment in made.segments if weights & set(segment.leaves)]
    assert reading or reshards  # each block is an op that needs what the one before made
    anywhere = plan(trace, make_costs(trace, op_seconds=1e-6, link=make_link(per_second=1e6)), made.budget_bytes)
    assert replays_freed_weights(trace, anywhere, reshard_after_forward=True)


def test_its_document(trace_file: pathlib.Path) -> None:
    given = (
        "--ranks",
        "8,16",
        "--network",
        "dgx-a100",
        "--parallel",
        "sharded",
        "--no-reshard",
        "--shard-dtype",
        "float32",
    )
    result = call(trace_file, *given, "--algorithm", "ring", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["network"]["name"] == "dgx-a100" and found["device_bytes"] > 1 << 30
    assert [job["forecast"]["ranks"] for job in found["jobs"]] == [8, 16]
    chosen = found["jobs"][0]["parallelism"]
    assert (chosen["kind"], chosen["reshard_after_forward"], chosen["shard_dtype"], chosen["algorithm"]) == (
        "sharded", False, "float32", "ring"
    )  # fmt: skip
    assert found["jobs"][0]["efficiency"] > 0 and found["jobs"][0]["forecast"]["peak_bytes"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "8"], "--ranks needs --network: bigbasin-p100"),
        (["--ranks", "8", "--network", "dgx"], "no network is called 'dgx'; there are: bigbasin-p100"),
        (["--ranks", "8", "--network", "missing.json"], "missing.json"),
        (["--network", "dgx-h100", "--bucket", "1MiB"], "--bucket, --network belongs to --ranks"),
        (["--ranks", "eight", "--network", "dgx-h100"], "'eight' is not a number of ranks"),
        (["--ranks", "0", "--network", "dgx-h100"], "'0' is not a number of ranks"),
        (["--ranks", "12", "--network", "dgx-h100"], "12 ranks does not fill units of 8 ranks"),
        (["--ranks", "8", "--network", "dgx-h100", "--no-reshard"], "--reshard belongs to --parallel sharded"),
        (["--ranks", "8", "--network", "dgx-h100", "--stages", "2"], "needs --stages and --micro-batches"),
        (["--ranks", "8", "--network", "dgx-h100", "--bucket", "much"], "--bucket: 'much' is not an amount"),
        (["--ranks", "8", "--network", "dgx-h100", "--policy", "lru"], "--policy: a step of several ranks"),
        (["--ranks", "8", "--network", "dgx-h100", "--allocator", "caching"], "--allocator: a step of several ranks"),
        ([], "or --ranks with --network"),
    ],
)  # fmt: skip
def test_misuse(trace_file: pathlib.Path, options: list[str], message: str) -> None:
    result = call(trace_file, *options)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in " ".join(result.stderr.split()), result.stderr

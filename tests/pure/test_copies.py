"""Copies below the device: when they are there, and where they lie. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.errors import TraceError
from elbowroom.ir.buffers import Buffer, Layout, check_layout
from elbowroom.ir.costs import Costs
from elbowroom.ir.placement import CopySlot, Placement
from elbowroom.ir.plan import Choice, Plan
from elbowroom.ir.trace import Trace
from elbowroom.layout.caching import CachingAllocator
from elbowroom.layout.copies import lay_out_copies, make_buffer
from elbowroom.layout.free_list import ALIGNMENT_BYTES
from elbowroom.layout.requests import serve
from elbowroom.planner.problem import plan
from elbowroom.simulator.allocator_model import Allocator
from elbowroom.simulator.host_overflow import find_overflow
from elbowroom.simulator.planned import PreparedTrace
from elbowroom.simulator.simulate import simulate
from tests.generators import KIB, Program, example, jobs, keep_everything, make_costs

pytestmark = pytest.mark.usefixtures("small_hosts")

STRATEGIES = ("offload_all", "tvdnn_heuristic", "vdnn", "autoswap", "capuchin", "recompute_all")
MOST_OVER = 1.02


def find_lifetimes(trace: Trace, made: Plan) -> set[tuple[int, int, int]]:
    """Storage, begin and end of every copy, read off the decisions: from the first of a claim to the claim's end."""
    events = sorted([save.tick for save in trace.saves] + [need.tick for need in trace.needs])
    claims, gaps = trace.claims, trace.gaps
    begins: dict[tuple[int, int], int] = {}
    for decision in made.decisions:
        if decision.choice is Choice.OFFLOAD:
            storage, opens = decision.storage, gaps[decision.storage][decision.gap].opens
            end = next(end for begin, end in claims[storage] if begin <= opens < end)
            at = next(tick for tick in events if tick >= decision.leave)
            begins[storage, end] = min(at, begins.get((storage, end), at))
    return {(storage, begin, end) for (storage, end), begin in begins.items()}


def judge(placement: Placement, end: int) -> None:
    for is_on_disk, arena in ((False, placement.lower_bytes), (True, placement.disk_bytes)):
        copy_slots = [copy_slot for copy_slot in placement.copy_slots if copy_slot.is_on_disk is is_on_disk]
        buffers = [make_buffer(index, copy_slot, end) for index, copy_slot in enumerate(copy_slots)]
        offsets = tuple(copy_slot.offset for copy_slot in copy_slots)
        check_layout(buffers, Layout(offsets=offsets, arena_bytes=arena, bound_bytes=0, is_optimal=False))
        assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets)


def count(placement: Placement, tick: int, alignment_bytes: int, *, on_disk: bool) -> int:
    """Bytes of copies in a tier during a tick, each rounded up."""
    there = [each for each in placement.copy_slots if each.is_on_disk is on_disk and each.begin <= tick < each.end]
    return sum(-(-each.nbytes // alignment_bytes) * alignment_bytes for each in there)


@given(job=jobs(disk=True), strategy=some.sampled_from(STRATEGIES), share=some.none() | some.floats(0.0, 1.0))
def test_copies_are_there_for_as_long_as_the_simulator_counts_them(
    job: tuple[Trace, Costs], strategy: str, share: float | None
) -> None:
    trace, costs = job
    made = plan(trace, costs, 10**9, strategy=strategy, min_offload_bytes=1)
    most = simulate(trace, costs, made).lower_tier_bytes
    host_bytes = None if share is None else int(most * share)
    replay = PreparedTrace(trace, costs, host_bytes=host_bytes)
    placement, forecast = replay.place(made), replay.run(made)
    assert {(each.storage, each.begin, each.end) for each in placement.copy_slots} == find_lifetimes(trace, made)
    assert all(each.nbytes == trace.storages[each.storage].nbytes for each in placement.copy_slots)
    overflow = find_overflow(costs, host_bytes)
    held = {True: [0], False: [0]}
    for tick in range(trace.end):
        for on_disk, figures in held.items():
            figures.append(count(placement, tick, costs.alignment_bytes, on_disk=on_disk))
        if overflow is not None:
            assert held[False][-1] <= overflow.host_room_bytes
    assert (max(held[False]), max(held[True])) == (forecast.lower_tier_bytes, forecast.disk_bytes)
    judge(placement, trace.end)
    told = replay.run(made, placement=placement)
    assert (told.lower_arena_bytes, told.disk_arena_bytes) == (placement.lower_bytes, placement.disk_bytes)
    assert dataclasses.replace(told, lower_arena_bytes=0, disk_arena_bytes=0) == forecast


copy_slots = some.lists(
    some.builds(
        lambda begin, length, nbytes, on_disk: CopySlot(
            storage=0, begin=begin, end=begin + length, nbytes=nbytes, is_on_disk=on_disk
        ),
        some.integers(0, 20), some.integers(1, 20), some.integers(0, 5 * KIB), some.booleans(),
    ),
    max_size=12,
).map(lambda found: [dataclasses.replace(each, storage=index) for index, each in enumerate(found)])  # fmt: skip


@given(copy_slots=copy_slots)
def test_copies_with_any_lifetimes_do_not_lie_upon_each_other(copy_slots: list[CopySlot]) -> None:
    placement = lay_out_copies(copy_slots, 25)
    judge(placement, 25)
    there = [dataclasses.replace(copy_slot, offset=0) for copy_slot in placement.copy_slots]
    assert sorted(there, key=lambda each: each.storage) == [each for each in copy_slots if each.nbytes]


def test_what_outlives_the_step_has_its_place_to_itself() -> None:
    early = CopySlot(storage=0, begin=2, end=5, nbytes=1000)
    late = CopySlot(storage=1, begin=6, end=9, nbytes=1000)
    assert lay_out_copies([early, late], 10).lower_bytes == 1000
    beyond = lay_out_copies([early, dataclasses.replace(late, end=10)], 10)
    assert beyond.lower_bytes == 1024 + 1000
    assert {copy_slot.offset for copy_slot in beyond.copy_slots} == {0, 1024}


def test_each_claim_of_a_storage_finds_its_own_berth() -> None:
    copy_slots = [
        CopySlot(storage=storage, begin=begin, end=end, nbytes=600)
        for storage, begin, end in ((3, 2, 8), (3, 12, 20), (5, 4, 9))
    ]
    placement = lay_out_copies(copy_slots, 100)
    for tick in range(25):
        expected = next((each for each in copy_slots if each.storage == 3 and tick < each.end), None)
        found = placement.find(3, tick)
        assert (found and (found.begin, found.end)) == (expected and (expected.begin, expected.end))
        assert placement.find(4, tick) is None
        assert (placement.find(5, tick) is None) == (tick >= 9)
    assert Placement().find(0, 0) is None


def test_a_plan_of_another_trace_is_refused() -> None:
    trace, costs = example()
    other = dataclasses.replace(keep_everything(costs), trace_digest="0" * 64)
    for refused in (PreparedTrace(trace, costs).place, PreparedTrace(trace, costs).list_blocks):
        with pytest.raises(TraceError, match="000000000000"):
            refused(other)


def make_passes(sizes: tuple[int, ...]) -> Trace:
    """One forward pass begins before the backward pass of the one before it is over; each has other sizes."""
    program = Program()
    before: list[tuple[int, int]] = []
    for size in sizes:
        saves = []
        for layer in range(6):
            made = program.op(f"layer{layer}", [], size * (layer + 2) * 700)
            saves.append((program.save(made), made))
            program.release(storage=made)
            if before:
                back(program, before.pop())
        before = saves
    while before:
        back(program, before.pop())
    program.op("end", [], 8)
    return program.finish("passes")


def back(program: Program, saved: tuple[int, int]) -> None:
    need = program.need(saved[0])
    program.op("back", [saved[1]], 8)
    program.release(need=need, save=saved[0])


@pytest.mark.parametrize("sizes", [(3, 5, 4), (9, 2, 7, 3), (2, 3, 5, 8, 13), (13, 8, 5, 3, 2)])
def test_passes_of_several_sizes_take_little_more_than_what_is_there_at_once(sizes: tuple[int, ...]) -> None:
    trace = make_passes(sizes)
    costs = make_costs(trace)
    made = plan(trace, costs, 10**9, strategy="offload_all", min_offload_bytes=1)
    placement = PreparedTrace(trace, costs).place(made)
    most = max(count(placement, tick, 1, on_disk=False) for tick in range(trace.end))
    assert len(placement.copy_slots) == 6 * len(sizes)
    assert most <= placement.lower_bytes <= MOST_OVER * most


def count_there(buffers: Sequence[Buffer], time: int) -> int:
    return sum(buffer.nbytes for buffer in buffers if buffer.lower <= time < buffer.upper)


# -- the device -------------------------------------------------------------------------------------------------------


@given(job=jobs(), strategy=some.sampled_from(STRATEGIES))
def test_what_is_laid_out_is_what_the_caching_allocator_is_asked_for(job: tuple[Trace, Costs], strategy: str) -> None:
    trace, costs = job
    made = plan(trace, costs, 10**9, strategy=strategy, min_offload_bytes=1)
    replay = PreparedTrace(trace, costs)
    forecast = replay.run(made, allocator=Allocator.CACHING)
    assert serve(replay.list_blocks(made), CachingAllocator()) == forecast.reserved_bytes
    assert forecast.arena_bytes == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_device_takes_little_more_than_what_is_there_at_once(strategy: str) -> None:
    trace, costs = example()
    made = plan(trace, costs, 10**9, strategy=strategy, min_offload_bytes=1)
    forecast = simulate(trace, costs, made, allocator="planned")
    blocks = PreparedTrace(trace, costs).list_blocks(made)
    most = max(count_there(blocks, time) for time in range(2 * len(blocks)))
    assert most <= forecast.arena_bytes <= min(MOST_OVER * most, forecast.reserved_bytes)

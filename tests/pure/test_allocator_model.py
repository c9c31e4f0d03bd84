"""A caching allocator by hand and by property, and plans placed by it. No torch."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.errors import TierFull, UnknownMember, UsageError
from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Choice, Decision, Plan, Segment
from elbowroom.ir.trace import Role, Trace
from elbowroom.layout.caching import CachingAllocator
from elbowroom.planner.problem import plan
from elbowroom.simulator.allocator_model import Stay, reserve
from elbowroom.simulator.simulate import simulate
from tests.generators import Program, example, jobs, keep_everything, make_costs

KIB, MIB = 1 << 10, 1 << 20


def figures(allocator: CachingAllocator) -> tuple[int, int]:
    return allocator.reserved_bytes, allocator.allocated_bytes


def test_small_blocks_share_segments_of_two_mebibytes() -> None:
    allocator = CachingAllocator()
    assert [allocator.take(nbytes) for nbytes in (1, 512, 513)] == [0, 512, 1024]
    assert figures(allocator) == (2 * MIB, 512 + 512 + 1024)
    assert allocator.take(1 * MIB) == 2048
    assert allocator.take(1 * MIB) == 2 * MIB  # there is less than that left
    assert figures(allocator) == (4 * MIB, 2048 + 2 * MIB)


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (64 * MIB, 64 * MIB),
        ((1 << 50) + 1, (1 << 50) + 2 * MIB),
    ],
)
def test_how_much_is_taken_for_the_first_block(nbytes: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.take(nbytes)
    assert allocator.reserved_bytes == segment


def test_what_is_left_of_a_large_block_is_cut_off_only_above_a_mebibyte() -> None:
    allocator = CachingAllocator()
    allocator.give(allocator.take(12 * MIB))
    assert figures(allocator) == (12 * MIB, 0)
    block = allocator.take(11 * MIB)  # exactly one is left: not more
    assert figures(allocator) == (12 * MIB, 12 * MIB)
    allocator.give(block)
    assert allocator.take(11 * MIB - 512) == block
    assert figures(allocator) == (12 * MIB, 11 * MIB - 512)
    assert [nbytes for _, nbytes, is_free in allocator.list_blocks() if is_free] == [MIB + 512]


def test_the_smallest_block_that_is_large_enough_is_taken_and_of_those_the_lowest() -> None:
    allocator = CachingAllocator()
    sizes = (16 * MIB, 12 * MIB, 14 * MIB, 12 * MIB)
    blocks = [allocator.take(nbytes) for nbytes in sizes]
    for block in blocks:
        allocator.give(block)
    assert allocator.take(12 * MIB) == blocks[1]
    assert allocator.take(12 * MIB) == blocks[3]
    assert allocator.take(12 * MIB) == blocks[2]
    assert allocator.take(12 * MIB) == blocks[0]
    assert allocator.reserved_bytes == sum(sizes)


def test_free_neighbours_are_one_and_segments_are_not_joined() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.take(5 * MIB) for _ in range(4)]  # one segment of twenty
    assert (blocks, allocator.reserved_bytes) == ([0, 5 * MIB, 10 * MIB, 15 * MIB], 20 * MIB)
    for index in (0, 2):
        allocator.give(blocks[index])
    assert allocator.take(6 * MIB) == 20 * MIB  # ten are free, in two pieces
    assert allocator.reserved_bytes == 40 * MIB
    allocator.give(blocks[1])  # between the two
    assert allocator.take(15 * MIB - 512) == 0
    allocator.give(blocks[3])
    assert allocator.take(16 * MIB) == 40 * MIB  # fourteen here and five there are no sixteen


def test_small_and_large_do_not_help_each_other() -> None:
    allocator = CachingAllocator()
    allocator.give(allocator.take(20 * MIB))
    allocator.take(512)
    assert allocator.reserved_bytes == 22 * MIB


def test_nothing_is_given_back_until_it_is_needed() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    blocks = [allocator.take(nbytes) for nbytes in (20 * MIB, 5 * MIB)]
    for block in blocks:
        allocator.give(block)
    kept = allocator.take(2 * MIB)  # cut from the segment of the five, which stays for it
    assert allocator.reserved_bytes == 40 * MIB
    with pytest.raises(TierFull, match="in pieces that are too small") as caught:
        allocator.take(21 * MIB)  # 22 and not 20, for which the other segment goes
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (22 * MIB, 20 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.give(kept)
    assert allocator.take(40 * MIB) == 40 * MIB
    assert allocator.reserved_bytes == 40 * MIB


def test_what_was_not_handed_out_is_not_taken_back() -> None:
    allocator = CachingAllocator()
    block = allocator.take(512)
    for wrong in (1, 512, -1):
        with pytest.raises(UsageError, match="no block begins"):
            allocator.give(wrong)
    allocator.give(block)
    with pytest.raises(UsageError, match="no block begins"):
        allocator.give(block)
    for wrong in (0, -1):
        with pytest.raises(UsageError, match="no block has"):
            allocator.take(wrong)


sizes = some.one_of(some.integers(1, 3 * KIB), some.integers(1, 3 * MIB), some.integers(1, 40 * MIB))


@given(steps=some.lists(some.tuples(some.booleans(), sizes, some.integers(0, 10**6)), max_size=80))
def test_blocks_never_overlap_and_nothing_is_lost(steps: list[tuple[bool, int, int]]) -> None:
    allocator = CachingAllocator()
    held: dict[int, int] = {}
    small: set[int] = set()  # where blocks of the small segments may begin
    for takes, nbytes, draw in steps:
        before = allocator.reserved_bytes
        free: dict[bool, list[int]] = {True: [], False: []}
        for address, size, is_free in allocator.list_blocks():
            if is_free:
                free[address in small].append(size)
        if takes or not held:
            address = allocator.take(nbytes)
            assert address not in held
            if allocator.reserved_bytes == before + 2 * MIB and nbytes <= MIB:
                small |= set(range(address, address + 2 * MIB, 512))
            held[address] = nbytes
            if allocator.reserved_bytes > before:  # nothing there would have done
                assert all(size < nbytes for size in free[nbytes <= MIB])
        else:
            address = sorted(held)[draw % len(held)]
            del held[address]
            allocator.give(address)
            assert allocator.reserved_bytes == before
        blocks = allocator.list_blocks()
        assert sum(size for _, size, _ in blocks) == allocator.reserved_bytes >= allocator.allocated_bytes
        assert (
            sum(size for _, size, is_free in blocks if not is_free) == allocator.allocated_bytes >= sum(held.values())
        )
        assert {address for address, _, is_free in blocks if not is_free} == held.keys()
        for (address, size, is_free), (following, _, is_next_free) in itertools.pairwise(blocks):
            assert address + size <= following and size % 512 == 0
            # Free neighbours are left apart only by the border of two segments.
            assert not (is_free and is_next_free and address + size == following) or following % (2 * MIB) == 0
        for address, wanted in held.items():
            size = next(size for begin, size, _ in blocks if begin == address)
            assert wanted <= size <= wanted + MIB + 512
    for address in held:
        allocator.give(address)
    assert allocator.release() > 0 or not steps
    assert (allocator.reserved_bytes, allocator.allocated_bytes, allocator.list_blocks()) == (0, 0, [])


# -- plans ------------------------------------------------------------------------------------------------------------


@given(job=jobs(), strategy=some.sampled_from(["keep_all", "offload_all", "recompute_all", "tvdnn_heuristic"]))
def test_a_plan_takes_at_least_its_peak(job: tuple[Trace, Costs], strategy: str) -> None:
    trace, costs = job
    made = plan(trace, costs, 10**9, strategy=strategy, min_offload_bytes=1)
    exact, found = (simulate(trace, costs, made, allocator=allocator) for allocator in ("exact", "caching"))
    assert (exact.reserved_bytes, exact.fragmented_bytes) == (0, 0)
    assert dataclasses.replace(found, reserved_bytes=0, fragmented_bytes=0) == exact
    assert found.reserved_bytes > found.fragmented_bytes >= 0
    if len({decision.segment for decision in made.decisions} - {-1}) <= 1:  # two replays at once count as one on top
        assert found.reserved_bytes >= found.peak_bytes
    assert found.reserved_bytes % (2 * MIB) == 0


def test_a_step_by_hand() -> None:
    """6 MiB, 6 MiB and 8 MiB fill a segment of 20; with the two sixes gone, 13 do not fit between."""
    stays = [(0, 0, 3), (1, 0, 9), (2, 0, 3), (3, 3, 9)]
    program = Program()
    for nbytes in (6, 8, 6, 9):
        program.resident(nbytes * MIB, Role.PARAMETER)
    for _ in range(9):
        program.op("work", [], 1)
    trace = program.finish("by hand")
    costs = make_costs(trace)
    found = reserve(trace, costs, [Stay(storage=s, begin=b, end=e) for s, b, e in stays], [])
    assert (found.reserved_bytes, found.fragmented_bytes, found.allocated_bytes) == (40 * MIB, 20 * MIB, 20 * MIB)
    with pytest.raises(TierFull, match="the device"):
        reserve(trace, costs, [Stay(storage=s, begin=b, end=e) for s, b, e in stays], [], 39 * MIB)


def test_replays_allocate_op_by_op() -> None:
    """Of a row of 30 MiB results, one and the one before it are there at once."""
    program = Program()
    results = [program.op("link0", [], 30 * MIB)]
    for index in range(1, 5):
        results.append(program.op(f"link{index}", [results[-1]], 30 * MIB))
        program.release(storage=results[-2])
    save = program.save(results[-1])
    program.release(storage=results[-1])
    program.op("work", [], 1)
    program.need(save)
    trace = program.finish("a row")
    costs = make_costs(trace, alignment_bytes=512)
    decision = Decision(storage=4, gap=0, choice=Choice.RECOMPUTE, leave=5, release=5, back=7, segment=0)
    segment = Segment(ops=tuple(range(5)), outputs=(4,), leaves=())
    made = Plan(
        trace_digest=costs.trace_digest, strategy="", budget_bytes=0, decisions=(decision,), segments=(segment,)
    )
    found = simulate(trace, costs, made, allocator="caching")
    assert (found.reserved_bytes, found.fragmented_bytes) == (62 * MIB, 2 * MIB - 512)


def test_unknown_allocators_are_refused_with_the_known_ones() -> None:
    trace, costs = example()
    with pytest.raises(UnknownMember, match="exact, caching"):
        simulate(trace, costs, keep_everything(costs), allocator="buddy")

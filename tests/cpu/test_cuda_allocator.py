"""The arena's library through its C interface, on host memory and on a CUDA runtime without a device."""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.cuda_allocator.build import build_library
from elbowroom.cuda_allocator.learning import OUTLIVES, UNKNOWN, RequestPlanner, make_plan, merge
from elbowroom.cuda_allocator.library import EVENT, STEP_BEGINS, STEP_ENDS, Memory
from elbowroom.errors import UsageError
from elbowroom.native.library import load as load_native
from tests.native import compile_shared, need_compiler

MIB = 1 << 20


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    need_compiler()
    return build_library(tmp_path_factory.mktemp("arena"))


@pytest.fixture
def memory(library: pathlib.Path) -> Iterator[Memory]:
    made = Memory(library)
    yield made
    assert made.check() == 0
    assert made.close() == 0


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = ctypes.CDLL(str(compile_shared(tmp_path_factory.mktemp("runtime") / "libcudart.so", "fake_cudart.c")))
    found.fake_set_capacity.argtypes = [ctypes.c_int64]
    found.fake_hold.argtypes = found.fake_let_pass.argtypes = found.fake_owner.argtypes = [ctypes.c_void_p]
    found.fake_taken.restype = found.fake_events.restype = found.fake_settled.restype = ctypes.c_int64
    return found


@pytest.fixture
def cuda(library: pathlib.Path, runtime: ctypes.CDLL) -> Iterator[Memory]:
    made = Memory(library, runtime=runtime._name)
    yield made
    assert made.check() == 0
    assert made.close() == 0
    assert (runtime.fake_taken(), runtime.fake_events(), runtime.fake_last_error()) == (0, 0, 0)
    runtime.fake_set_capacity(1 << 50)


# A program whose steps repeat -----------------------------------------------------------------------------------------


class Program:
    """Steps whose blocks are known by name, each filled with its own bytes and looked at when it is given back."""

    def __init__(self, memory: Memory, stream: int = 0) -> None:
        self.memory, self.stream = memory, stream
        self.there: dict[str, tuple[int, int, int]] = {}
        self.learner = RequestPlanner(memory.list_blocks)
        self._mark = 0
        memory.record(0, True)

    def take(self, name: str, nbytes: int, stream: int | None = None) -> int:
        address = self.memory.take(nbytes, 0, self.stream if stream is None else stream)
        assert address is not None and address % 512 == 0
        self._mark = self._mark % 255 + 1
        for begin, size, _ in self.there.values():
            assert address + nbytes <= begin or begin + size <= address
        ctypes.memset(address, self._mark, nbytes)
        self.there[name] = address, nbytes, self._mark
        return address

    def give(self, name: str) -> None:
        address, nbytes, mark = self.there.pop(name)
        assert ctypes.string_at(address, nbytes) == bytes([mark]) * nbytes, f"something was written into {name}"
        assert self.memory.give(address)

    def learn(self) -> int:
        plans = self.learner.read(self.memory.drain())
        for plan in plans:
            assert self.memory.plan(0, plan.stream, plan.sizes, plan.offsets, plan.arena_bytes)
        return len(plans)

    def run(self, step: Callable[[Program], None], times: int = 1) -> None:
        for _ in range(times):
            assert self.memory.begin_step()
            step(self)
            assert self.memory.end_step()
            self.learn()

    def clear(self) -> None:
        for name in list(self.there):
            self.give(name)


def train(program: Program) -> None:
    """Activations that live from forward to backward, gradients that live until the next step begins."""
    for name in [name for name in program.there if name.startswith("gradient")]:
        program.give(name)
    for layer in range(12):
        program.take(f"activation {layer}", 3000 * (layer % 5 + 1))
    for layer in reversed(range(12)):
        program.take("temporary", 9000)
        program.take(f"gradient {layer}", 2000 + 512 * layer)
        program.give("temporary")
        program.give(f"activation {layer}")


def hits(memory: Memory, run: Callable[[], None]) -> tuple[int, int]:
    """Requests at planned addresses, and others of steps, during a run."""
    before = memory.count()
    run()
    now = memory.count()
    others = sum(getattr(now, each) - getattr(before, each) for each in ("missed", "blocked", "apart", "unplanned"))
    return now.hits - before.hits, others


def test_a_step_that_repeats_is_served_as_planned(memory: Memory) -> None:
    program = Program(memory)
    assert hits(memory, lambda: program.run(train, 2)) == (0, 72)
    assert hits(memory, lambda: program.run(train, 5)) == (180, 0)
    counts = memory.count()
    assert counts.arena_bytes == counts.reserved_bytes  # segments of the steps before went back
    assert counts.allocated_bytes == sum(-(-size // 512) * 512 for _, size, _ in program.there.values())
    plan = next(iter(RequestPlanner(memory.list_blocks).read(record(memory, program))), None)
    assert plan is not None and plan.arena_bytes == counts.arena_bytes == plan.bound_bytes
    program.clear()


def record(memory: Memory, program: Program) -> Any:
    """Two steps as they are recorded."""
    memory.record(0, True)
    for _ in range(2):
        memory.begin_step()
        train(program)
        memory.end_step()
    return memory.drain()


def test_a_step_that_deviates_finds_its_way_back(memory: Memory) -> None:
    program = Program(memory)
    program.run(train, 3)

    def deviate(program: Program) -> None:
        for name in [name for name in program.there if name.startswith("gradient")]:
            program.give(name)
        for layer in range(12):
            if layer == 4:
                program.take("added", 7 * 512)
            if layer != 7:
                program.take(f"activation {layer}", 3000 * (layer % 5 + 1))
        program.give("added")
        for layer in reversed(range(12)):
            program.take("temporary", 9000)
            program.take(f"gradient {layer}", 2000 + 512 * layer)
            program.give("temporary")
            if layer != 7:
                program.give(f"activation {layer}")

    served, others = hits(memory, lambda: program.run(deviate))
    assert served + others == 36
    assert others <= 3  # what was added, and what came after the one that was left out
    assert hits(memory, lambda: program.run(train)) == (36, 0)
    program.clear()


def test_kinds_of_steps_are_told_apart_by_what_they_ask_for(memory: Memory) -> None:
    kinds = ([1024, 2048, 512, 4096], [1024, 2048, 8192], [512, 512])
    for sizes in kinds:
        offsets = [sum(sizes[:place]) for place in range(len(sizes))]
        assert memory.plan(0, 0, sizes, offsets, sum(sizes))

    def run(sizes: list[int]) -> None:
        assert memory.begin_step()
        for block in [memory.take(size) for size in sizes]:
            assert memory.give(block or 0)
        assert memory.end_step()

    for sizes in (*kinds, *reversed(kinds), *kinds, kinds[1], kinds[0], kinds[1]):
        assert hits(memory, lambda sizes=sizes: run(sizes)) == (len(sizes), 0)  # type: ignore[misc]
    assert hits(memory, lambda: run([1024, 2048, 1024, 512, 4096])) == (4, 1)
    assert memory.count().blocked == 0


def test_what_stays_shares_its_segments_with_what_they_have_room_for(memory: Memory) -> None:
    """Free memory between blocks that stay is there whatever a plan says: what the pool put there is left to it."""
    between = [memory.take(MIB) for _ in range(2)]
    assert memory.give(between[0] or 0)

    def ask(program: Program) -> None:
        for name, nbytes in (("fits", MIB), ("large", 9 * MIB), ("larger", 12 * MIB)):
            program.take(name, nbytes)
        for name in ("fits", "large", "larger"):
            program.give(name)

    program = Program(memory)
    program.run(ask, 3)
    before = memory.count()
    program.run(ask)
    now = memory.count()
    assert (now.hits - before.hits, now.apart - before.apart) == (2, 1)
    assert now.reserved_bytes == 2 * MIB + 21 * MIB
    assert memory.give(between[1] or 0)


def test_blocks_that_are_there_are_listed(memory: Memory) -> None:
    blocks = [memory.take(512 * (index % 3 + 1)) or 0 for index in range(20_000)]
    memory.give(blocks.pop())
    listed = memory.list_blocks()
    assert len(listed) == len(blocks) and listed["nbytes"].sum() == memory.count().allocated_bytes
    assert set(listed["segment"].tolist()) <= {block // 4096 * 4096 for block in blocks}
    for block in blocks:
        memory.give(block)


def test_a_block_that_stays_longer_than_learnt_keeps_its_place(memory: Memory) -> None:
    program = Program(memory)
    program.run(train, 3)
    for name in list(program.there):
        program.there[f"kept {name}"] = program.there.pop(name)  # nobody gives these back
    program.run(train, 2)
    assert memory.count().blocked > 0
    for name in [name for name in program.there if name.startswith("kept")]:
        program.give(name)
    before = memory.count().blocked
    program.run(train)
    assert memory.count().blocked == before
    program.clear()


def test_a_larger_plan_waits_until_the_arena_is_empty(memory: Memory) -> None:
    program = Program(memory)
    program.run(train, 4)
    small = memory.count().arena_bytes

    def train_more(program: Program) -> None:
        train(program)
        program.take("more", 3 * MIB)
        program.give("more")

    program.run(train_more, 2)
    assert memory.count().arena_bytes == small  # gradients are in it whenever a step begins
    program.run(train_more, 2)
    assert memory.count().arena_bytes > small  # one step did without a plan, so that they were elsewhere
    assert hits(memory, lambda: program.run(train_more)) == (37, 0)
    assert hits(memory, lambda: program.run(train)) == (36, 0)  # in the same arena
    program.clear()


def test_an_arena_that_never_becomes_empty_is_used_as_it_is(memory: Memory) -> None:
    program = Program(memory)
    program.run(train, 3)
    program.there["kept"] = program.there.pop("gradient 3")
    assert memory.plan(0, 0, [512], [1 << 30], (1 << 30) + 512)
    program.run(train, 2)
    assert memory.count().unplanned == 2 * 36 + 2 * 36  # two steps were waited for
    before = memory.count()
    program.run(train)
    now = memory.count()
    assert now.hits + now.apart == before.hits + before.apart + 36
    assert now.unplanned == before.unplanned
    program.clear()


def test_a_step_that_ends_in_an_exception_is_over(memory: Memory) -> None:
    program = Program(memory)
    program.run(train, 3)
    assert memory.begin_step()
    for layer in range(5):
        program.take(f"activation {layer}", 3000 * (layer % 5 + 1))
    assert not memory.begin_step()
    assert memory.end_step()
    assert not memory.end_step()
    assert program.learn() == 0
    program.clear()
    assert hits(memory, lambda: program.run(train)) == (36, 0)
    program.clear()


# Requests that nobody has planned -------------------------------------------------------------------------------------


def test_sizes_that_mean_nothing(memory: Memory) -> None:
    assert memory.take(0) is None and memory.take(-1) is None
    assert memory.count().failed == 0
    assert memory.take((1 << 61) + 1) is None and memory.take((1 << 63) - 1) is None
    assert memory.count().failed == 2
    assert memory.take(512, device=64) is None and memory.take(512, device=-1) is None
    assert not memory.begin_step(64) and not memory.end_step(-1)


def test_addresses_that_nobody_has(memory: Memory) -> None:
    address = memory.take(5000)
    assert address is not None
    assert memory.give(0)
    assert not memory.give(address + 512) and not memory.give(address - 512) and not memory.give(12345)
    assert not memory.use(address + 512, 3)
    assert memory.count().unknown == 3
    assert memory.close() == 1  # nothing happens
    assert memory.give(address)
    assert not memory.give(address)


@pytest.mark.parametrize(
    ("sizes", "offsets", "nbytes"),
    [([], [], 0), ([512], [0], 511), ([512], [1], 1024), ([100], [0], 512), ([0], [0], 512), ([512, 512], [0], 1024),
     ([512], [(1 << 63) - 512], 512), ([512], [0], -1), ([1 << 62], [0], 1 << 62)],
)  # fmt: skip
def test_plans_that_mean_nothing_are_refused(memory: Memory, sizes: list[int], offsets: list[int], nbytes: int) -> None:
    assert not memory.plan(0, 0, sizes, offsets, nbytes)


def test_free_neighbours_are_joined_and_empty_segments_go_back(memory: Memory) -> None:
    blocks = [memory.take(5 * MIB) for _ in range(8)]
    assert memory.count().reserved_bytes == 40 * MIB  # two segments of four each
    for block in blocks[1::2] + blocks[::2]:
        assert memory.give(block or 0)
    whole = memory.take(20 * MIB)
    assert whole is not None and memory.count().reserved_bytes == 40 * MIB
    memory.empty(0)
    assert memory.count().reserved_bytes == 20 * MIB
    assert memory.give(whole)
    memory.empty()
    assert memory.count().reserved_bytes == 0 and memory.count().reserved_peak_bytes == 40 * MIB
    memory.reset_peaks()
    assert memory.count().reserved_peak_bytes == 0


def test_what_stays_keeps_few_segments(memory: Memory) -> None:
    """Optimizer state is made when the activations of the first step have gone."""
    activations = [memory.take(4 * MIB) for _ in range(50)]
    for block in activations:
        assert memory.give(block or 0)
    assert memory.count().reserved_bytes == 200 * MIB
    state = [memory.take(2 * MIB) for _ in range(20)]
    memory.empty()
    assert memory.count().reserved_bytes == 40 * MIB
    for block in state:
        assert memory.give(block or 0)


def test_memory_never_changes_streams(memory: Memory) -> None:
    mine = [memory.take(3000, stream=1) for _ in range(100)]
    for block in mine:
        assert memory.give(block or 0)
    others = [memory.take(3000, stream=2) for _ in range(100)]
    assert not set(mine) & set(others)
    again = [memory.take(3000, stream=1) for _ in range(100)]
    assert set(again) == set(mine)
    for block in others + again:
        assert memory.give(block or 0)


# A device that is full ------------------------------------------------------------------------------------------------


def test_a_full_device_gives_nothing_and_stays_whole(library: pathlib.Path) -> None:
    memory = Memory(library, capacity_bytes=64 * MIB)
    blocks = [memory.take(15 * MIB) for _ in range(4)]
    assert None not in blocks
    assert memory.take(15 * MIB) is None
    assert memory.count().failed == 1 and memory.check() == 0
    for block in blocks:
        assert memory.give(block or 0)
    large = memory.take(60 * MIB)  # the free segments are too small, so they go back first
    assert large is not None and memory.count().retries == 1
    assert memory.give(large)
    assert memory.close() == 0


def test_a_full_device_lends_what_the_arena_does_not_need(library: pathlib.Path) -> None:
    memory = Memory(library, capacity_bytes=64 * MIB)
    sizes, offsets = [2 * MIB, 2 * MIB], [0, 48 * MIB]
    assert memory.plan(0, 0, sizes, offsets, 50 * MIB)
    assert memory.begin_step()
    first = memory.take(2 * MIB)
    between = memory.take(40 * MIB)  # in no plan, and there is no room for it elsewhere
    assert first is not None and between is not None and between - first <= 10 * MIB
    assert memory.take(40 * MIB, stream=7) is None  # of another stream's arena it may have nothing
    second = memory.take(2 * MIB)
    assert second is not None
    for block in (first, between, second):
        assert memory.give(block)
    assert memory.end_step()
    assert memory.check() == 0
    other = memory.take(60 * MIB, stream=7)  # outside of steps an arena without blocks goes back
    assert other is not None and memory.count().arena_bytes == 0
    assert memory.begin_step()  # it is taken again when there is room
    assert memory.count().arena_bytes == 0
    assert memory.end_step()
    assert memory.give(other)
    assert memory.close() == 0


def test_an_arena_for_which_there_is_no_room_is_done_without(library: pathlib.Path) -> None:
    memory = Memory(library, capacity_bytes=64 * MIB)
    assert memory.plan(0, 0, [512], [0], 80 * MIB)
    assert memory.begin_step()
    block = memory.take(512)
    assert block is not None and memory.count().arena_bytes == 0
    assert memory.end_step()
    assert memory.give(block)
    assert memory.close() == 0


# Whatever is asked for, and whatever the plans say --------------------------------------------------------------------

SMALL = st.integers(1, 6).map(lambda units: units * 512)
PLANS = st.lists(st.tuples(SMALL, st.integers(-1, 12)), min_size=1, max_size=12)
REQUESTS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), SMALL, st.integers(0, 1)),
        st.tuples(st.just("give"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("use"), st.integers(0, 30), st.integers(0, 2)),
        st.tuples(st.sampled_from(["begin", "end", "empty", "plan", "record"]), st.integers(0, 2), st.integers(0, 1)),
    ),
    max_size=120,
)


@settings(max_examples=150)
@given(plans=st.lists(PLANS, min_size=1, max_size=3), requests=REQUESTS)
def test_no_block_lies_upon_another(
    library: pathlib.Path, plans: list[list[tuple[int, int]]], requests: list[tuple[str, int, int]]
) -> None:
    memory = Memory(library, capacity_bytes=5 * MIB)
    there: list[tuple[int, int]] = []
    for what, first, second in requests:
        if what == "take":
            address = memory.take(first, 0, second)
            if address is not None:
                assert all(address + first <= begin or begin + size <= address for begin, size in there)
                there.append((address, first))
        elif what == "give" and first < len(there):
            assert memory.give(there.pop(first)[0])
        elif what == "use" and first < len(there):
            assert memory.use(there[first][0], second)
        elif what == "plan":
            plan = plans[first % len(plans)]  # any offsets at all
            sizes, offsets = [size for size, _ in plan], [offset * 512 if offset >= 0 else -1 for _, offset in plan]
            assert memory.plan(0, second, sizes, offsets, 20 * 512)
        elif what == "record":
            memory.record(0, bool(second))
        elif what in ("begin", "end", "empty"):
            {"begin": memory.begin_step, "end": memory.end_step, "empty": memory.empty}[what]()
        assert memory.check() == 0
    counts = memory.count()
    assert counts.allocated_bytes == sum(size for _, size in there)
    for address, _ in there:
        assert memory.give(address)
    assert memory.close() == 0


LINES = st.lists(
    st.tuples(st.sampled_from([600, 3000, 70_000, 2 * MIB, 11 * MIB]), st.integers(1, 40), st.integers(0, 1)),
    min_size=1, max_size=30,
)  # fmt: skip


@settings(max_examples=60)
@given(lines=LINES, weights=st.lists(st.sampled_from([3000, 3 * MIB]), max_size=6))
def test_every_step_that_repeats_is_served_as_planned(
    library: pathlib.Path, lines: list[tuple[int, int, int]], weights: list[int]
) -> None:
    """Each line is a request, for how many requests its block is there (into the next steps, too), and its stream."""
    memory = Memory(library)
    learner = RequestPlanner(memory.list_blocks)
    memory.record(0, True)
    there: list[tuple[int, int]] = [(1 << 60, memory.take(nbytes) or 0) for nbytes in weights]
    for step in range(6):
        before = memory.count()
        memory.begin_step()
        for place, (nbytes, life, stream) in enumerate(lines):
            now = step * len(lines) + place
            for _, address in [each for each in there if each[0] <= now]:
                assert memory.give(address)
            there = [each for each in there if each[0] > now]
            there.append((now + life, memory.take(nbytes, 0, stream) or 0))
        memory.end_step()
        for plan in learner.read(memory.drain()):
            assert memory.plan(0, plan.stream, plan.sizes, plan.offsets, plan.arena_bytes)
        count = memory.count()
        if step >= 4:  # by then, what lives for several steps has shown that it does
            assert (count.missed, count.blocked) == (before.missed, before.blocked)
            assert count.hits + count.apart == before.hits + before.apart + len(lines)
        assert memory.check() == 0
    for _, address in there:
        assert memory.give(address)
    assert memory.close() == 0


# What is learnt -------------------------------------------------------------------------------------------------------


def events(*rows: tuple[int, int, int]) -> Any:
    return np.array([(*row, 0) for row in rows], EVENT)


def make_learner() -> RequestPlanner:
    return RequestPlanner(lambda: events())


BEGIN, END = (STEP_BEGINS, 0, 0), (STEP_ENDS, 0, 0)


def test_blocks_that_wrap_stay_or_cross_are_told_apart() -> None:
    one = [BEGIN, (512, 1, 9), (1024, 2, 9), (0, 1, 9), (512, 3, 9), (2048, 4, 9), END, (0, 3, 9)]
    two = [BEGIN, (512, 5, 9), (0, 2, 9), (1024, 6, 9), (0, 5, 9), (512, 7, 9), (2048, 8, 9), END]
    plan = make_learner().read(events(*one, *two))[0]
    assert plan.stream == 9 and plan.sizes == (512, 1024, 512, 2048)
    # 1: until the third request; 2: until the second of the next step; 3: until the end; 4: it is there for good.
    assert plan.offsets[3] == -1 and plan.arena_bytes == plan.bound_bytes == 1024 + 512
    assert plan.offsets[1] not in (plan.offsets[0], plan.offsets[2])


def test_a_block_that_goes_as_it_comes_again_has_its_place_to_itself() -> None:
    whole = make_plan(0, [512, 512, 512], [1, 2 + 2, 3])  # the second is given back before the second request
    assert whole.arena_bytes == 1024 and whole.offsets[0] == whole.offsets[2] != whole.offsets[1]
    assert make_plan(0, [512, 512], [1, 5]).offsets == (0, -1)  # two of it are there at once


def test_lifetimes_only_grow() -> None:
    assert merge(3, 5) == merge(5, 3) == merge(5, UNKNOWN) == 5
    assert merge(OUTLIVES, 5) == merge(5, OUTLIVES) == merge(OUTLIVES, UNKNOWN) == OUTLIVES


def test_what_is_not_whole_teaches_nothing() -> None:
    learner = make_learner()
    assert learner.read(events((512, 1, 0), END, (0, 1, 0))) == []  # began before the record did
    assert learner.read(events(BEGIN, (512, 2, 0), (0, 2, 0), END)) == []
    learner.forget()
    assert learner.read(events(BEGIN, (512, 3, 0), (0, 3, 0), END)) == []
    assert len(learner.read(events(BEGIN, (512, 4, 0), (0, 4, 0), END))) == 1
    assert learner.read(events(BEGIN, (512, 5, 0), (0, 5, 0), END)) == []  # nothing new


def test_a_record_that_nobody_reads_does_not_grow_for_ever(memory: Memory) -> None:
    memory.record(0, True)
    for _ in range((1 << 19) + 1):
        memory.give(memory.take(512) or 0)
    assert memory.drain() is None
    memory.give(memory.take(1024) or 0)
    assert memory.drain()["nbytes"].tolist() == [1024, 0]
    for _ in range(20_000):  # more than is handed over at a time
        memory.give(memory.take(512) or 0)
    assert memory.drain()["nbytes"].tolist() == [512, 0] * 20_000


# A CUDA runtime -------------------------------------------------------------------------------------------------------


def test_each_device_has_its_own_memory(cuda: Memory, runtime: ctypes.CDLL) -> None:
    blocks = [cuda.take(3000, device) for device in (0, 1, 1, 0, 2)]
    assert [runtime.fake_owner(block) for block in blocks] == [0, 1, 1, 0, 2]
    assert runtime.fake_device() == 0  # the thread's own device is as it was
    assert cuda.count(1).requests == 2 and cuda.count(2).reserved_bytes == 2 * MIB
    for block in blocks:
        assert cuda.give(block or 0)


def test_a_block_waits_for_the_streams_that_used_it(cuda: Memory, runtime: ctypes.CDLL) -> None:
    block = cuda.take(1536, stream=1)
    assert block is not None
    assert cuda.use(block, 2) and cuda.use(block, 1) and cuda.use(block, 2)
    runtime.fake_hold(2)
    assert cuda.give(block)
    assert not cuda.give(block) and not cuda.use(block, 3)
    assert runtime.fake_events() == 1 and cuda.count().leaving == 1 and cuda.count().allocated_bytes == 0
    other = cuda.take(1536, stream=1)
    assert other is not None and other != block
    runtime.fake_let_pass(2)
    again = cuda.take(1536, stream=1)
    assert again == block and cuda.count().leaving == 0
    for each in (other, again):
        assert cuda.give(each or 0)


def test_a_planned_place_waits_for_the_streams_that_used_it(cuda: Memory, runtime: ctypes.CDLL) -> None:
    assert cuda.plan(0, 1, [512, 512], [0, 0], 512)
    assert cuda.begin_step()
    first = cuda.take(512, stream=1)
    assert first is not None and cuda.use(first, 2)
    runtime.fake_hold(2)
    assert cuda.give(first)
    second = cuda.take(512, stream=1)
    assert second != first and (cuda.count().hits, cuda.count().blocked) == (1, 1)
    assert cuda.end_step()
    cuda.empty()  # waits
    assert cuda.count().leaving == 0 and cuda.count().arena_bytes == 0
    runtime.fake_let_pass(2)
    assert cuda.give(second or 0)


def test_memory_is_waited_for_before_there_is_none(cuda: Memory, runtime: ctypes.CDLL) -> None:
    runtime.fake_set_capacity(20 * MIB)
    block = cuda.take(20 * MIB, stream=1)
    assert block is not None and cuda.use(block, 2)
    runtime.fake_hold(2)
    assert cuda.give(block)
    assert cuda.take(20 * MIB, stream=1) == block
    assert cuda.take(512, stream=1) is None
    assert runtime.fake_last_error() == 0  # the program's next launch shall not find what failed here
    assert cuda.give(block)
    runtime.fake_let_pass(2)


def test_where_events_fail_the_device_is_waited_for(cuda: Memory, runtime: ctypes.CDLL) -> None:
    block = cuda.take(512, stream=1)
    assert block is not None and cuda.use(block, 2) and cuda.use(block, 3)
    before = runtime.fake_settled()
    runtime.fake_fail_events(1)
    assert cuda.give(block)
    runtime.fake_fail_events(0)
    assert runtime.fake_settled() == before + 1 and runtime.fake_last_error() == 0
    assert cuda.take(512, stream=1) == block
    assert cuda.give(block)


def test_the_extension_counts_the_bytes_of_each_device(cuda: Memory) -> None:
    """By the functions in C: one in Python would wait for the GIL under the mutex of a step."""
    native = load_native()
    native.replace_device_counts(*cuda.find_counters())
    try:
        block = cuda.take(4 * MIB, 2)
        assert native.count_device_bytes("cuda:2")[:2] == [4 * MIB, 4 * MIB]
        assert native.count_device_bytes("cuda:1") == [0, 0, 0, 0]
        cuda.give(block)
        assert native.count_device_bytes("cuda:2")[:2] == [0, 4 * MIB]
        native.reset_peaks("cuda:2")
        assert native.count_device_bytes("cuda:2")[:2] == [0, 0]
        assert native.find_step_peaks("cuda:2")[0] == 4 * MIB
    finally:
        native.begin_peaks("cuda:2")
        native.replace_device_counts(None, None)
        cuda.empty(2)


def test_what_is_no_runtime_is_refused(library: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for path in (str(tmp_path / "nothing.so"), str(library)):
        with pytest.raises(UsageError, match="CUDA runtime"):
            Memory(library, runtime=path)

"""The CPU arena: a property test against a model, threads, forks, limits, and what the kernel says of its pages."""

from __future__ import annotations

import ctypes
import mmap
import pathlib
import random
import re
import subprocess
import sys
import textwrap
import threading
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.native import arena_module

PAGE = mmap.PAGESIZE
MIB = 1 << 20
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return arena_module.load()


def fill(address: int, nbytes: int, value: int) -> None:
    ctypes.memset(address, value, nbytes)


def holds(address: int, nbytes: int, value: int) -> bool:
    return ctypes.string_at(address, nbytes) == bytes([value]) * nbytes


def list_free(arena: Any, state: str = "mapped") -> list[tuple[int, int]]:
    """Bytes and address of the free segments in a state, the smallest first."""
    return sorted((nbytes, begin) for begin, nbytes, each in arena.list_segments() if each == state)


class Model:
    """Blocks in a dictionary, each written to from end to end, beside the arena."""

    def __init__(self, arena: Any) -> None:
        self.arena = arena
        self.blocks: dict[int, tuple[int, int]] = {}  # by address: bytes, and the value in each byte
        self.peak_bytes = self.live_bytes = self.made = 0

    def check_and_keep(self, address: int, nbytes: int) -> None:
        assert address and address % 64 == 0
        assert self.arena.owns(address) and not self.arena.owns(address + 64)
        for other, (size, _) in self.blocks.items():
            assert address + nbytes <= other or other + size <= address
        self.made += 1
        self.blocks[address] = nbytes, self.made % 255 + 1
        fill(address, *self.blocks[address])
        self.live_bytes += -(-nbytes // 64) * 64
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def allocate(self, nbytes: int) -> None:
        rounded = -(-nbytes // 64) * 64
        fitting = [begin for size, begin in list_free(self.arena) if size >= rounded]
        address = self.arena.allocate(nbytes)
        if fitting:
            assert address == fitting[0]  # the smallest, and the lowest address among these
        self.check_and_keep(address, nbytes)

    def free(self, which: int) -> None:
        if self.blocks:
            address = sorted(self.blocks)[which % len(self.blocks)]
            nbytes, value = self.blocks.pop(address)
            assert holds(address, nbytes, value)
            assert self.arena.free(address) and not self.arena.free(address)
            self.live_bytes -= -(-nbytes // 64) * 64

    def check(self) -> None:
        assert self.arena.check() is None
        counts = self.arena.statistics()
        assert counts["live_bytes"] == self.live_bytes and counts["live_peak_bytes"] == self.peak_bytes
        assert counts["blocks"] == len(self.blocks) and counts["requests"] == self.made and counts["failed"] == 0
        assert counts["newly_mapped_bytes"] - counts["given_back_bytes"] == counts["mapped_bytes"]
        assert counts["mapped_bytes"] == self.arena.count_resident_bytes()
        if counts["mapped_bytes"] > counts["limit_bytes"]:  # then no page is left to give
            assert all(nbytes < 2 * PAGE for nbytes, _ in list_free(self.arena))


SIZES = st.one_of(
    st.integers(1, 3 * PAGE), st.integers(1, 40).map(lambda pages: pages * PAGE), st.integers(1, MIB // 4)
)
ACTIONS = st.one_of(
    st.tuples(st.just("allocate"), SIZES),
    st.tuples(st.just("free"), st.integers(0, 1000)),
    st.tuples(st.just("free"), st.integers(0, 1000)),
    st.tuples(st.just("trim"), st.integers(0, MIB // 2)),
    st.tuples(st.just("forget_peak"), st.integers(0, 2 * MIB)),
)


@given(st.lists(ACTIONS, max_size=60))
def test_any_requests_beside_a_model(actions: list[tuple[Any, ...]]) -> None:
    arena = arena_module.load().Arena()
    model = Model(arena)
    for action, *values in actions:
        if action == "trim":
            free_bytes = arena.statistics()["mapped_bytes"] - model.live_bytes
            given = arena.trim(values[0])
            left = arena.statistics()["mapped_bytes"] - model.live_bytes
            assert left == free_bytes - given
            assert left <= values[0] or all(nbytes < 2 * PAGE for nbytes, _ in list_free(arena))
        elif action == "forget_peak":
            arena.forget_peak(values[0])
            highest = max(model.live_bytes, values[0])
            assert arena.statistics()["limit_bytes"] <= highest + max(highest // 64, MIB)
        else:
            getattr(model, action)(*values)
        model.check()
    while model.blocks:
        model.free(0)
    arena.trim(0)
    assert arena.count_resident_bytes() == arena.statistics()["mapped_bytes"] == 0
    assert len(arena.list_segments()) == 1  # all merged


def test_contents_survive_what_happens_around_them(native: ModuleType) -> None:
    arena, chance = native.Arena(), random.Random(0)
    model = Model(arena)
    for _ in range(1500):
        if model.live_bytes > 20 * MIB or chance.random() < 0.45:
            model.free(chance.randrange(1 << 30))
        else:
            model.allocate(int(2 ** chance.uniform(14, 21)))
        assert arena.statistics()["mapped_bytes"] <= 24 * MIB
    assert arena.statistics()["given_back_bytes"] > 0  # the limit was felt
    assert all(holds(address, *block) for address, block in model.blocks.items())
    model.check()


def test_holes_of_any_size_cost_no_more_than_the_pages_at_their_ends(native: ModuleType) -> None:
    arena = native.Arena()
    for nbytes in (100_000, 300_000, 700_000, 1_100_000):  # none fits a hole that those before have left
        blocks = [arena.allocate(nbytes) for _ in range(32 * MIB // nbytes)]
        for address in blocks[::2]:
            arena.free(address)
        counts = arena.statistics()
        holes = sum(state == "mapped" for _, _, state in arena.list_segments())
        assert counts["mapped_bytes"] <= counts["live_peak_bytes"] * 65 // 64 + 2 * PAGE * holes
    assert counts["given_back_bytes"] > 16 * MIB and arena.check() is None


def test_a_peak_that_is_forgotten_is_given_back(native: ModuleType) -> None:
    arena = native.Arena()
    blocks = [arena.allocate(MIB) for _ in range(64)]
    for address in blocks[1:]:
        arena.free(address)
    assert arena.statistics()["mapped_bytes"] >= 64 * MIB
    arena.forget_peak(32 * MIB)
    assert 32 * MIB <= arena.statistics()["mapped_bytes"] <= 33 * MIB
    arena.forget_peak(48 * MIB)  # there was no such peak since
    assert arena.statistics()["limit_bytes"] == 33 * MIB
    arena.forget_peak(0)
    assert MIB <= arena.statistics()["mapped_bytes"] <= 2 * MIB
    assert arena.owns(blocks[0]) and arena.check() is None


def test_mapped_bytes_stay_close_to_the_live_peak_by_themselves(native: ModuleType) -> None:
    arena, chance = native.Arena(), random.Random(1)
    blocks: list[int] = []
    for _ in range(20_000):
        if chance.random() < 0.5:
            blocks.append(arena.allocate(int(2 ** chance.uniform(14, 24))))
        elif blocks:
            arena.free(blocks.pop(chance.randrange(len(blocks))))
        counts = arena.statistics()
        assert counts["mapped_bytes"] <= counts["live_peak_bytes"] * 65 // 64 + MIB
    assert counts["reused"] > counts["requests"] / 2


def test_a_loop_of_equal_steps_maps_nothing_after_the_first(native: ModuleType) -> None:
    arena, chance = native.Arena(), random.Random(2)
    sizes = [chance.randrange(1 << 14, 1 << 22) for _ in range(100)]
    mapped = []
    for _ in range(4):
        blocks = [arena.allocate(nbytes) for nbytes in sizes]
        for address in reversed(blocks):
            arena.free(address)
        mapped.append(arena.statistics()["newly_mapped_bytes"])
    assert mapped[0] == mapped[-1] <= sum(sizes) + 100 * 64 + PAGE


def test_the_kernel_counts_the_same_resident_bytes(native: ModuleType) -> None:
    arena = native.Arena()
    blocks = [arena.allocate(nbytes) for nbytes in (3 * MIB, 100_000, 5 * MIB)]
    for address, nbytes in zip(blocks, (3 * MIB, 100_000, 5 * MIB), strict=True):
        fill(address, nbytes, 1)
    arena.free(blocks[0])
    arena.forget_peak(6 * MIB)
    begin, end = arena.list_segments()[0][0], sum(arena.list_segments()[-1][:2])
    resident_bytes, is_inside = 0, False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = begin <= int(place[1], 16) < end
        elif is_inside and line.startswith("Rss:"):
            resident_bytes += int(line.split()[1]) << 10
    counts = arena.statistics()
    assert 0 < counts["mapped_bytes"] <= 7 * MIB and counts["given_back_bytes"] > 0
    assert resident_bytes == counts["mapped_bytes"] == arena.count_resident_bytes()


def test_what_no_block_begins_with_is_refused(native: ModuleType) -> None:
    arena = native.Arena()
    address = arena.allocate(PAGE)
    for wrong in (0, address + 64, address - 64, id(arena), arena.list_segments()[-1][0]):
        assert not arena.owns(wrong) and not arena.free(wrong)
    assert arena.allocate(0) == 0 and arena.allocate(1 << 62) == 0
    assert arena.free(address) and not arena.owns(address)


def test_what_something_else_is_mapped_on_is_left_alone(native: ModuleType) -> None:
    arena = native.Arena()
    first = arena.allocate(PAGE)
    foreign = first + 5 * PAGE
    arena_module.occupy(foreign, PAGE)
    block = arena.allocate(10 * PAGE)  # not across it
    assert block > foreign and arena.check() is None
    assert [nbytes for _, nbytes, state in arena.list_segments() if state == "lost"] == [10 * PAGE]
    ctypes.CDLL(None).munmap(ctypes.c_void_p(foreign), ctypes.c_size_t(PAGE))


def test_threads(native: ModuleType) -> None:
    arena = native.Arena()
    wrong: list[str] = []

    def work(number: int) -> None:
        chance, blocks = random.Random(number), []
        for _ in range(1500):
            if blocks and (len(blocks) > 20 or chance.random() < 0.5):
                address, nbytes = blocks.pop(chance.randrange(len(blocks)))
                if not holds(address, nbytes, number) or not arena.free(address):
                    wrong.append(f"{number}: {address}")
            else:
                nbytes = chance.randrange(1, 1 << 18)
                blocks.append((arena.allocate(nbytes), nbytes))
                fill(*blocks[-1], number)
        for address, _ in blocks:
            arena.free(address)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and arena.check() is None
    assert arena.statistics()["live_bytes"] == 0


def run_script(script: str) -> str:
    """What a script printed, in a process of its own."""
    head = """
        import ctypes, os, random, resource, sys, threading
        import torch
        from tests.native import arena_module
        MIB = 1 << 20
        native = arena_module.load()
        def read(name):
            return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name + ":"))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(script)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_forks_while_other_threads_allocate() -> None:
    out = run_script("""
        arena = native.get_arena()
        kept = arena.allocate(MIB)
        ctypes.memset(kept, 7, MIB)
        stop = False
        def work():
            while not stop:
                arena.free(arena.allocate(random.randrange(1, MIB)))
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads: thread.start()
        for _ in range(40):
            child = os.fork()
            if child == 0:
                mine = arena.allocate(2 * MIB)
                ctypes.memset(mine, 9, 2 * MIB)
                fine = ctypes.string_at(kept, MIB) == b"\\7" * MIB and arena.check() is None
                ctypes.memset(kept, 8, MIB)
                os._exit(0 if fine and arena.free(mine) and arena.free(kept) else 1)
            assert os.waitpid(child, 0)[1] == 0
        stop = True
        for thread in threads: thread.join()
        assert ctypes.string_at(kept, MIB) == b"\\7" * MIB and arena.check() is None
        print("fine")
    """)
    assert out.strip() == "fine"


@pytest.mark.parametrize(("limit", "used"), [("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")])
def test_a_limit_of_the_system(limit: str, used: str) -> None:
    out = run_script(f"""
        before = read("{used}")
        arena = native.Arena()
        assert read("{used}") - before < MIB  # nothing is reserved
        resource.setrlimit(resource.{limit}, (read("{used}") + 65 * MIB,) * 2)
        blocks = [arena.allocate(16 * MIB) for _ in range(3)]
        for block in blocks: ctypes.memset(block, 1, 16 * MIB)
        assert arena.allocate(32 * MIB) == 0 and arena.statistics()["failed"] == 1
        arena.free(blocks[0]), arena.free(blocks[2])
        block = arena.allocate(40 * MIB)  # what is free is given back to make that
        ctypes.memset(block, 2, 40 * MIB)
        assert block and all(ctypes.string_at(blocks[1] + part * MIB, 1) == b"\\1" for part in range(16))
        print(arena.check(), arena.statistics()["given_back_bytes"] >= 16 * MIB - 4096)
    """)
    assert out.strip() == "None True"


def test_torch_gets_memory_elsewhere_where_the_arena_has_none() -> None:
    out = run_script("""
        native.use_arena()
        arena = native.get_arena()
        inside = torch.ones(MIB)
        assert arena.owns(inside.data_ptr())
        rest = arena.list_segments()[-1]
        assert rest[2] == "unmapped"
        arena_module.occupy(*rest[:2])
        outside = torch.ones(MIB)
        assert not arena.owns(outside.data_ptr()) and outside.sum() == inside.sum() and arena.check() is None
        storage = outside.untyped_storage()
        storage.resize_(16 * MIB)
        try:
            torch.empty(1 << 50)
        except RuntimeError as error:
            print("allocate memory" in str(error) or "not enough memory" in str(error))
        del outside, inside, storage
        print(arena.statistics()["live_bytes"])
    """)
    assert out.split() == ["True", "0"]


def test_training_gives_the_same_bits() -> None:
    script = """
        if %s: native.use_arena()
        torch.manual_seed(0)
        nn = torch.nn
        convolution = [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU()]
        model = nn.Sequential(*convolution, nn.Flatten(), nn.Linear(32 * 30 * 30, 100))
        for _ in range(3):
            loss = model(torch.randn(8, 3, 32, 32)).square().mean()
            loss.backward()
            for each in model.parameters():
                each.data -= 0.1 * each.grad
        print(loss.item().hex(), [float(each.double().sum()).hex() for each in model.parameters()])
        assert (native.get_arena().statistics()["requests"] > 0) == %s
    """
    assert run_script(script % (True, True)) == run_script(script % (False, False))

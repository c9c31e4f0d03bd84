"""Tables, lifetimes, pools and the verb `lay_out`."""

from __future__ import annotations

import pathlib

import pytest
from hypothesis import given

from elbowroom.errors import InternalError, TraceError, UnknownMember, UsageError
from elbowroom.ir.buffers import Buffer, Layout, check_layout
from elbowroom.layout.lay_out import lay_out
from elbowroom.layout.lifetimes import list_buffers
from elbowroom.layout.pools import POOLS, BestFitPool, ExpandableAllocator, PowerOfTwoPool
from elbowroom.layout.requests import list_requests, serve
from elbowroom.layout.tables import read_buffers, write_layout
from tests.contracts.test_allocators import make_buffers
from tests.generators import make_trace, nets
from tests.oracles import find_widest

MIB = 1 << 20


def test_a_table_comes_back(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.csv"
    buffers = (
        Buffer(id=4, lower=0, upper=3, nbytes=10, alignment=4),
        Buffer(id=7, lower=5, upper=2, nbytes=(1 << 40) + 1, alignment=1),
    )
    layout = lay_out(buffers)
    write_layout(path, buffers, layout)
    assert read_buffers(path) == buffers
    pinned = read_buffers(path, is_pinned=True)
    assert tuple(buffer.offset for buffer in pinned) == layout.offsets
    assert lay_out(pinned).offsets == layout.offsets


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the columns"),
        ("id,lower,upper\n1,2,3\n", "line 1: the columns"),
        ("id,lower,upper,size,colour\n", "line 1: the columns"),
        ("id,lower,upper,size\n1,0,2,8\n2,0,2\n", "line 3: 3 values for 4 columns"),
        ("id,lower,upper,size\n1,0,2,8\n\n2,0,x,8\n", "line 4: upper is 'x'"),
        ("id,lower,upper,size\n1,0,2,8.5\n", "line 2: size is '8.5'"),
        ("id,lower,upper,size\n1,0,2,0\n", "line 2: size is 0"),
        ("id,lower,upper,size\n1,0,2,-8\n", "line 2: size is -8"),
        ("id,lower,upper,size\n1,2,2,8\n", "line 2: nothing lives from 2 to 2"),
        ("id,lower,upper,size\n1,-1,2,8\n", "line 2: nothing lives from -1"),
        ("id,lower,upper,size\n1,0,2,8\n1,0,2,8\n", "line 3: id 1 is also that of line 2"),
        ("id,lower,upper,size\n3,0,2,8\n\n1,0,2,8\n2,0,2,8\n1,0,2,8\n", "line 6: id 1 is also that of line 4"),
        ("id,lower,upper,size\n1,0,2," + "9" * 140_000, "line 2: not a line of a table: field larger"),
        ("id,lower,upper,size,offset\n1,0,2,8,-8\n", "line 2: offset -8"),
        ("id,lower,upper,size\n1,0,2," + "9" * 30 + "\n", "line 2: size is"),
    ],
)
def test_a_malformed_table_is_refused_with_the_line(tmp_path: pathlib.Path, text: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_buffers(path, is_pinned=True)


def test_a_table_that_is_not_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_buffers(tmp_path / "none.csv")


@given(net=nets())
def test_buffers_of_a_trace_are_what_is_live(net: object) -> None:
    trace = make_trace(net)  # type: ignore[arg-type]
    buffers = list_buffers(trace, 1)
    assert {buffer.id for buffer in buffers} == {storage.id for storage in trace.storages if storage.nbytes}
    layout = lay_out(buffers)
    assert layout.arena_bytes >= layout.bound_bytes >= find_widest(buffers)


@pytest.mark.parametrize(
    ("offsets", "arena", "message"),
    [
        ((0,), 8, "1 offsets for 2 buffers"),
        ((0, 4), 12, "overlap while both are live"),
        ((0, -8), 8, "no multiple"),
        ((0, 9), 17, "no multiple"),
        ((0, 8), 24, "said to have 24"),
    ],
)
def test_the_judge_sees_what_is_wrong(offsets: tuple[int, ...], arena: int, message: str) -> None:
    buffers = tuple(Buffer(id=each, lower=0, upper=2, nbytes=8, alignment=4) for each in (1, 2))
    with pytest.raises(InternalError, match=message):
        check_layout(buffers, Layout(offsets=offsets, arena_bytes=arena, bound_bytes=8, is_optimal=False))


def test_an_allocator_that_is_not_there() -> None:
    with pytest.raises(UnknownMember, match="auto"):
        lay_out((), "none")


@given(buffers=make_buffers())
def test_pools_never_hand_out_what_is_taken(buffers: tuple[Buffer, ...]) -> None:
    for make in POOLS.values():
        pool = make()
        there: dict[int, tuple[int, int]] = {}
        for takes, buffer in list_requests(buffers):
            nbytes = buffer.nbytes * 300_000
            if not takes:
                pool.give(there.pop(buffer.id)[0])
                continue
            begin = pool.take(nbytes)
            assert all(begin + nbytes <= low or high <= begin for low, high in there.values())
            there[buffer.id] = (begin, begin + nbytes)
        assert pool.reserved_bytes >= find_widest(buffers)
    assert serve(buffers, BestFitPool()) >= find_widest(buffers)


def test_segments_grow_at_their_end() -> None:
    pool = ExpandableAllocator()
    one = pool.take(30 * MIB)
    assert pool.reserved_bytes == 40 * MIB
    two = pool.take(50 * MIB)  # 10 MiB of it are there
    assert (two - one, pool.reserved_bytes) == (30 * MIB, 80 * MIB)
    pool.give(one)
    pool.give(two)
    assert pool.take(80 * MIB) == one and pool.reserved_bytes == 80 * MIB


def test_a_best_fit_pool_splits_whatever_is_left() -> None:
    pool = BestFitPool()
    one = pool.take(4 * MIB)
    pool.give(one)
    assert pool.take(MIB) == one and pool.take(3 * MIB) == one + MIB
    assert pool.reserved_bytes == 4 * MIB


def test_powers_of_two_are_kept_for_their_like() -> None:
    pool = PowerOfTwoPool()
    one = pool.take(600)
    pool.give(one)
    assert pool.take(512) != one and pool.take(1000) == one
    assert pool.reserved_bytes == 1024 + 512

"""What every allocator promises, over made-up buffers: nothing overlaps, nothing is moved that is pinned."""

from __future__ import annotations

import dataclasses
import importlib.util
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from elbowroom import _family
from elbowroom.errors import ArenaTooSmall, TraceError, UsageError
from elbowroom.ir.buffers import Buffer, Layout, check_layout, find_clash
from elbowroom.layout import allocators
from elbowroom.layout.portfolio import MEMBERS
from tests.oracles import find_smallest_arena, find_widest

NAMES = [name for name in _family.names(allocators) if name != "omnimalloc" or importlib.util.find_spec("omnimalloc")]


@some.composite
def make_buffers(draw: some.DrawFn, most: int = 12, *, plain: bool = False) -> tuple[Buffer, ...]:
    """Buffers with lifetimes in [0, 12]; some wrap, some are aligned, some pinned where they do not clash."""
    found: list[Buffer] = []
    for name in range(draw(some.integers(0, most))):
        lower, upper = draw(some.lists(some.integers(0, 12), min_size=2, max_size=2, unique=True))
        if upper < lower and (plain or draw(some.integers(0, 2))):
            lower, upper = upper, lower
        alignment = 1 if plain else draw(some.sampled_from([1, 1, 4, 6]))
        nbytes = draw(some.integers(1, 9))
        offset = None if plain or draw(some.integers(0, 4)) else draw(some.integers(0, 5)) * alignment
        buffer = Buffer(id=name, lower=lower, upper=upper, nbytes=nbytes, alignment=alignment, offset=offset)
        pinned = [each for each in [*found, buffer] if each.offset is not None]
        if find_clash(pinned, [each.offset or 0 for each in pinned]) is not None:
            buffer = dataclasses.replace(buffer, offset=None)
        found.append(buffer)
    return tuple(found)


def assign(name: str, buffers: tuple[Buffer, ...], capacity_bytes: int | None = None) -> Layout:
    """What the member makes of them; the example does not count where it refuses them."""
    try:
        layout: Layout = _family.get(allocators, name, "assign")(buffers, capacity_bytes)
    except UsageError:
        assume(False)
        raise
    return layout


def draw_buffers(data: some.DataObject, name: str, most: int = 12) -> tuple[Buffer, ...]:
    """Such as the member takes, as a rule."""
    return data.draw(make_buffers(most, plain=name == "omnimalloc"))


@pytest.mark.parametrize("name", NAMES)
@given(data=some.data())
def test_nothing_overlaps(name: str, data: some.DataObject) -> None:
    buffers = draw_buffers(data, name)
    layout = assign(name, buffers)
    check_layout(buffers, layout)
    assert find_widest(buffers) <= layout.bound_bytes <= layout.arena_bytes
    assert layout == assign(name, buffers)


@pytest.mark.parametrize("name", NAMES)
@given(data=some.data())
def test_it_fits_what_it_says_it_fits(name: str, data: some.DataObject) -> None:
    buffers = draw_buffers(data, name)
    layout = assign(name, buffers)
    assert assign(name, buffers, layout.arena_bytes) == layout
    if layout.arena_bytes:
        with pytest.raises(ArenaTooSmall) as caught:
            assign(name, buffers, layout.arena_bytes - 1)
        assert caught.value.needed_bytes == layout.arena_bytes
        assert caught.value.is_proven == layout.is_optimal
        assert caught.value.in_the_way


@pytest.mark.parametrize("name", NAMES)
@given(data=some.data())
@settings(max_examples=30)
def test_what_is_called_optimal_is(name: str, data: some.DataObject) -> None:
    buffers = draw_buffers(data, name, 7)
    layout = assign(name, buffers)
    smallest = find_smallest_arena(buffers)
    assert layout.bound_bytes <= smallest <= layout.arena_bytes
    if layout.is_optimal or name == "exact":
        assert layout.arena_bytes == smallest and layout.is_optimal


@given(buffers=make_buffers(16))
def test_the_default_is_never_larger(buffers: tuple[Buffer, ...]) -> None:
    arena = assign("auto", buffers).arena_bytes
    for name in NAMES:
        try:
            layout: Layout = _family.get(allocators, name, "assign")(buffers)
        except UsageError:
            continue
        assert arena <= layout.arena_bytes, name


def test_the_default_tries_what_every_other_does() -> None:
    assert set(MEMBERS) == set(_family.names(allocators)) - {"auto", "exact", "omnimalloc"}


def test_the_default_is_never_larger_with_many_buffers() -> None:
    chance = random.Random(0)
    starts = [chance.randrange(6000) for _ in range(6000)]
    buffers = tuple(
        Buffer(id=name, lower=start, upper=start + chance.randrange(1, 200), nbytes=chance.randrange(1, 1000))
        for name, start in enumerate(starts)
    )
    arena = assign("auto", buffers).arena_bytes
    assert all(arena <= assign(name, buffers).arena_bytes for name in MEMBERS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nbytes": 0}, "has 0 bytes"),
        ({"nbytes": -4}, "has -4 bytes"),
        ({"lower": -1}, "times begin at 0"),
        ({"upper": 1}, "never there"),
        ({"alignment": 0}, "alignment 0"),
        ({"alignment": 4, "offset": 6}, "no multiple of 4"),
        ({"offset": -4}, "pinned to -4"),
        ({"id": 1}, "has the id of another"),
        ({"offset": 3}, "overlap while both are live"),
        ({"nbytes": 1 << 62}, "more than 2\\*\\*62"),
    ],
)
def test_what_cannot_be_is_refused(name: str, change: dict[str, int], message: str) -> None:
    buffers = (
        Buffer(id=1, lower=0, upper=4, nbytes=8, offset=0),
        dataclasses.replace(Buffer(id=2, lower=1, upper=3, nbytes=8), **change),
    )
    with pytest.raises(TraceError, match=message):
        _family.get(allocators, name, "assign")(buffers)


@pytest.mark.parametrize("name", NAMES)
def test_a_capacity_below_the_bound_names_who_makes_it(name: str) -> None:
    buffers = tuple(Buffer(id=each, lower=0, upper=2, nbytes=10 * each) for each in (1, 2, 3))
    with pytest.raises(
        ArenaTooSmall, match=r"60 bytes are needed, whatever the layout.*buffer 3 with 30 bytes"
    ) as caught:
        _family.get(allocators, name, "assign")(buffers, 59)
    assert caught.value.is_proven and caught.value.needed_bytes == 60


@pytest.mark.parametrize("name", NAMES)
def test_sums_do_not_leave_64_bits(name: str) -> None:
    buffers = tuple(Buffer(id=each, lower=each, upper=each + 2, nbytes=(1 << 40) + each) for each in range(100))
    layout = assign(name, buffers)
    check_layout(buffers, layout)


def test_a_rival_that_is_not_installed_says_so() -> None:
    if importlib.util.find_spec("omnimalloc"):
        pytest.skip("omnimalloc is installed")
    with pytest.raises(UsageError, match="not installed"):
        _family.get(allocators, "omnimalloc", "assign")((Buffer(id=0, lower=0, upper=1, nbytes=1),))

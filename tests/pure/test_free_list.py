"""The free list against a plain record of what is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elbowroom.layout.free_list import FreeList

ALIGNMENT = 16
CAPACITY = 640


def rounded(nbytes: int) -> int:
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


class Comparison(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.free = FreeList(CAPACITY, ALIGNMENT)
        self.taken: dict[int, int] = {}  # offset -> bytes asked for
        self.highest = 0

    def gaps(self) -> list[tuple[int, int]]:
        """The free stretches, the one at the end included, as (offset, bytes)."""
        found, cursor = [], 0
        for offset, nbytes in sorted(self.taken.items()):
            if offset > cursor:
                found.append((cursor, offset - cursor))
            cursor = offset + rounded(nbytes)
        return [*found, (cursor, CAPACITY - cursor)]

    @rule(nbytes=st.integers(0, 200))
    def take(self, nbytes: int) -> None:
        expected = next((offset for offset, size in self.gaps() if size >= rounded(nbytes)), None)
        offset = self.free.take(nbytes)
        assert offset == expected  # the lowest that fits, and refused only if none does
        if offset is not None:
            self.take_note(offset, nbytes)

    @rule(nbytes=st.integers(0, 200), blocks=st.integers(0, CAPACITY // ALIGNMENT))
    def take_beyond(self, nbytes: int, blocks: int) -> None:
        least, size = blocks * ALIGNMENT, rounded(nbytes)
        found = [max(begin, least) for begin, room in self.gaps() if begin + room - max(begin, least) >= size]
        offset = self.free.take(nbytes, least)
        assert offset == (min(found) if found else None)
        if offset is not None:
            self.take_note(offset, nbytes)

    @rule(nbytes=st.integers(0, 200), blocks=st.integers(0, CAPACITY // ALIGNMENT))
    def take_at(self, nbytes: int, blocks: int) -> None:
        offset = blocks * ALIGNMENT
        is_free = any(begin <= offset and offset + rounded(nbytes) <= begin + room for begin, room in self.gaps())
        assert self.free.take_at(offset, nbytes) == is_free
        if is_free:
            self.take_note(offset, nbytes)

    def take_note(self, offset: int, nbytes: int) -> None:
        self.taken[offset] = nbytes
        self.highest = max(self.highest, offset + rounded(nbytes))

    @rule()
    def forget_end(self) -> None:
        assert self.free.forget_end() == self.highest
        self.highest = max((offset + rounded(nbytes) for offset, nbytes in self.taken.items()), default=0)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        self.free.give(offset, self.taken.pop(offset))

    @invariant()
    def blocks_are_apart_and_aligned(self) -> None:
        cursor = 0
        for offset, nbytes in sorted(self.taken.items()):
            assert offset >= cursor and offset % ALIGNMENT == 0
            cursor = offset + rounded(nbytes)
        assert cursor <= self.free.end_bytes <= CAPACITY

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.free.end_bytes == self.highest
        assert self.free.free_bytes == CAPACITY - sum(map(rounded, self.taken.values()))
        assert self.free.is_empty == (not self.taken)


TestComparison = Comparison.TestCase


@given(sizes=st.lists(st.integers(0, 100), min_size=1, max_size=20), data=st.data())
def test_given_back_in_any_order_it_is_one_piece_again(sizes: list[int], data: st.DataObject) -> None:
    free = FreeList(alignment_bytes=ALIGNMENT)
    blocks = [(free.take(nbytes), nbytes) for nbytes in sizes]
    end = free.end_bytes
    assert end == sum(map(rounded, sizes))
    for offset, nbytes in data.draw(st.permutations(blocks)):
        assert offset is not None
        free.give(offset, nbytes)
    assert free.is_empty
    assert free.take(end) == 0
    assert free.end_bytes == end


def test_what_was_planned_lies_where_it_was_planned_to() -> None:
    free = FreeList(alignment_bytes=ALIGNMENT)
    assert free.take_at(64, 32) and free.end_bytes == 96
    assert not free.take_at(80, 16) and not free.take_at(48, 32)
    assert free.take_at(48, 16) and free.take(64) == 96  # what is left below is too small
    assert free.take(48) == 0


def test_without_a_capacity_nothing_is_refused() -> None:
    free = FreeList()
    assert free.take(1 << 50) == 0
    assert free.take(1) == 1 << 50
    assert free.free_bytes is None


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_blocks_are_aligned_and_never_empty(alignment: int) -> None:
    free = FreeList(alignment_bytes=alignment)
    assert [free.take(nbytes) for nbytes in (0, 1, alignment)] == [0, alignment, 2 * alignment]


def test_a_list_that_is_full_has_room_again() -> None:
    free = FreeList(8192)
    assert (free.take(4096), free.take(4096), free.take(1)) == (0, 4096, None)
    assert free.free_bytes == 0
    free.give(0, 4096)
    assert free.take(4097) is None
    assert free.take(4096) == 0

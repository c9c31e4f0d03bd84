"""What a search works with, laid out once, so that nothing is allocated while it runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from elbowroom.layout.instance import Instance

Array = Any  # of numpy; machine code is typed by what it is called with

WORK = 0
JUMPS = 1
CLASHES = 2
"""Fields of `SearchState.tally`: units of about 5 ns; how often decisions were passed over on the way back; how often a
section had no room."""

MOST_RAISES = 1 << 22

SUSPECTS = 4
"""Sections that are looked at first, since they had no room a moment ago: few, as each is looked at each time."""

BLOCK = np.dtype(
    [
        ("offset", np.int64),  # where it is, if it is placed
        ("alignment", np.int64), ("pinned", np.int64),
        ("first", np.int64), ("last", np.int64), ("wrap", np.int64),  # its sections, [first, last) and [0, wrap)
        ("near", np.int64), ("far", np.int64),  # what overlaps it in time, in `near`
        ("raised", np.int64),  # the last raise of `low`, -1 for none
        ("frame", np.int64),  # the decision by which it is placed
        ("clashes", np.int64),  # how often it had no room
        ("under", np.int64), ("above", np.int64),  # equal blocks, in the order in which they lie; -1 for none
    ]
)  # fmt: skip
"""A buffer, but for what is looked at most."""

FRAME = np.dtype([("block", np.int64), ("offset", np.int64), ("is_open", np.int64), ("raises", np.int64)])
"""A decision: a block lies at its lowest offset; not open any more: for known reasons it does not. `raises`: how many
there were before it."""

RAISE = np.dtype([("block", np.int64), ("low", np.int64), ("frame", np.int64), ("before", np.int64)])
"""The lowest offset of a block before a decision raised it, -1 for the equal block below it; the raise before that."""


class SearchState(NamedTuple):
    """What a search works with.

    Attributes:
        low: of each block the lowest offset that is left to it; -1 where it is placed.
        nbytes, rank: of each block; its place in the order.
        blocks, frames, raises: see above.
        near: of each block those that overlap it in time.
        begins, members: of each section its blocks, [begins, next begins) of `members`, about in order of `low`.
        starts, ends: of each section how many blocks that are left begin and end there.
        suspects: sections that had no room last.
        recent: of each block when it last was in a section without room: after so many clashes.
        reasons: by frame that is not open, the decisions because of which it is not; a bit each.
        clash: the decisions because of which something has no room; a bit each.
        is_local: whether what has clashed last, and what lies below that, is decided on first.
    """

    low: Array
    nbytes: Array
    rank: Array
    recent: Array
    blocks: Array
    near: Array
    begins: Array
    members: Array
    starts: Array
    ends: Array
    suspects: Array
    frames: Array
    raises: Array
    reasons: Array
    clash: Array
    is_local: Array
    tally: Array


def make_search_state(instance: Instance) -> SearchState:
    """A desk for `search`; `set_order` says in which order.

    Cost: quadratic in the number of buffers, in time and in memory.
    """
    count = len(instance.nbytes)
    first = instance.first
    last = instance.last
    wrap = instance.wrap
    blocks = np.zeros(count, BLOCK).view(np.recarray)  # fields are attributes without a compiler, too
    for name in ("first", "last", "wrap", "alignment", "pinned"):
        blocks[name] = getattr(instance, name)
    meets = (first[:, None] < last) & (first < last[:, None])
    meets |= (wrap[:, None] > first) | (wrap > first[:, None]) | ((wrap[:, None] > 0) & (wrap > 0))
    np.fill_diagonal(meets, False)
    blocks["far"] = np.cumsum(meets.sum(axis=1))
    blocks["near"] = blocks["far"] - meets.sum(axis=1)
    sections = np.arange(instance.sections)[:, None]
    inside = ((first <= sections) & (sections < last)) | (sections < wrap)
    most = 8 * count + 128  # decisions, those that are not open any more included
    words = most // 64 + 1
    numbers = {name: np.zeros(count, np.int64) for name in ("low", "rank", "recent")}
    by_section = {name: np.zeros(instance.sections, np.int64) for name in ("starts", "ends")}
    return SearchState(
        **numbers, **by_section, nbytes=instance.nbytes, blocks=blocks,
        near=np.nonzero(meets)[1], members=np.nonzero(inside)[1],
        begins=np.concatenate([[0], np.cumsum(inside.sum(axis=1))]), suspects=np.zeros(SUSPECTS, np.int64),
        frames=np.zeros(most, FRAME).view(np.recarray),
        raises=np.zeros(min(2 * count * count + 1024, MOST_RAISES), RAISE).view(np.recarray),
        reasons=np.zeros((most, words), np.int64), clash=np.zeros(words, np.int64),
        is_local=np.zeros(1, np.bool_), tally=np.zeros(3, np.int64),
    )  # fmt: skip


def set_order(state: SearchState, order: Array, *, is_local: bool) -> None:
    """Decide on blocks in this order from now on; see `SearchState.is_local`."""
    state.is_local[0] = is_local
    blocks = state.blocks
    state.rank[order] = np.arange(len(order))
    blocks["under"] = blocks["above"] = -1
    lives = blocks[["first", "last", "wrap", "alignment"]].tolist()
    kinds = list(zip(lives, state.nbytes.tolist(), strict=True))
    below: dict[Any, int] = {}
    for block in order:
        if blocks["pinned"][block] < 0:
            under = below.get(kinds[block], -1)
            below[kinds[block]] = block
            if under >= 0:
                blocks["under"][block], blocks["above"][under] = under, block

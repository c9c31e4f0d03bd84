"""The arrays of a search, allocated once, so that the compiled loops allocate nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from elbowroom.layout.instance import Instance

Array = Any  # of numpy; compiled code is typed by its arguments

WORK = 0
JUMPS = 1
CLASHES = 2
"""Indices of `SearchState.tally`: work in units of about 5 ns; number of backjumps; number of conflicts."""

MOST_RAISES = 1 << 22

SUSPECTS = 4
"""Recently overfull sections, which are checked first; few, since each is checked every time."""

BLOCK = np.dtype(
    [
        ("offset", np.int64),  # if it is placed
        ("alignment", np.int64), ("pinned", np.int64),
        ("first", np.int64), ("last", np.int64), ("wrap", np.int64),  # sections [first, last) and [0, wrap)
        ("near", np.int64), ("far", np.int64),  # range in `SearchState.near` of the blocks that overlap it in time
        ("raised", np.int64),  # index of the last raise of `low`; -1 for none
        ("frame", np.int64),  # the decision by which it is placed
        ("clashes", np.int64),  # number of conflicts that it was part of
        ("under", np.int64), ("above", np.int64),  # the equal blocks next below and above it; -1 for none
    ]
)  # fmt: skip
"""A buffer, without the hottest columns, which are arrays of their own."""

FRAME = np.dtype([("block", np.int64), ("offset", np.int64), ("is_open", np.int64), ("raises", np.int64)])
"""A decision that a block lies at its lowest offset; no longer open once that is refuted. `raises`: number of raises
before it."""

RAISE = np.dtype([("block", np.int64), ("low", np.int64), ("frame", np.int64), ("before", np.int64)])
"""A raise of a block's lower bound: its previous value `low`, the frame that caused it (-1: the equal block below it),
and the previous raise of the block."""


class SearchState(NamedTuple):
    """The arrays of a search.

    Attributes:
        low: lower bound on the offset of each block; -1 if it is placed.
        nbytes, rank: size of each block, and its position in the order.
        blocks, frames, raises: see `BLOCK`, `FRAME` and `RAISE`.
        near: blocks that overlap each block in time.
        begins, members: blocks of each section, [begins, next begins) of `members`, roughly sorted by `low`.
        starts, ends: number of unplaced blocks that begin and end in each section.
        suspects: recently overfull sections.
        recent: number of the last conflict that each block was part of.
        reasons: by closed frame, the decisions that it follows from, as a bit set.
        clash: the conflict set: the decisions that the last failure follows from, as a bit set.
        is_local: whether to branch first on blocks that were in conflict recently, and on lower blocks around them.
        tally: see `WORK`, `JUMPS` and `CLASHES`.
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
    """Allocate the state of a search; `set_order` sets the branching order.

    Cost: time and memory quadratic in the number of buffers.
    """
    count = len(instance.nbytes)
    first = instance.first
    last = instance.last
    wrap = instance.wrap
    blocks = np.zeros(count, BLOCK).view(np.recarray)  # so that fields are attributes in uncompiled code, too
    for name in ("first", "last", "wrap", "alignment", "pinned"):
        blocks[name] = getattr(instance, name)
    meets = (first[:, None] < last) & (first < last[:, None])
    meets |= (wrap[:, None] > first) | (wrap > first[:, None]) | ((wrap[:, None] > 0) & (wrap > 0))
    np.fill_diagonal(meets, False)
    blocks["far"] = np.cumsum(meets.sum(axis=1))
    blocks["near"] = blocks["far"] - meets.sum(axis=1)
    sections = np.arange(instance.sections)[:, None]
    inside = ((first <= sections) & (sections < last)) | (sections < wrap)
    most = 8 * count + 128  # decisions, closed ones included
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
    """Set the branching order; see `SearchState.is_local`."""
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

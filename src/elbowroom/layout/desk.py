"""What a search works with, laid out once, so that nothing is allocated while it runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from elbowroom._compiled import inlined
from elbowroom.layout.instance import Instance

Array = Any  # of numpy; machine code is typed by what it is called with

WORK, RANKED = 0, 1
"""Fields of `Desk.tally`: about 3 ns each, and how much is in the log of ranks."""

MOST_TRIES, MOST_LOGGED = 1 << 22, 1 << 24

FRAME = np.dtype(
    [
        ("lo", np.int64), ("hi", np.int64),  # the blocks that are left, in `pool`
        ("first", np.int64), ("last", np.int64),  # the sections they cover
        ("candidates", np.int64), ("cursor", np.int64), ("end", np.int64),  # what to try, in `tries`
        ("parent", np.int64),  # the frame whose placement is wrong if this one has nothing left to try
        ("logged", np.int64), ("ranked", np.int64), ("agenda", np.int64), ("agenda_top", np.int64),
        ("placed", np.int64),
    ]
)  # fmt: skip
"""A choice: which of the blocks that are left comes next."""

STRETCH = np.dtype(
    [
        ("lo", np.int64), ("hi", np.int64), ("first", np.int64), ("last", np.int64),
        ("floor", np.int64), ("rank", np.int64), ("parent", np.int64), ("next", np.int64),
    ]
)  # fmt: skip
"""A stretch of time that shares nothing with the others, still to be searched."""


class Desk(NamedTuple):
    """What a search works with: arrays, most of them by block.

    Attributes:
        first, last, wrap: the sections of a block, [first, last) and [0, wrap).
        order: its place in the order that is given; `rank`: in the one that breaks ties, which may change on the way.
        twin: an equal block that comes before it; -1 for none.
        low: the lowest offset that is left to it; `offset`: where it is, -1 while it is not placed.
        pool: the blocks; each frame and stretch has a range of it.
        load, parts: by section, scratch.
        tries: what the frames have to try; `log_*`, `ranked_*`: how `low` and `rank` were before.
        renews: whether blocks are ranked anew where time falls into stretches.
    """

    first: Array
    last: Array
    wrap: Array
    nbytes: Array
    alignment: Array
    pinned: Array
    order: Array
    rank: Array
    twin: Array
    low: Array
    offset: Array
    pool: Array
    spare: Array
    need: Array
    load: Array
    parts: Array
    frames: Array
    agenda: Array
    tries: Array
    log_block: Array
    log_low: Array
    ranked_block: Array
    ranked_rank: Array
    renews: Array
    tally: Array


def make_desk(instance: Instance, order: Array, *, renews: bool) -> Desk:
    """A desk for `search`.

    Args:
        order: the blocks, the first to be tried first.
        renews: whether, where time falls into stretches, those that are there when the most is come first from then on.
    """
    count = len(order)
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    numbers = {name: np.zeros(count, np.int64) for name in ("low", "offset", "pool", "spare", "need")}
    logged = min(count * count + 1, MOST_LOGGED)
    return Desk(
        first=instance.first, last=instance.last, wrap=instance.wrap,
        nbytes=instance.nbytes, alignment=instance.alignment, pinned=instance.pinned,
        order=place, rank=place.copy(), twin=_find_twins(instance, order), **numbers,
        load=np.zeros(instance.sections, np.int64), parts=np.zeros(instance.sections, np.int64),
        frames=np.zeros(count + 1, FRAME), agenda=np.zeros(2 * count + 2, STRETCH),
        tries=np.empty(min(count * count + 1, MOST_TRIES), np.int64),
        log_block=np.empty(logged, np.int64), log_low=np.empty(logged, np.int64),
        ranked_block=np.empty(64 * count, np.int64), ranked_rank=np.empty(64 * count, np.int64),
        renews=np.array([renews]), tally=np.zeros(2, np.int64),
    )  # fmt: skip


def _find_twins(instance: Instance, order: Array) -> Array:
    """Of each block the one before it in the order that could take its place; -1 for none."""
    kinds = zip(instance.first, instance.last, instance.wrap, instance.nbytes, instance.alignment, strict=True)
    kind_of = list(kinds)
    before: dict[Any, int] = {}
    twins = np.full(len(order), -1)
    for block in order:
        if instance.pinned[block] < 0:
            twins[block] = before.get(kind_of[block], -1)
            before[kind_of[block]] = block
    return twins


@inlined
def overlaps(desk: Desk, one: int, other: int) -> bool:
    """Whether two blocks are ever there at once."""
    return bool(
        (desk.first[one] < desk.last[other] and desk.first[other] < desk.last[one])
        or desk.wrap[one] > desk.first[other]
        or desk.wrap[other] > desk.first[one]
        or (desk.wrap[one] > 0 and desk.wrap[other] > 0)
    )

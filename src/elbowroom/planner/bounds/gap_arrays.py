"""The gaps that matter to a budget, as arrays: when each may be absent, what moving it takes, what replays it.

    claim      |=====================================|
    gap        opens |                     | closes
    held               |==| the program           |==| running nodes
    pieces                  |..............|          ticks at which its absence frees its bytes

A gap matters if it has such a tick at which the plain step is over the budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.ir.gaps import Gap
from elbowroom.planner.bounds.forced_replays import ForcedReplays, find_forced_replays
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.draft import Drafter, Key

Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Spans = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GapArrays:
    """By gap, in order of opening; `piece_*` by piece.

    Attributes:
        nbytes: what is free while it is absent: rounded up as the device's allocator does.
        claim_begins, claim_ends: ticks of the claim that the gap lies in.
        out_seconds, back_seconds: lane time of one copy; infinite where the link has no speed.
        drag_seconds: that one copy takes from the compute.
        maker: the op whose replay brings it back, -1 where no replay can.
        piece_gap, piece_begin, piece_end: ticks [begin, end) at which the gap's absence frees its bytes.
        before: the gap before it in the same claim, whose copy serves it too; -1 if it is the first.
        necessity: what replays take.
    """

    keys: tuple[Key, ...]
    nbytes: Numbers
    opens: Integers
    closes: Integers
    claim_begins: Integers
    claim_ends: Integers
    out_seconds: Numbers
    back_seconds: Numbers
    drag_seconds: Numbers
    maker: Integers
    piece_gap: Integers
    piece_begin: Integers
    piece_end: Integers
    before: Integers
    forced: ForcedReplays

    def free(self, shares: Numbers, end: int) -> Numbers:
        """Bytes freed at each tick before `end` if each gap is absent to such a share."""
        amounts = (self.nbytes * shares)[self.piece_gap]
        return accumulate(self.piece_begin, amounts, end) - accumulate(self.piece_end, amounts, end)


def accumulate(ticks: Integers, amounts: Numbers, end: int) -> Numbers:
    """At each tick before `end`, the sum of the amounts of this tick and all before it."""
    return np.cumsum(np.bincount(ticks, weights=amounts, minlength=end + 1)[:end])


def make_gap_arrays(problem: Problem) -> GapArrays:
    """Look through the gaps of a problem.

    Cost: linear in the trace; a sort of the gaps.
    """
    drafter = problem.drafter
    trace, link = drafter.replay.trace, drafter.replay.costs.link
    over = np.concatenate(([0], np.cumsum(np.array(problem.plain.live_bytes) > problem.budget_bytes)))
    kept: list[tuple[Gap, Spans]] = []
    for gap in sorted(drafter.gaps.values(), key=lambda gap: (gap.opens, gap.storage)):
        pieces = list(_find_pieces(drafter, gap))
        if any(over[end] > over[begin] for begin, end in pieces) and drafter.replay.rounded[gap.storage] > 0:
            kept.append((gap, pieces))
    claim = [max(each for each in trace.claims[gap.storage] if each[0] < gap.closes) for gap, _ in kept]
    sizes = [trace.storages[gap.storage].nbytes for gap, _ in kept]
    # A copy that goes on to the disk waits for it instead.
    drag = 0.0 if drafter.replay.overflow is not None else link.drag_seconds_per_byte
    moves_out, moves_back = link.out_bytes_per_second > 0, link.back_bytes_per_second > 0
    forced = find_forced_replays(trace)
    return GapArrays(
        keys=tuple((gap.storage, gap.index) for gap, _ in kept),
        nbytes=np.array([drafter.replay.rounded[gap.storage] for gap, _ in kept], dtype=float),
        opens=_integers([gap.opens for gap, _ in kept]),
        closes=_integers([gap.closes for gap, _ in kept]),
        claim_begins=_integers([begin for begin, _ in claim]),
        claim_ends=_integers([end for _, end in claim]),
        out_seconds=np.array([offload_seconds(link, size) if moves_out else np.inf for size in sizes], dtype=float),
        back_seconds=np.array([reload_seconds(link, size) if moves_back else np.inf for size in sizes], dtype=float),
        drag_seconds=np.array(sizes, dtype=float) * drag,
        maker=_integers([_find_maker(forced, gap.storage) for gap, _ in kept]),
        piece_gap=_integers([index for index, (_, pieces) in enumerate(kept) for _ in pieces]),
        piece_begin=_integers([begin for _, pieces in kept for begin, _ in pieces]),
        piece_end=_integers([end for _, pieces in kept for _, end in pieces]),
        before=_integers(
            _find_before([(gap.storage, begin) for (gap, _), (begin, _) in zip(kept, claim, strict=True)])
        ),
        forced=forced,
    )


def _integers(values: list[int]) -> Integers:
    return np.array(values, dtype=np.int64)


def _find_maker(forced: ForcedReplays, storage: int) -> int:
    maker = forced.maker[storage]
    return maker if maker >= 0 and forced.can_replay[maker] else -1


def _find_pieces(drafter: Drafter, gap: Gap) -> Iterator[tuple[int, int]]:
    """The ticks within a gap at which neither the program nor a running node holds its storage."""
    home = drafter.replay.trace.storages[gap.storage]
    begin = gap.opens + 1
    for held, until in sorted([(home.created, home.released), *drafter.replay.node_spans[gap.storage]]):
        if held >= gap.closes:
            break
        if begin < held:
            yield begin, held
        begin = max(begin, until)
    if begin < gap.closes:
        yield begin, gap.closes


def _find_before(claims: list[tuple[int, int]]) -> list[int]:
    last: dict[tuple[int, int], int] = {}
    before: list[int] = []
    for index, claim in enumerate(claims):
        before.append(last.get(claim, -1))
        last[claim] = index
    return before

"""The gaps that matter to a budget, as arrays: when each may be absent, what moving it takes, what replays it.

    claim      |=====================================|
    gap        opens |                     | closes
    held               |==| the program           |==| running nodes
    pieces                  |..............|          ticks at which its absence frees its bytes

A gap matters if it has such a tick at which the plain step is over the budget.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.ir.gaps import Gap
from elbowroom.ir.state import list_away
from elbowroom.planner.bounds.forced_replays import ForcedReplays, find_forced_replays
from elbowroom.planner.options import Manages
from elbowroom.planner.problem import Problem, make_lowest
from elbowroom.planner.schedule.draft import Drafter, Key
from elbowroom.planner.state.windows import Cycle, list_windows

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
        forced: what replays take.
        repeats: indices of gaps that every step repeats: those of the model's state. Their ticks are of the gap that
            opens in this step, or whose claim began in the step before; they may be negative, or beyond the end.
        is_clean: whether no copy out is ever needed, since nothing writes to the storage.
        live_bytes: at each tick of the plain step, less state that nothing reads any more.
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
    repeats: Integers
    is_clean: npt.NDArray[np.bool_]
    live_bytes: Numbers

    def unroll(self, gaps: Integers, end: int) -> tuple[Integers, Integers]:
        """Return these gaps, also as the steps before and after repeat them; and what to add to the ticks of each."""
        again = gaps[np.isin(gaps, self.repeats)]
        shifts = np.repeat(np.array([0, -end, end], dtype=np.int64), [len(gaps), len(again), len(again)])
        return np.concatenate((gaps, again, again)), shifts

    def sum_by(self, ticks: Integers, shares: Numbers, end: int) -> Numbers:
        """Bytes at each tick before `end` of all gaps whose tick has passed; to such a share of each."""
        gaps, shifts = self.unroll(np.arange(len(ticks)), end)
        return accumulate(np.maximum(ticks[gaps] + shifts, 0), (self.nbytes * shares)[gaps], end)

    def free(self, shares: Numbers, end: int) -> Numbers:
        """Bytes freed at each tick before `end` if each gap is absent to such a share."""
        amounts = (self.nbytes * shares)[self.piece_gap]
        return accumulate(self.piece_begin, amounts, end) - accumulate(self.piece_end, amounts, end)


def accumulate(ticks: Integers, amounts: Numbers, end: int) -> Numbers:
    """At each tick before `end`, the sum of the amounts of this tick and all before it."""
    return np.cumsum(np.bincount(ticks, weights=amounts, minlength=end + 1)[:end])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One gap, as the arrays have it."""

    key: Key
    opens: int
    closes: int
    claim: tuple[int, int]
    pieces: Spans
    is_clean: bool = False


def make_gap_arrays(problem: Problem) -> GapArrays:
    """Look through the gaps of a problem; those of the model's state come last, if the problem manages it.

    Cost: linear in the trace; a sort of the gaps.
    """
    drafter = problem.drafter
    trace, link = drafter.replay.trace, drafter.replay.costs.link
    live = np.array(problem.plain.live_bytes, dtype=float)
    if problem.manages is Manages.EVERYTHING:
        live -= count_unneeded_bytes(problem)
    over = np.concatenate(([0], np.cumsum(live > problem.budget_bytes)))
    rows = [*_list_rows(drafter), *(_list_state_rows(problem) if problem.manages is Manages.EVERYTHING else ())]
    kept = [
        row
        for row in rows
        if any(over[end] > over[begin] for begin, end in row.pieces) and drafter.replay.rounded[row.key[0]] > 0
    ]
    sizes = [trace.storages[row.key[0]].nbytes for row in kept]
    # A copy that goes on to the disk waits for it instead.
    drag = 0.0 if drafter.replay.overflow is not None else link.drag_seconds_per_byte
    moves_out, moves_back = link.out_bytes_per_second > 0, link.back_bytes_per_second > 0
    forced = find_forced_replays(trace)
    is_state = [row.key[0] in trace.state for row in kept]
    return GapArrays(
        keys=tuple(row.key for row in kept),
        nbytes=np.array([drafter.replay.rounded[row.key[0]] for row in kept], dtype=float),
        opens=_integers([row.opens for row in kept]),
        closes=_integers([row.closes for row in kept]),
        claim_begins=_integers([row.claim[0] for row in kept]),
        claim_ends=_integers([row.claim[1] for row in kept]),
        out_seconds=np.array([offload_seconds(link, size) if moves_out else np.inf for size in sizes], dtype=float),
        back_seconds=np.array([reload_seconds(link, size) if moves_back else np.inf for size in sizes], dtype=float),
        drag_seconds=np.array(sizes, dtype=float) * drag,
        maker=_integers([-1 if state else _find_maker(forced, row.key[0])
                         for row, state in zip(kept, is_state, strict=True)]),
        piece_gap=_integers([index for index, row in enumerate(kept) for _ in row.pieces]),
        piece_begin=_integers([begin for row in kept for begin, _ in row.pieces]),
        piece_end=_integers([end for row in kept for _, end in row.pieces]),
        before=_integers(_find_before(kept, trace.end)),
        forced=forced,
        repeats=np.flatnonzero(np.array(is_state, dtype=bool)),
        is_clean=np.array([row.is_clean for row in kept], dtype=bool),
        live_bytes=live,
    )  # fmt: skip


def count_unneeded_bytes(problem: Problem) -> Integers:
    """Return the bytes at each tick of state that nothing reads any more: it may leave, and never comes back."""
    replay = problem.drafter.replay
    trace = replay.trace
    lowest = make_lowest(problem.drafter, problem.budget_bytes, Manages.EVERYTHING)
    free = [
        decision for decision in lowest.state if not trace.is_reloaded(trace.state_gaps[decision.storage][decision.gap])
    ]
    found = np.zeros(trace.end, dtype=np.int64)
    for storage, spans in list_away(trace, dataclasses.replace(lowest, state=tuple(free))).items():
        for begin, end in spans:
            found[begin:end] += int(replay.rounded[storage])
    return found


def _list_rows(drafter: Drafter) -> Iterator[_Row]:
    claims = drafter.replay.trace.claims
    for gap in sorted(drafter.gaps.values(), key=lambda gap: (gap.opens, gap.storage)):
        claim = max(each for each in claims[gap.storage] if each[0] < gap.closes)
        yield _Row(key=(gap.storage, gap.index), opens=gap.opens, closes=gap.closes, claim=claim,
                   pieces=list(_find_pieces(drafter, gap)))  # fmt: skip


def _list_state_rows(problem: Problem) -> Iterator[_Row]:
    """The gaps of the model's state that come back; a claim begins at a write, and its copy serves all gaps in it."""
    replay = problem.drafter.replay
    trace, end = replay.trace, replay.trace.end
    for window in list_windows(replay, Cycle(replay), problem.drafter.min_bytes, {}):
        storage, index = window.key
        gap = trace.state_gaps[storage][index]
        if not trace.is_reloaded(gap):
            continue
        written = [write.tick for write in trace.writes[storage] if write.tick <= window.opens]
        earlier = [write.tick - end for write in trace.writes[storage]]
        begin, until = window.first + 1, window.until
        pieces = [(begin, min(until, end)), (max(begin - end, 0), until - end)]
        yield _Row(
            key=window.key, opens=window.opens, closes=window.opens + gap.length(end),
            claim=(max([*written, *earlier], default=-end), window.opens + gap.length(end)),
            pieces=[(first, last) for first, last in pieces if first < last], is_clean=not trace.writes[storage],
        )  # fmt: skip


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


def _find_before(rows: Sequence[_Row], end: int) -> list[int]:
    """By row, the row before it in the same claim; claims of the model's state may begin in the step before."""
    claims: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(rows):
        if not row.is_clean:
            claims.setdefault((row.key[0], row.claim[0] % end if row.claim[0] < 0 else row.claim[0]), []).append(index)
    before = [-1] * len(rows)
    for found in claims.values():
        found.sort(key=lambda index: rows[index].opens - rows[index].claim[0])
        for one, other in itertools.pairwise(found):
            before[other] = one
    return before

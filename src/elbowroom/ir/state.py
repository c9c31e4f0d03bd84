"""Facts about a plan's moves of the model's state that follow from the trace alone, in a step like the ones before.

op at opens    op at release                        op at back      op at closes
[==========]...[===========]                        [=========].....[==========]
                            '--- away, in ticks ---'
"""

from __future__ import annotations

import dataclasses
import enum

from elbowroom.ir.gaps import Gap
from elbowroom.ir.plan import Decision, Plan
from elbowroom.ir.trace import Span, Trace


class MoveKind(enum.Enum):
    """One move of a storage of the state, in the order in which the moves of one tick are made."""

    RELOAD = "reload"
    """Before the op: allocate the device's bytes, and begin the copy back."""
    WAIT = "wait"
    """Before the op: wait until the copy back has arrived."""
    COPY = "copy"
    """After the op: begin the copy out."""
    RELEASE = "release"
    """After the op: wait for the copy out if one is under way, and free the device's bytes."""

    @property
    def is_before(self) -> bool:
        """True if the move is made before the op of its tick."""
        return self in (MoveKind.RELOAD, MoveKind.WAIT)


@dataclasses.dataclass(frozen=True, slots=True)
class StateMove:
    """One move of a plan, at the op of a tick. `storage` and `gap` identify the decision."""

    tick: int
    kind: MoveKind
    storage: int
    gap: int


def list_moves(trace: Trace, plan: Plan) -> tuple[StateMove, ...]:
    """Return the moves of the state in one step, in order, in a step like the ones before.

    Reloads of one tick begin with those that are needed first.
    """
    copied, moves = find_copied(trace, plan), list[tuple[int, int, int, StateMove]]()
    order = {kind: place for place, kind in enumerate(MoveKind)}
    for decision in plan.state:
        gap = trace.state_gaps[decision.storage][decision.gap]
        key = (decision.storage, decision.gap)
        ticks = [(decision.release, MoveKind.RELEASE)]
        if key in copied:
            ticks.append((decision.leave, MoveKind.COPY))
        if trace.is_reloaded(gap):
            ticks += [(decision.back, MoveKind.RELOAD), (gap.closes, MoveKind.WAIT)]
        left = gap.opens + gap.length(trace.end) - get_back(gap, decision, trace.end)
        for tick, kind in ticks:
            urgency = left if kind is MoveKind.RELOAD else 0
            moves.append((tick, order[kind], urgency, StateMove(tick, kind, *key)))
    moves.sort(key=lambda move: (*move[:3], move[3].storage, move[3].gap))
    return tuple(move[3] for move in moves)


def get_back(gap: Gap, decision: Decision, end: int) -> int:
    """Return the tick of a decision's reload, plus `end` (the length of a step) if it lies in the next step."""
    return gap.opens + gap.length(end) if decision.back == gap.closes else gap.unwrap(decision.back, end)


def list_away(trace: Trace, plan: Plan) -> dict[int, list[Span]]:
    """Return the ticks at which each storage of the state is away.

    A gradient that the step makes and leaves behind is away as the gradient that the next step begins with, from there.
    """
    away: dict[int, list[Span]] = {}
    for decision in plan.state:
        gap = trace.state_gaps[decision.storage][decision.gap]
        begin, back = gap.unwrap(decision.release, trace.end) + 1, get_back(gap, decision, trace.end)
        is_made = trace.storages[decision.storage].created >= 0
        later = trace.earlier_gradients.get(decision.storage) if is_made else decision.storage
        if begin < min(back, trace.end):
            away.setdefault(decision.storage, []).append((begin, min(back, trace.end)))
        if max(begin, trace.end) < back and later is not None:
            away.setdefault(later, []).append((max(begin - trace.end, 0), back - trace.end))
    return away


def find_copied(trace: Trace, plan: Plan) -> frozenset[tuple[int, int]]:
    """Return the decisions on the state, as (storage, gap), that copy: something has written since the last copy.

    The others give up the bytes on the device for nothing.
    """
    decided = {(decision.storage, decision.gap) for decision in plan.state}
    copied = set()
    for storage in {storage for storage, _ in decided}:
        written = {write.tick for write in trace.writes[storage]}
        gaps = {gap.opens: gap for gap in trace.state_gaps[storage]}
        is_valid = False
        home = trace.storages[storage]
        lasts = home.created < 0 and home.released == trace.end  # then the last step's copy may still be valid
        rounds = 2 if lasts else 1
        for index in range(rounds):
            for use in trace.state_uses[storage]:
                is_valid = is_valid and use.tick not in written
                gap = gaps.get(use.tick)
                if gap is None or (storage, gap.index) not in decided:
                    continue
                if not is_valid and index == rounds - 1:
                    copied.add((storage, gap.index))
                is_valid = True
    return frozenset(copied)

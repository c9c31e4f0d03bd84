"""Plan: for every gap of every storage, whether it is kept, offloaded or recomputed, and when.

opens            leave      release               back         closes
  |  in use        | copying   |        away        | arriving    |   in use
  save.............begin.......wait, drop...........begin.........need     (offload)
  save.............drop...........................................replay   (recompute)

The model's state moves at ops that use some of it (`Trace.state_ticks`), in gaps that may close in the next step:

opens              release                    back           closes
  op ][ copying       op ][       away       ][ op   arriving   ][ op
"""

from __future__ import annotations

import dataclasses
import enum
import reprlib

from elbowroom.ir.slicing import OpCut
from elbowroom.units import format_bytes


class Choice(enum.StrEnum):
    """Treatment of a storage during one gap."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Decision for one gap. Ticks take effect at the first save or need at or after them.

    Attributes:
        storage, gap: identify the gap (`ir.gaps.Gap`). In a gap that wraps, ticks below `opens` are of the next step.
        leave: offload: when the copy begins. Recompute: when the storage is dropped.
        release: offload: when the device's copy is freed, after waiting for the transfer if necessary.
        back: offload: when the reload begins; equal to the need's tick to load on demand.
        segment: recompute: index in `Plan.segments`; -1 otherwise.
    """

    storage: int
    gap: int
    choice: Choice
    leave: int
    release: int
    back: int
    segment: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Ops that are replayed together, at the first need of one of their outputs.

    Attributes:
        ops: ticks of the ops, in order.
        outputs: storages that exist again afterwards.
        leaves: storages that the replay reads but does not make: kept, reloaded, or held by the program.
    """

    ops: tuple[int, ...]
    outputs: tuple[int, ...]
    leaves: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions for one trace. A gap without a decision is kept.

    Attributes:
        trace_digest: digest of the trace.
        strategy: name of the strategy that made the plan.
        budget_bytes: peak that the plan must stay within.
        decisions: sorted by (storage, gap).
        host_bytes: with a disk below the host, the most that the step uses of the host; further copies go to the disk.
            So a plan for a smaller host takes the same time on a larger one. None for unlimited.
        state: moves of the model's state, sorted by (storage, gap); `gap` is an index in `Trace.state_gaps`. Each is
            an offload. The copy out begins right after the op at `leave`, which is where the gap opens; there is none
            if nothing has written to the storage since an earlier one. The device's bytes are freed right after the op
            at `release`, once the copy is done. The reload begins right before the op at `back`, and the op at which
            the gap closes waits for it. A gradient that is released there does not come back (`Trace.is_reloaded`).
        cuts: ops that run in slices, by tick. With any, the decisions are those of a plan for the sliced trace
            (`ir.sliced_trace.slice_trace`), whose ticks and storages they name.
    """

    trace_digest: str
    strategy: str
    budget_bytes: int
    decisions: tuple[Decision, ...]
    segments: tuple[Segment, ...]
    host_bytes: int | None = None
    state: tuple[Decision, ...] = ()
    cuts: tuple[OpCut, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<Plan by {reprlib.repr(self.strategy)} within {format_bytes(self.budget_bytes)} "
            f"for trace {self.trace_digest[:12]}: {self.count_gaps(Choice.OFFLOAD)} gaps offloaded, "
            f"{self.count_gaps(Choice.RECOMPUTE)} recomputed in {len(self.segments)} segments"
            f"{f', {len(self.state)} gaps of state offloaded' if self.state else ''}"
            f"{f', {len(self.cuts)} ops in slices' if self.cuts else ''}>"
        )

    def count_gaps(self, choice: Choice) -> int:
        """Return the number of decisions for a choice. Kept gaps need no decision."""
        return sum(decision.choice is choice for decision in self.decisions)

    def find_touched(self) -> frozenset[int]:
        """Return the storages that move, and those that a replay makes or reads."""
        moved = {decision.storage for decision in self.decisions if decision.choice is not Choice.KEEP}
        return frozenset(moved.union(*((*segment.outputs, *segment.leaves) for segment in self.segments)))

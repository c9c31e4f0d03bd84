"""A Plan: for every gap of every storage, whether it stays, leaves, or is computed again, and when.

opens            leave      release               back         closes
  |  in use        | copying   |        away        | arriving    |   in use
  save.............begin.......wait, drop...........begin.........need     (offload)
  save.............drop...........................................replay   (recompute)
"""

from __future__ import annotations

import dataclasses
import enum
import reprlib

from elbowroom.units import format_bytes


class Choice(enum.StrEnum):
    """Treatment of a storage during one gap."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One gap. Ticks take effect at the first save or need at or after them.

    Attributes:
        storage, gap: which (`ir.gaps.Gap`). In a gap that wraps, ticks below its `opens` are those of the next step.
        leave: offload: when its copy begins. Recompute: when it is dropped.
        release: offload: when the device's copy is given up, after waiting for the transfer if need be.
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
    """Ops that are replayed together, at the first need of any of their outputs.

    Attributes:
        ops: ticks of the ops, in order.
        outputs: storages that exist again afterwards.
        leaves: storages the replay reads and does not make: they are kept, reloaded, or held by the program.
    """

    ops: tuple[int, ...]
    outputs: tuple[int, ...]
    leaves: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions for one trace; a gap that is not named is kept.

    Attributes:
        trace_digest: of the trace it was made for.
        strategy: what made it.
        budget_bytes: what it was made to hold.
        decisions: by (storage, gap).
        host_bytes: where there is a disk behind the host, the step uses no more of the host than this, and the rest
            goes to the disk. So a plan for a smaller host takes the same time with a larger one. None for all there is.
    """

    trace_digest: str
    strategy: str
    budget_bytes: int
    decisions: tuple[Decision, ...]
    segments: tuple[Segment, ...]
    host_bytes: int | None = None

    def __repr__(self) -> str:
        return (
            f"<Plan by {reprlib.repr(self.strategy)} within {format_bytes(self.budget_bytes)} "
            f"for trace {self.trace_digest[:12]}: {self.count_gaps(Choice.OFFLOAD)} gaps offloaded, "
            f"{self.count_gaps(Choice.RECOMPUTE)} recomputed in {len(self.segments)} segments>"
        )

    def count_gaps(self, choice: Choice) -> int:
        """Return how many gaps this was decided for. Gaps that are kept need no decision."""
        return sum(decision.choice is choice for decision in self.decisions)

    def find_touched(self) -> frozenset[int]:
        """The storages that move, and those that a replay makes or reads."""
        moved = {decision.storage for decision in self.decisions if decision.choice is not Choice.KEEP}
        return frozenset(moved.union(*((*segment.outputs, *segment.leaves) for segment in self.segments)))

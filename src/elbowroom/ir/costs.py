"""Costs: seconds and bytes of every op and transfer of one trace on one machine; and the Measurements behind them."""

from __future__ import annotations

import dataclasses
import reprlib

from elbowroom.ir.hardware import Link
from elbowroom.units import format_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Measured times and workspaces of one step. Both tuples are indexed like `Trace.ops`.

    Attributes:
        op_seconds: time of each op alone.
        workspace_bytes: peak allocation inside each op, beyond its results.
        step_seconds: the whole step, moves included; 0 if it was not timed.
        stall_seconds: the part of `step_seconds` spent waiting for moves.
    """

    op_seconds: tuple[float, ...] = dataclasses.field(repr=False)
    workspace_bytes: tuple[int, ...] = dataclasses.field(repr=False)
    step_seconds: float
    stall_seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of one trace on one machine. The tuples are indexed like `Trace.ops`.

    Attributes:
        op_seconds: time of each op.
        workspace_bytes: peak allocation inside each op, beyond its results.
        link: connects the device to the tier below.
        further_links: links further down, in order; copies that do not fit the tier below go over the first. Empty if
            that tier is the last.
        alignment_bytes: every block on the device is rounded up to a multiple of this.
        hook_seconds: time of one save or need.
        overhead_seconds: time of a step outside of ops (Python).
        measured: whether the op times and workspaces were measured, or estimated.
    """

    trace_digest: str
    profile_name: str
    op_seconds: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    link: Link
    further_links: tuple[Link, ...] = ()
    alignment_bytes: int
    hook_seconds: float
    overhead_seconds: float
    measured: bool

    @property
    def plain_seconds(self) -> float:
        """Time of the step if everything stays."""
        return sum(self.op_seconds) + self.overhead_seconds

    def __repr__(self) -> str:
        how = "measured" if self.measured else "estimated"
        return (
            f"<Costs of trace {self.trace_digest[:12]} on {reprlib.repr(self.profile_name)}: "
            f"{len(self.op_seconds)} ops in {format_seconds(sum(self.op_seconds))}, {how}>"
        )

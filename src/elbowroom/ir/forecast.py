"""Forecast: the simulator's prediction of one step under a plan or a policy."""

from __future__ import annotations

import dataclasses

from elbowroom.units import format_bytes, format_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Predicted step.

    Attributes:
        peak_bytes: most bytes on the device at once.
        peak_tick: tick of the peak.
        live_bytes: peak bytes on the device during each entry of the trace; `Trace.end` items.
        begin_seconds: begin of each entry, and the end of the last one, waits and replays included; time outside of ops
            is spread over all entries. One item longer than live_bytes; empty in forecasts of older versions.
        step_seconds: duration of the step.
        compute_seconds: ops, each counted once.
        recompute_seconds: replayed ops.
        stall_seconds: waiting for transfers.
        offloaded_bytes, reloaded_bytes: moved each way.
        lower_tier_bytes: peak bytes in the tier below.
        disk_bytes: peak bytes in the tier below that, which takes the copies that do not fit.
        reserved_bytes: peak bytes that a caching allocator would reserve; 0 if not modelled.
        fragmented_bytes: part of `reserved_bytes` lost to fragmentation.
        arena_bytes: size of the device arena if the blocks are laid out; 0 if not modelled.
        lower_arena_bytes: size of the arena of copies in the tier below; 0 if not modelled.
        disk_arena_bytes: likewise in the tier below that.
        evictions: number of storages freed before a later need.
        replays: number of segments replayed.
        state_offloaded_bytes, state_reloaded_bytes: part of the moves that is the model's state.
    """

    peak_bytes: int
    peak_tick: int
    live_bytes: tuple[int, ...]
    step_seconds: float
    compute_seconds: float
    recompute_seconds: float
    stall_seconds: float
    offloaded_bytes: int
    reloaded_bytes: int
    lower_tier_bytes: int
    disk_bytes: int = 0
    reserved_bytes: int = 0
    fragmented_bytes: int = 0
    arena_bytes: int = 0
    lower_arena_bytes: int = 0
    disk_arena_bytes: int = 0
    begin_seconds: tuple[float, ...] = ()
    evictions: int = 0
    replays: int = 0
    state_offloaded_bytes: int = 0
    state_reloaded_bytes: int = 0

    def __repr__(self) -> str:
        return (
            f"<Forecast: peak {format_bytes(self.peak_bytes)}, step {format_seconds(self.step_seconds)} "
            f"(recomputing {format_seconds(self.recompute_seconds)}, waiting {format_seconds(self.stall_seconds)}), "
            f"offloaded {format_bytes(self.offloaded_bytes)}, reloaded {format_bytes(self.reloaded_bytes)}>"
        )

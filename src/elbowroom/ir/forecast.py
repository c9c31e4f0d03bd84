"""A Forecast: what the simulator says a plan or a policy will do."""

from __future__ import annotations

import dataclasses

from elbowroom.units import format_bytes, format_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The predicted step.

    Attributes:
        peak_bytes: most bytes on the device at once.
        peak_tick: where.
        live_bytes: bytes on the device during each entry of the trace, its inner peak included; `Trace.end` figures.
        begin_seconds: when each entry begins, and when the last one ends: with waits, replays, and the time that is in
            no op spread over all of them. One figure more than live_bytes; none in a forecast of an older version.
        step_seconds: the whole step.
        compute_seconds: the ops alone, each once.
        recompute_seconds: replayed ops.
        stall_seconds: waiting for transfers.
        offloaded_bytes, reloaded_bytes: moved each way.
        lower_tier_bytes: most bytes in the tier below at once.
        disk_bytes: most bytes at once in the tier below that, where copies go for which there is no room.
        reserved_bytes: most that a caching allocator would have taken from the device; 0 where that was not asked.
        fragmented_bytes: of it, what was never in use at once with the rest: the price of holes.
        arena_bytes: what the blocks on the device take if they are laid out; 0 where that was not asked.
        lower_arena_bytes: what copies take in the tier below, laid out; 0 where that was not asked.
        disk_arena_bytes: and in the tier below that.
        evictions: how often a storage was let go that was still to be needed.
        replays: how often a segment was computed again.
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

    def __repr__(self) -> str:
        return (
            f"<Forecast: peak {format_bytes(self.peak_bytes)}, step {format_seconds(self.step_seconds)} "
            f"(recomputing {format_seconds(self.recompute_seconds)}, waiting {format_seconds(self.stall_seconds)}), "
            f"offloaded {format_bytes(self.offloaded_bytes)}, reloaded {format_bytes(self.reloaded_bytes)}>"
        )

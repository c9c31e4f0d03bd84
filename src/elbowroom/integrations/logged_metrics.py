"""Metrics of a room under names for a framework's logger."""

from __future__ import annotations

from elbowroom.room import Room

PREFIX = "elbowroom/"

LOGGED = (
    "budget_bytes", "peak_bytes", "max_peak_bytes", "step_seconds", "stall_seconds", "offloaded_bytes",
    "reloaded_bytes", "recomputed_segments",
)  # fmt: skip
"""Metrics of `Room.metrics` that vary from step to step, with the budget; a console shows them in a line."""


def list_metrics(room: Room | None) -> dict[str, int | float]:
    """Return the metrics that `LOGGED` names, each name with `PREFIX`; none without a room."""
    if room is None:
        return {}
    found = room.metrics()
    return {PREFIX + name: value for name in LOGGED if not isinstance(value := found.get(name, ""), str)}

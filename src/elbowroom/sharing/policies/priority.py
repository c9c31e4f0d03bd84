"""Strict priority: the most important job gets all that makes it faster, then the next one.

A job of lower priority waits while jobs of higher priority fill the device, at most n (q + 2 s): then it is due, and
runs at its floor.

Source: the static priorities of operating systems, with aging against starvation.
"""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.sharing.demand import Demand, admit_in_order, list_required


def allot(demands: Sequence[Demand], capacity_bytes: int) -> dict[int, int]:
    """Admit required jobs, then jobs by priority and arrival; hand out what is left in the same order."""
    by_priority = sorted(demands, key=lambda each: (-each.priority, each.arrival))
    required = list_required(demands, capacity_bytes)
    others = [each for each in by_priority if each not in required]
    admitted = admit_in_order([*required, *others], capacity_bytes)
    found = {each.job: each.floor_bytes for each in admitted}
    free_bytes = capacity_bytes - sum(found.values())
    for demand in (each for each in by_priority if each.job in found):
        extra_bytes = min(free_bytes, demand.most_bytes - demand.floor_bytes)
        found[demand.job] += extra_bytes
        free_bytes -= extra_bytes
    return found

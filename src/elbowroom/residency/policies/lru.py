"""Offloads the least recently used storage."""

from __future__ import annotations

from elbowroom.residency.online import Online


class Policy(Online):
    """Score: time of the last use. Drops only storages that cannot be offloaded."""

    def rate(self, storage: int) -> float:
        return -self.idle_seconds(storage)

    def drops(self, storage: int) -> bool:
        return False

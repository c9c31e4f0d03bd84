"""Offloads the largest storage first, for the fewest moves."""

from __future__ import annotations

from elbowroom.residency.online import Online


class Policy(Online):
    """Score: bytes, largest first. Drops only storages that cannot be offloaded."""

    def rate(self, storage: int) -> float:
        return -self.context.nbytes(storage)

    def drops(self, storage: int) -> bool:
        return False

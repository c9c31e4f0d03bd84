"""The largest is offloaded first: the fewest moves."""

from __future__ import annotations

from elbowroom.residency.online import Online


class Policy(Online):
    """Rates by bytes; never drops what can be offloaded."""

    def rate(self, storage: int) -> float:
        return -self.context.nbytes(storage)

    def drops(self, storage: int) -> bool:
        return False

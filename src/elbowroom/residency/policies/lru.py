"""What was used longest ago is offloaded."""

from __future__ import annotations

from elbowroom.residency.online import Online


class Policy(Online):
    """Rates by the time of the last use; never drops what can be offloaded."""

    def rate(self, storage: int) -> float:
        return -self.idle_seconds(storage)

    def drops(self, storage: int) -> bool:
        return False

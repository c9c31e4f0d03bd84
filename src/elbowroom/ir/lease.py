"""A Lease: the bytes that a job may hold."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Bytes that a job may hold, until another lease takes the place of this one. That happens between steps.

    Attributes:
        device_bytes: on its device.
        host_bytes: in the tier below; None for any amount.
        epoch: counts the leases of the job from 0.
    """

    device_bytes: int
    host_bytes: int | None
    epoch: int = 0

    def replace(self, device_bytes: int) -> Lease:
        """Return the lease that comes after this one."""
        return dataclasses.replace(self, device_bytes=device_bytes, epoch=self.epoch + 1)

"""Lease: the bytes that a job may hold."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Bytes that a job may hold until another lease replaces this one, between two steps.

    Attributes:
        device_bytes: on the device.
        host_bytes: in the tier below; None for unlimited.
        epoch: number of this lease among those of the job, from 0.
    """

    device_bytes: int
    host_bytes: int | None
    epoch: int = 0

    def replace(self, device_bytes: int) -> Lease:
        """Return the next lease."""
        return dataclasses.replace(self, device_bytes=device_bytes, epoch=self.epoch + 1)

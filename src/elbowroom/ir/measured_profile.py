"""MeasuredProfile: a HardwareProfile, and when and how it was measured."""

from __future__ import annotations

import dataclasses

from elbowroom.ir.hardware import HardwareProfile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    """A profile in the user's cache.

    Attributes:
        machine: hardware, number of threads, version of PyTorch and spill folder that the profile belongs to.
        most_bytes: limit on the memory that measuring took; None if it took as much as it needs.
        begin_seconds: time of measuring, in seconds since 1970.
        check_seconds: time of a little fixed work, which shows later whether the machine is as fast as it was.
    """

    machine: str
    profile: HardwareProfile
    most_bytes: int | None
    begin_seconds: float
    check_seconds: float

    def __repr__(self) -> str:
        return f"<MeasuredProfile of {self.profile!r}>"

"""OpTimes: seconds of ops that one machine measured in earlier steps."""

from __future__ import annotations

import dataclasses
import reprlib


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """Measured time of one kind of op.

    Attributes:
        key: name and shapes of the op, from `cost.op_times.make_key`.
        seconds: exponentially smoothed over the measured steps.
        steps: number of measured steps.
    """

    key: str
    seconds: float
    steps: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpTimes:
    """Measured times of one machine.

    Attributes:
        machine: hardware, number of threads and version of PyTorch that the times belong to.
        times: the least recently measured first.
    """

    machine: str
    times: tuple[OpTime, ...]

    def __repr__(self) -> str:
        return f"<OpTimes of {reprlib.repr(self.machine)}: {len(self.times)} kinds of op>"

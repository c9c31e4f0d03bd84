"""Op times that this machine measured in earlier steps, in this process or before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from elbowroom.cost.op_time_store import OpTimeStore
from elbowroom.cost.op_times import list_seconds
from elbowroom.hardware.probe import name_machine
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.op_times import OpTime, OpTimes
from elbowroom.ir.trace import Trace


class PastTimes:
    """Stored op times for one profile. There are none if the profile is of another machine or number of threads.

    Args:
        is_enabled: whether stored times are read and written.
    """

    def __init__(self, profile: HardwareProfile, *, is_enabled: bool = True) -> None:
        self._profile = profile
        self._is_enabled = is_enabled

    @property
    def machine(self) -> str:
        """Hardware and version of PyTorch that the times belong to."""
        return f"{self._profile.name}; {self._profile.isa or self._profile.device}; PyTorch {torch.__version__}"

    def load(self) -> dict[str, float]:
        """Return the seconds of each kind of op, by key (`cost.op_times.make_key`)."""
        store = self._open()
        return {} if store is None else store.load()

    def export(self) -> OpTimes:
        """Return the times with the machine that they belong to."""
        times = tuple(OpTime(key=key, seconds=seconds, steps=1) for key, seconds in self.load().items())
        return OpTimes(machine=self.machine, times=times)

    def add(self, trace: Trace, op_seconds: Sequence[float]) -> None:
        """Store the measured times of one step. `op_seconds`: indexed like `Trace.ops`."""
        self.add_seconds(list_seconds(trace, op_seconds))

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Store times by key, as `load` returns them."""
        store = self._open()
        if store is not None:
            store.add(seconds)

    def _open(self) -> OpTimeStore | None:
        # Asked for anew each time, since the program may change the number of threads.
        profile = self._profile
        if not self._is_enabled or profile.name not in _list_machines(profile.device):
            return None
        return OpTimeStore(self.machine)


def _list_machines(device: str) -> list[str]:
    if device == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [name_machine(torch.device("cuda", index)) for index in range(count)]
    return [name_machine(torch.device(device))]

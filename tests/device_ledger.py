"""A device on a CPU whose allocator only refuses requests beyond a limit on what it reserves, as CUDA's does.

Steps then run as they do on a card: nothing is asked before an allocation, ops are repeated after a refusal, and bytes
are counted between ops only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from elbowroom.hooks.cpu_ledger import CpuLedger
from elbowroom.hooks.cuda_ledger import CudaLedger
from elbowroom.hooks.ledger import MakeRoom
from elbowroom.native import library

WHOLE_BYTES = 1 << 40


class DeviceLedger(CudaLedger):
    """`CudaLedger` of a device whose allocator is the CPU's, behind the functions of `torch.cuda`."""

    def __init__(self, device: torch.device) -> None:
        self.memory = CpuLedger()
        self.refusals: list[str] = []
        self.lifts = 0
        super().__init__(device)
        library.load().replace_device_counts(self.memory.scope)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        self.memory.adopt(tensors)

    def adopt_inputs(self, tensors: list[torch.Tensor]) -> bool:
        before, self.memory.scope.limit_bytes = self.memory.scope.limit_bytes, WHOLE_BYTES
        self.memory.adopt_inputs(tensors)  # those made before the room, too, which count on a card all the time
        self.memory.scope.limit_bytes = before
        return False

    def lift_limit(self) -> None:
        self.lifts += 1
        super().lift_limit()

    @contextlib.contextmanager
    def counting(self, limit_bytes: int, make_room: MakeRoom) -> Iterator[None]:
        of_program = int(torch.cuda.get_per_process_memory_fraction() * WHOLE_BYTES)
        with self.memory.counting(of_program, self._refuse), super().counting(limit_bytes, make_room):
            yield

    def trim(self) -> None:
        self.memory.trim()

    def close(self) -> None:
        library.load().replace_device_counts(None, None)
        self.memory.close()

    def _refuse(self, requested_bytes: int, missing_bytes: int) -> bool:
        self.refusals.append("")
        raise torch.OutOfMemoryError(f"Out of memory. Tried to allocate {requested_bytes / 2**20:.2f} MiB.")


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1e3 * (other.seconds - self.seconds)


def use_device_ledger(monkeypatch: pytest.MonkeyPatch) -> list[DeviceLedger]:
    """Let rooms on the CPU count as on a card. Returns their ledgers, the latest last."""
    made: list[DeviceLedger] = []
    fraction = 1.0

    def make(device: torch.device) -> DeviceLedger:
        made.append(DeviceLedger(device))
        return made[-1]

    def set_fraction(share: float, device: Any = None) -> None:
        nonlocal fraction
        fraction = share
        made[-1].memory.scope.limit_bytes = int(share * WHOLE_BYTES)

    class Properties:
        total_memory = WHOLE_BYTES

    monkeypatch.setattr("elbowroom.room.make_ledger", make)
    replaced = {
        "get_device_properties": lambda device: Properties(),
        "get_per_process_memory_fraction": lambda device=None: fraction,
        "set_per_process_memory_fraction": set_fraction,
        "synchronize": lambda device=None: None,
        "_sleep": lambda cycles: None,
        "device": lambda device: contextlib.nullcontext(),
        "Event": FakeEvent,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return made

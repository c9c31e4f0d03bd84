"""The share of a device's memory that PyTorch's allocator may reserve, limited by the steps of all rooms."""

from __future__ import annotations

import threading

import torch

_by_device: dict[str, MemoryFractions] = {}


class MemoryFractions:
    """Limits of the steps that run on one device. The lowest is in force, and the program's own after the last step.

    Steps of several rooms may overlap, and need not end in the order in which they began.

    Args:
        device: name of a CUDA device.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._lock = threading.RLock()  # the garbage collector may end the step of another room meanwhile
        self._limits: dict[object, float] = {}
        self._lifted: set[object] = set()
        self._total_bytes = 1
        self._own: float | None = None  # the program's
        self._in_force: float | None = None

    def enter(self, owner: object) -> bool:
        """Begin a step, which limits nothing yet. Return False if the allocator has no such limit."""
        with self._lock:
            if not self._limits:
                try:
                    self._own = self._in_force = torch.cuda.get_per_process_memory_fraction(self._device)
                except RuntimeError:  # a pluggable allocator
                    return False
                self._total_bytes = torch.cuda.get_device_properties(self._device).total_memory
            assert self._own is not None
            self._limits[owner] = self._own
            return True

    def limit(self, owner: object, nbytes: int, *, is_lifted: bool) -> None:
        """Set the limit of a step, in bytes. While one is lifted, none but the program's is in force."""
        with self._lock:
            if owner in self._limits:
                self._limits[owner] = nbytes / self._total_bytes
                (self._lifted.add if is_lifted else self._lifted.discard)(owner)
                self._enforce()

    def leave(self, owner: object) -> None:
        """End a step."""
        with self._lock:
            self._limits.pop(owner, None)
            self._lifted.discard(owner)
            self._enforce()

    def _enforce(self) -> None:
        if self._own is None:
            return
        limits = () if self._lifted else tuple(self._limits.values())
        fraction = min((self._own, *limits))
        if fraction != self._in_force:
            torch.cuda.set_per_process_memory_fraction(fraction, self._device)
            self._in_force = fraction


def find_fractions(device: str) -> MemoryFractions:
    """Return the limits of a device, the same object each time."""
    return _by_device.setdefault(device, MemoryFractions(device))

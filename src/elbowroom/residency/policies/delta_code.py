"""DELTA as its public code does it: the largest and longest idle leaves; nothing moves early.

Whether it is dropped says 2 x bytes / bandwidth / recompute seconds > 1, at the first time and, here, at every time:
what the code does later compares seconds with seconds per byte and second, and its published log has no drop at all.

Source: the branch `delta` of the authors' fork of PyTorch (2022), `CheckpointTensorImpl.cpp`: the active filter is
1 / (memory x staleness); cost is commented out.
"""

from __future__ import annotations

from elbowroom.residency.online import Online


class Policy(Online):
    """1 / (bytes x idle seconds)."""

    def rate(self, storage: int) -> float:
        weight = self.context.nbytes(storage) * self.idle_seconds(storage)
        return -weight

"""DELTA as in its public code: evicts the storage with the largest bytes x idle seconds; nothing moves early.

A storage is dropped if 2 x bytes / bandwidth / recompute seconds > 1. The public code uses this test at the first
eviction of a storage only; later it compares seconds with seconds per byte and second, and its published log shows no
drop at all. Here the test applies every time.

Source: the branch `delta` of the authors' fork of PyTorch (2022), `CheckpointTensorImpl.cpp`: the active filter is
1 / (memory x staleness); cost is commented out.
"""

from __future__ import annotations

from elbowroom.residency.online import Online


class Policy(Online):
    """Score: 1 / (bytes x idle seconds)."""

    def rate(self, storage: int) -> float:
        weight = self.context.nbytes(storage) * self.idle_seconds(storage)
        return -weight

"""Counts the gradient buckets that DistributedDataParallel made before the room was there.

They belong to C++ code that gives nobody access to them. The ledger expects storages of their sizes, and finds them
when the first backward pass copies gradients into them. In the second step DDP allocates others, in the order in which
gradients were ready, and frees the first; with `find_unused_parameters` it keeps these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elbowroom.hooks.ledger import Ledger


class GradientBuckets:
    """The buckets of a model's replicas, in the ledger.

    Args:
        replicas: `DistributedDataParallel` modules.
        ledger: of the room.
    """

    def __init__(self, replicas: Sequence[Any], ledger: Ledger) -> None:
        self._scope = ledger.scope
        self._first = [each for each in replicas if not each._has_rebuilt_buckets]
        sizes = [size for each in replicas for size in list_bucket_bytes(each)]
        if self._scope is not None and sizes:
            self._scope.expect(sizes)

    def look(self) -> None:
        """Look whether DDP has allocated other buckets by now: then those that no backward pass has read are gone."""
        if self._scope is not None and self._first and all(each._has_rebuilt_buckets for each in self._first):
            self._first = []
            self._scope.expect([])


def list_bucket_bytes(replica: Any) -> list[int]:
    """Return the bytes of each bucket of a `DistributedDataParallel` module."""
    figures = replica._get_ddp_logging_data()
    sizes = figures.get("rebuilt_bucket_sizes" if replica._has_rebuilt_buckets else "bucket_sizes")
    return [int(each) for each in str(sizes or "").split(",") if each.strip()]

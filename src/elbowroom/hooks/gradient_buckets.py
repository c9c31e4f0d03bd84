"""Counts the gradient buckets that DistributedDataParallel made before the room was there.

They belong to C++ code that gives nobody access to them. In the second step DDP allocates others in the order in which
gradients were ready, which the ledger sees; with `find_unused_parameters` it keeps the first ones.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import torch

from elbowroom.hooks.ledger import Ledger


class GradientBuckets:
    """Stands for the buckets in the ledger: as many bytes of address space, which take no memory.

    Args:
        replicas: `DistributedDataParallel` modules of a model.
        ledger: of the room.
    """

    def __init__(self, replicas: Sequence[Any], ledger: Ledger) -> None:
        self._replicas = tuple(replicas)
        self._stand_in: torch.Tensor | None = None
        nbytes = 0 if ledger.scope is None else sum(map(count_bucket_bytes, replicas))
        if nbytes:
            self._stand_in = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
            ledger.adopt([self._stand_in])

    def look(self) -> None:
        """Look whether DDP has allocated other buckets by now."""
        if self._stand_in is not None and not any(map(count_bucket_bytes, self._replicas)):
            self._stand_in = None


def count_bucket_bytes(replica: Any) -> int:
    """Return the bytes of the buckets that a `DistributedDataParallel` module has made first; 0 if it has others."""
    figures = replica._get_ddp_logging_data()
    if int(figures.get("has_rebuilt_buckets") or 0):
        return 0
    sizes = str(figures.get("bucket_sizes") or "")
    return sum(int(each) for each in sizes.split(",") if each.strip())

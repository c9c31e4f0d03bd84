"""Counts the gradient buckets that DistributedDataParallel made before the room was there.

They belong to C++ code that gives nobody access to them. The ledger expects as many bytes, and finds them when a
backward pass copies gradients into them. In its second step DDP allocates others, in the order in which gradients were
ready, and frees the first; with `find_unused_parameters` it keeps these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elbowroom.hooks.ledger import Ledger
from elbowroom.native import library


class GradientBuckets:
    """The buckets of a model's replicas, in the ledger.

    Args:
        replicas: `DistributedDataParallel` modules.
        ledger: of the room.
    """

    def __init__(self, replicas: Sequence[Any], ledger: Ledger) -> None:
        self._scope = ledger.scope
        if self._scope is None:  # the allocator of a card counts them
            replicas = ()
        self._first = [each for each in replicas if not each._has_rebuilt_buckets]
        self._nbytes = {id(each): count_unknown_bytes(each) for each in replicas}
        if self._nbytes:
            self._scope.expect(sum(self._nbytes.values()))

    def look(self) -> None:
        """Look whether DDP has allocated other buckets by now. Those that no backward pass has read are gone then."""
        for each in [each for each in self._first if each._has_rebuilt_buckets]:
            self._first.remove(each)
            del self._nbytes[id(each)]
            self._scope.expect(min(self._scope.expected_bytes, sum(self._nbytes.values())))


def count_unknown_bytes(replica: Any) -> int:
    """Return the bytes of a module's buckets, without those that gradients are views of."""
    sizes = str(replica._get_ddp_logging_data().get("bucket_sizes") or "")
    nbytes = sum(int(each) for each in sizes.split(",") if each.strip())
    parameters, are_sparse = replica._build_params_for_reducer()
    nbytes -= sum(int(each.nbytes) for each, is_sparse in zip(parameters, are_sparse, strict=True) if is_sparse)
    if replica.gradient_as_bucket_view:
        gradients = [each.grad for each in parameters if each.grad is not None]
        nbytes -= library.load().count_storage_bytes(gradients)
    return max(0, nbytes)

"""The buffers of a step: every storage of a Trace, with its lifetime."""

from __future__ import annotations

from elbowroom.ir.buffers import Buffer
from elbowroom.ir.trace import Trace

ALIGNMENT_BYTES = 512
"""Alignment of blocks on a CUDA device."""


def list_buffers(trace: Trace, alignment_bytes: int = ALIGNMENT_BYTES) -> tuple[Buffer, ...]:
    """Return one buffer per nonempty storage, by storage id; times are ticks.

    A buffer lives from the op that creates the storage until the program, autograd and the running backward node have
    all released it.
    """
    ends = [storage.released for storage in trace.storages]
    for save in trace.saves:
        ends[save.storage] = max(ends[save.storage], save.released)
    for need in trace.needs:
        storage = trace.saves[need.save].storage
        ends[storage] = max(ends[storage], need.released)
    return tuple(
        Buffer(
            id=storage.id,
            lower=max(storage.created, 0),
            upper=max(ends[storage.id], max(storage.created, 0) + 1),
            nbytes=storage.nbytes,
            alignment=alignment_bytes,
        )
        for storage in trace.storages
        if storage.nbytes > 0
    )

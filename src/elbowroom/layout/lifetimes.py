"""The buffers of a step: every storage of a Trace, for as long as anything holds it."""

from __future__ import annotations

from elbowroom.ir.buffers import Buffer
from elbowroom.ir.trace import Trace

ALIGNMENT_BYTES = 512
"""Of blocks on a CUDA device."""


def list_buffers(trace: Trace, alignment_bytes: int = ALIGNMENT_BYTES) -> tuple[Buffer, ...]:
    """One buffer a storage that has bytes, by storage id; the times are ticks.

    Each is there from the op that makes it until the program, autograd and the running backward node have let go of it.
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

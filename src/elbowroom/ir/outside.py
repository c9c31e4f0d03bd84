"""Device memory that exists before a step, and belongs to none of its tensors: a storage of its own in the trace.

That is other memory of the program, and on CUDA the workspaces that cuBLAS keeps per thread.
"""

from __future__ import annotations

import dataclasses

from elbowroom.ir.trace import Role, Storage, Trace

LABEL = "outside of the step"


def count_outside(trace: Trace) -> int:
    """Return the bytes of that storage; 0 if there is none."""
    last = trace.storages[-1] if trace.storages else None
    return last.nbytes if last is not None and last.label == LABEL else 0


def set_outside(trace: Trace, base_bytes: int) -> Trace:
    """Return a trace with a storage for the bytes that its other storages do not explain; without one if they do.

    Args:
        base_bytes: allocated when the step began.
    """
    storages = trace.storages[:-1] if count_outside(trace) else trace.storages
    block = 512 if trace.device == "cuda" else 1  # bytes: granularity of the caching allocator
    known_bytes = sum(-(-storage.nbytes // block) * block for storage in storages if storage.created < 0)
    if base_bytes > known_bytes:
        outside = Storage(
            id=len(storages), nbytes=base_bytes - known_bytes, role=Role.BUFFER, created=-1, released=trace.end,
            label=LABEL,
        )  # fmt: skip
        storages = (*storages, outside)
    return dataclasses.replace(trace, storages=storages)

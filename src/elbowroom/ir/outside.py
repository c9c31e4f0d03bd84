"""Device memory that exists before a step, and belongs to none of its tensors: storages of their own in the trace.

That is other memory of the program, and on CUDA the workspaces that cuBLAS keeps per thread. Some of it may be freed
during the step: a loop holds the logits and the loss of one step until the next has computed its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from elbowroom.ir.labels import HELD, OUTSIDE
from elbowroom.ir.lifetimes import Lifetimes
from elbowroom.ir.trace import Role, Storage, Trace

PARTS = 16
"""What is freed during a step is told apart by when, in parts of at least this share of it."""


def count_outside(trace: Trace) -> int:
    """Return the bytes of that storage; 0 if there is none."""
    last = trace.storages[-1] if trace.storages else None
    return last.nbytes if last is not None and last.label == OUTSIDE else 0


def set_outside(trace: Trace, base_bytes: int) -> Trace:
    """Return a trace with storages for the bytes that its other storages do not explain; without any if they do.

    Of what is freed during the step there is no more than before, and less where there are fewer bytes.

    Args:
        base_bytes: allocated when the step began.
    """
    storages = [each for each in trace.storages if each.label not in (HELD, OUTSIDE)]
    held = [each for each in trace.storages if each.label == HELD]
    former_bytes = sum(each.nbytes for each in held) + count_outside(trace)
    outside_bytes = left_bytes = max(0, base_bytes - _count_before(trace, storages))
    for each in held:
        nbytes = each.nbytes * min(outside_bytes, former_bytes) // former_bytes
        storages.append(_make_storage(len(storages), nbytes, each.released, HELD))
        left_bytes -= nbytes
    if left_bytes > 0:
        storages.append(_make_storage(len(storages), left_bytes, trace.end, OUTSIDE))
    return dataclasses.replace(trace, storages=tuple(storages))


def note_freed(trace: Trace, op_bytes: Sequence[int]) -> Trace:
    """Return a trace of `set_outside` with storages for those of these bytes that are freed during the step.

    Args:
        op_bytes: live bytes when each op began, as if nothing had been moved.
    """
    outside_bytes = left_bytes = count_outside(trace)
    if not outside_bytes or len(op_bytes) != len(trace.ops) or not op_bytes:
        return trace
    block = _find_block(trace)
    storages = list(trace.storages[:-1])
    known = Lifetimes(dataclasses.replace(trace, storages=tuple(storages))).count_storages(block)
    for storage in storages:
        if storage.created >= 0:
            known[storage.created] -= -(-storage.nbytes // block) * block  # made by the op
    unexplained = [live - known[op.tick] for op, live in zip(trace.ops, op_bytes, strict=True)]
    most_left = list(itertools.accumulate(reversed(unexplained), max))[::-1]  # as memory grows for other reasons, too
    for op, most in zip(trace.ops, most_left, strict=True):
        freed_bytes = left_bytes - max(0, outside_bytes - (most_left[0] - most))
        if freed_bytes > outside_bytes // PARTS:
            storages.append(_make_storage(len(storages), freed_bytes, op.tick, HELD))
            left_bytes -= freed_bytes
    if left_bytes > 0:
        storages.append(_make_storage(len(storages), left_bytes, trace.end, OUTSIDE))
    return dataclasses.replace(trace, storages=tuple(storages))


def _find_block(trace: Trace) -> int:
    """Return the granularity of the device's allocator, in bytes."""
    return 512 if trace.device == "cuda" else 1


def _count_before(trace: Trace, storages: Sequence[Storage]) -> int:
    """Return the bytes of those storages that exist before the step."""
    block = _find_block(trace)
    return sum(-(-storage.nbytes // block) * block for storage in storages if storage.created < 0)


def _make_storage(index: int, nbytes: int, released: int, label: str) -> Storage:
    return Storage(id=index, nbytes=nbytes, role=Role.BUFFER, created=-1, released=released, label=label)

"""State that no op of a step uses: another model's, or that of an optimizer that steps less often.

It can be away during the whole step. In the trace of a plan that counts on that, such a storage has no bytes, and its
contents are never in memory (`Trace.presences`).
"""

from __future__ import annotations

import dataclasses

from elbowroom.ir.trace import MIN_STATE_BYTES, STATE_ROLES, Presence, Storage, Trace


def leave_out_unused_state(trace: Trace, min_bytes: int) -> Trace:
    """Return a trace in which state that no op uses takes no memory; the same trace if there is no such state.

    Args:
        min_bytes: smaller storages never leave.
    """
    used = {view.storage for op in trace.ops for view in (*op.reads, *op.writes)}
    used |= {save.storage for save in trace.saves}
    storages = list(trace.storages)
    presences = list(trace.presences)
    for each in trace.storages:
        is_kept = each.created < 0 and each.released == trace.end
        is_state = each.role in STATE_ROLES and each.module is not None  # not other memory of the program
        if is_kept and is_state and each.id not in used and each.nbytes >= max(min_bytes, MIN_STATE_BYTES):
            storages[each.id] = dataclasses.replace(each, nbytes=0)
            presences.append(Presence(storage=each.id, begin=0, end=0))
    if len(presences) == len(trace.presences):
        return trace
    return dataclasses.replace(trace, storages=tuple(storages), presences=tuple(presences))


def list_unused_state(trace: Trace) -> list[Storage]:
    """Return the storages that `leave_out_unused_state` has left out."""
    never = [trace.storages[each.storage] for each in trace.presences if each.begin == each.end == 0]
    return [each for each in never if each.role in STATE_ROLES and not each.nbytes]

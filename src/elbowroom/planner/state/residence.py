"""Writes moves of the model's state into a trace, so that a planner of activations can work beside them.

the state's storage   |==========|         (away)         |===|  (away)
in the new trace      |  0 bytes, always on the device: ops and replays find it  |
                      |==========|                        |===|    storages that no op uses and that stay
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from elbowroom.ir.lifetimes import Lifetimes
from elbowroom.ir.plan import Decision, Plan
from elbowroom.ir.state import list_away
from elbowroom.ir.trace import Storage, Trace


def fix_state(trace: Trace, state: Sequence[Decision]) -> Trace:
    """Return a trace in which the state's moves are made, and its storages cannot move.

    Plans for it are plans for `trace`, if replays find the state that they read. Costs of `trace` hold for it.
    """
    plan = Plan(trace_digest="", strategy="", budget_bytes=0, decisions=(), segments=(), state=tuple(state))
    lifetimes = Lifetimes(trace, plan)
    storages = list(trace.storages)
    held: list[Storage] = []
    for storage in list_away(trace, plan):
        home = storages[storage]
        storages[storage] = dataclasses.replace(home, nbytes=0)
        for begin, end in lifetimes.spans(storage):
            index = len(storages) + len(held)
            held.append(dataclasses.replace(home, id=index, created=begin, released=end))
    return dataclasses.replace(trace, storages=(*storages, *held))

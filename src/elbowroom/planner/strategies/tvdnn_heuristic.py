"""tvDNN: offload the farthest next use when memory runs short; reload in order of use as soon as possible.

Source: J. Park, H. Cho, W. Jung, J. Lee, "Transparent GPU memory management for DNNs" (tvDNN), poster, PPoPP 2018: a
schedule of swaps found by heuristics, or by an integer program (`tvdnn_ilp`). Only its abstract was available.
Inferred: that the heuristic is Belady's rule, as for any cache whose future is known (L. A. Belady, "A study of
replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966); that storages that have a copy
and can return in time go first; and that a reloaded storage is not evicted again before its use. The poster moves
sections of buffers: those of ops that run in slices, which a plan has where whole ops do not fit; other storages move
whole.

A copy begins as soon as its gap opens, not when memory runs short: an early copy costs nothing, and the device's copy
stays until then.
"""

from __future__ import annotations

from elbowroom.ir.plan import Plan
from elbowroom.planner.heuristics.eviction import sweep_offloads
from elbowroom.planner.problem import Problem


def make_plan(problem: Problem) -> Plan:
    """Return the plan of one sweep; it fits wherever offloading can."""
    return sweep_offloads(problem, "tvdnn_heuristic")

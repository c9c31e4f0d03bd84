"""SuperNeurons: replay cheap layers from the checkpoints between them; cache the checkpoints' outputs on the device.

If everything fits, everything stays. Otherwise the outputs of cheap layers between two checkpoints are dropped and
replayed from them. A segment is replayed once for all its layers (speed-centric) if everything that it makes is no more
than the largest layer needs for its backward pass; otherwise once for each layer (memory-centric), so that no segment
raises the peak above that of the largest layer. Outputs of checkpoints are offloaded only when memory runs short, least
recently used first (the tensor cache). When the backward pass of a checkpoint begins, the storages that the next
checkpoint in backward order needs are prefetched if memory suffices; otherwise they are reloaded on demand.

Checkpoints are convolutions, matrix products, and storages that a later layer reads across one of these: forks, joins
and concatenations. Layers computed from them without a convolution or product are cheap: pooling, activations,
normalisations. A storage that cannot be replayed, such as the mask of a dropout, is treated as a checkpoint's.

Source: L. Wang, J. Ye, Y. Zhao, W. Wu, A. Li, S. L. Song, Z. Xu, T. Kraska, "SuperNeurons: dynamic GPU memory
management for training deep neural networks", PPoPP 2018, section 3; the kinds of checkpoints and the comparison of
segments with the largest layer as in the authors' code. Inferred: that prefetches wait for memory, and that all this
happens only if the step does not fit. More favourable than the paper: the copy of a storage that may have to leave
begins when it is saved, not when memory runs short. Its choice of workspaces by free memory has no counterpart: a trace
has one algorithm an op.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection

from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import PERSISTENT_ROLES, Op, Trace
from elbowroom.planner.heuristics.eviction import EvictableGap, EvictionSweep, Rank
from elbowroom.planner.heuristics.layers import find_layers
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.assembly import Keeps, ReplayStep, assemble, list_replays
from elbowroom.planner.schedule.draft import Drafter, Key
from elbowroom.planner.schedule.memory_curve import MemoryCurve


def make_plan(problem: Problem) -> Plan:
    """Return a plan that replays cheap layers and offloads as the budget requires; without moves if everything fits."""
    drafter, budget_bytes = problem.drafter, problem.budget_bytes
    if problem.fits(problem.plain):
        return assemble(drafter, "superneurons", budget_bytes, offloads={})
    cheap = _find_cheap(drafter)
    replays = _list_replays(drafter, cheap)
    replayed = assemble(drafter, "superneurons", budget_bytes, offloads={}, replays=replays)
    load = MemoryCurve(drafter, drafter.replay.run(replayed).live_bytes)
    gaps = _list_evictable_gaps(drafter, cheap, replays)
    times = EvictionSweep(drafter, load, budget_bytes, gaps, _least_recently_used(drafter)).run()
    return assemble(drafter, "superneurons", budget_bytes, offloads=times, replays=replays)


def _find_cheap(drafter: Drafter) -> frozenset[Key]:
    """Return the gaps of storages that replay without a checkpoint's op and are not read beyond the next checkpoint.

    Cost: for each, linear in the ops since the checkpoints before it.
    """
    trace = drafter.replay.trace
    end = trace.needs[0].tick if trace.needs else 0
    costly = [op.tick for op in trace.ops if op.tick < end and _is_costly(op)]
    made: dict[int, int] = {}
    read: dict[int, int] = {}
    for op in trace.ops:
        if op.tick < end:
            made.update((view.storage, op.tick) for view in op.writes)
            read.update((view.storage, op.tick) for view in op.reads)
    found: set[Key] = set()
    for storage in sorted((key[0] for key in drafter.gaps if not key[1]), key=lambda storage: made.get(storage, end)):
        if storage not in made:
            continue
        following = bisect.bisect(costly, made[storage])
        upto = costly[following] if following < len(costly) else end
        if read.get(storage, 0) <= upto and _is_cheap(drafter, storage, found, costly):
            found.add((storage, 0))
    return frozenset(found)


def _is_cheap(drafter: Drafter, storage: int, cheap: set[Key], costly: list[int]) -> bool:
    closure = drafter.find_closure(
        storage, drafter.gaps[storage, 0].closes, lambda other: other == storage or (other, 0) in cheap
    )
    return closure is not None and not any(
        tick == costly[min(bisect.bisect_left(costly, tick), len(costly) - 1)] for tick in closure.ops if costly
    )


def _is_costly(op: Op) -> bool:
    return op.flops > 0 or "convolution" in op.name


def _list_replays(drafter: Drafter, cheap: Collection[Key]) -> list[ReplayStep]:
    """Return the replays; each keeps its intermediate results if all of them fit into the largest layer's need."""
    rounded, ops = drafter.replay.rounded, {op.tick: op for op in drafter.replay.trace.ops}
    bottleneck = _find_bottleneck(drafter)
    fast: set[Key] = set()
    for replay in _replay_all(drafter, cheap, lambda key, tick: True):
        made = {view.storage for tick in replay.segment.ops for view in ops[tick].writes}
        if sum(int(rounded[storage]) for storage in made) <= bottleneck:
            fast.update(replay.fills)
    return _replay_all(drafter, cheap, lambda key, tick: key in fast)


def _replay_all(drafter: Drafter, dropped: Collection[Key], keeps: Keeps) -> list[ReplayStep]:
    """Return the replays of these gaps, except those that depend on storages that are gone by then: they are kept."""
    left = set(dropped)
    while True:
        replays: list[ReplayStep] = []
        for each in list_replays(drafter, left, keeps):
            if not isinstance(each, ReplayStep):
                left.discard(each)
                break
            replays.append(each)
        else:
            return replays


def _find_bottleneck(drafter: Drafter) -> int:
    """Return the most bytes that one backward op reads, writes and uses as workspace, without persistent storages."""
    replay = drafter.replay
    trace = replay.trace
    begin = trace.needs[0].tick if trace.needs else trace.end
    most = 0
    for op, workspace in zip(trace.ops, replay.costs.workspace_bytes, strict=True):
        if op.tick > begin:
            touched = {view.storage for view in (*op.reads, *op.writes)}
            held = sum(replay.rounded[each] for each in touched if trace.storages[each].role not in PERSISTENT_ROLES)
            most = max(most, workspace + int(held))
    return most


def _list_evictable_gaps(drafter: Drafter, cheap: Collection[Key], replays: list[ReplayStep]) -> list[EvictableGap]:
    """Return the gaps of checkpoint outputs."""
    never_out = {storage for storage, _ in cheap}
    wanted: dict[int, list[int]] = {}
    for replay in replays:
        for leaf in replay.segment.leaves:
            wanted.setdefault(leaf, []).append(replay.tick)
    begins = sorted(
        {layer.backward for layer in find_layers(drafter.replay.trace) if layer.is_costly and layer.backward >= 0}
    )
    found = []
    for key, gap in sorted(drafter.gaps.items()):
        if key[0] not in never_out:
            closes = min([tick for tick in wanted.get(key[0], ()) if gap.opens < tick] + [gap.closes])
            before = bisect.bisect(begins, closes) - 2
            returns = begins[before] if before >= 0 else closes
            found.append(EvictableGap(key=key, opens=gap.opens, closes=closes, returns=returns))
    return found


def _least_recently_used(drafter: Drafter) -> Rank:
    uses = _list_uses(drafter.replay.trace)

    def rank(gap: EvictableGap, tick: int, is_clean: bool) -> tuple[float, ...]:
        ticks = uses[gap.key[0]]
        return (-float(ticks[bisect.bisect(ticks, tick) - 1]),)

    return rank


def _list_uses(trace: Trace) -> dict[int, list[int]]:
    """Return, by storage, the ticks at which an op or autograd uses it, in order."""
    uses: dict[int, set[int]] = {}
    for op in trace.ops:
        for view in (*op.reads, *op.writes):
            uses.setdefault(view.storage, set()).add(op.tick)
    for save in trace.saves:
        uses.setdefault(save.storage, set()).add(save.tick)
    for need in trace.needs:
        uses.setdefault(trace.saves[need.save].storage, set()).add(need.tick)
    return {storage: sorted(ticks) for storage, ticks in uses.items()}

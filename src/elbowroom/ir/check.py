"""Validates values by themselves and against each other, independently of planner and simulator."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from elbowroom.errors import TraceError
from elbowroom.ir.arguments import check_kinds
from elbowroom.ir.check_state import check_state
from elbowroom.ir.costs import Costs, Measurements
from elbowroom.ir.gaps import Gap
from elbowroom.ir.hardware import HardwareProfile, Link
from elbowroom.ir.network import Network
from elbowroom.ir.plan import Choice, Decision, Plan, Segment
from elbowroom.ir.sliced_trace import slice_trace
from elbowroom.ir.trace import Need, Op, Save, Trace


def check_noun(value: object) -> None:
    """Check a value by itself; types without invariants pass.

    Raises:
        TraceError: names the first inconsistency.
    """
    if isinstance(value, Trace):
        check_trace(value)
    elif isinstance(value, HardwareProfile):
        _check_profile(value)
    elif isinstance(value, Costs):
        _check_amounts(value)
        _require(value.alignment_bytes > 0, f"alignment_bytes is {value.alignment_bytes}")
        _check_link(value.link, "link")
        for index, link in enumerate(value.further_links):
            _check_link(link, f"further_links[{index}]")
    elif isinstance(value, Measurements):
        _check_amounts(value)
    elif isinstance(value, Network):
        _check_network(value)


LONGEST_LATENCY_SECONDS = 3600.0
"""Latency of a link beyond which a profile or costs are taken to be damaged; solvers cannot count with any number."""


def _check_profile(profile: HardwareProfile) -> None:
    _require(profile.alignment_bytes > 0, f"alignment_bytes is {profile.alignment_bytes}")
    for index, rate in enumerate(profile.rates):
        _require(0 < rate.per_second < math.inf, f"rates[{index}] is {rate.per_second} per second")
    for index, tier in enumerate(profile.tiers):
        _require(tier.capacity_bytes >= 0, f"tiers[{index}] has {tier.capacity_bytes} bytes")
    for index, link in enumerate(profile.links):
        _check_link(link, f"links[{index}]")
        ends = tuple(tier.name for tier in profile.tiers[index : index + 2])
        _require(
            (link.upper, link.lower) == ends, f"links[{index}] joins {link.upper!r} and {link.lower!r}, not {ends}"
        )


def _check_link(link: Link, place: str) -> None:
    for rate in (link.out_bytes_per_second, link.back_bytes_per_second):
        _require(0 < rate < math.inf, f"{place} moves {rate} bytes per second")
    for latency in (link.out_latency_seconds, link.back_latency_seconds):
        _require(latency <= LONGEST_LATENCY_SECONDS, f"{place} has a latency of {latency} seconds")


def _check_network(network: Network) -> None:
    _require(bool(network.levels), "levels are empty; a network has at least one")
    for index, level in enumerate(network.levels):
        place = f"levels[{index}]"
        _require(0 < level.bytes_per_second < math.inf, f"{place} moves {level.bytes_per_second} bytes per second")
        _require(level.members is None or level.members >= 2, f"{place} joins {level.members} members, not 2 or more")
        _require(
            level.members is not None or index == len(network.levels) - 1,
            f"{place} joins any number of members, so there is nothing for the levels after it",
        )


def _check_amounts(value: Costs | Measurements) -> None:
    count = len(value.op_seconds)
    _require(
        len(value.workspace_bytes) == count, f"{count} op_seconds and {len(value.workspace_bytes)} workspace_bytes"
    )
    for index, nbytes in enumerate(value.workspace_bytes):
        _require(nbytes >= 0, f"workspace_bytes[{index}] is {nbytes}")


def check_trace(trace: Trace) -> None:
    """Check a trace by itself.

    Raises:
        TraceError: names the first inconsistency.
    """
    for index, storage in enumerate(trace.storages):
        _require(storage.id == index, f"storages[{index}] has id {storage.id}")
        _require(storage.nbytes >= 0, f"storages[{index}] has {storage.nbytes} bytes")
        _require(
            -1 <= storage.created < max(trace.end, 1) and storage.created <= storage.released <= trace.end,
            f"storages[{index}] lives from {storage.created} to {storage.released} in a trace that ends at {trace.end}",
        )
    ticks: set[int] = set()
    kinds: dict[str, Sequence[Op | Save | Need]] = {"ops": trace.ops, "saves": trace.saves, "needs": trace.needs}
    for kind, entries in kinds.items():
        last = -1
        for index, entry in enumerate(entries):
            _require(last < entry.tick < trace.end, f"{kind}[{index}] has tick {entry.tick} after {last}")
            _require(entry.tick not in ticks, f"{kind}[{index}] shares tick {entry.tick} with another entry")
            ticks.add(entry.tick)
            last = entry.tick
    _require(len(ticks) == trace.end, f"{len(ticks)} entries do not fill {trace.end} ticks")
    for index, op in enumerate(trace.ops):
        for view in (*op.reads, *op.writes):
            _require(
                0 <= view.storage < len(trace.storages) and view.version >= 0 and min(view.shape, default=0) >= 0,
                f"ops[{index}] ({op.name}) has a view of storage {view.storage}, version {view.version}, {view.shape}",
            )
        _require(op.flops >= 0, f"ops[{index}] ({op.name}) has {op.flops} flops")
    for index, each in enumerate(trace.presences):
        _require(
            0 <= each.storage < len(trace.storages) and 0 <= each.begin <= each.end <= trace.end,
            f"presences[{index}] is of storage {each.storage}, from {each.begin} to {each.end}",
        )
    _check_versions(trace)
    for index, save in enumerate(trace.saves):
        _require(0 <= save.storage < len(trace.storages), f"saves[{index}] is of storage {save.storage}")
        _require(save.tick < save.released <= trace.end, f"saves[{index}] is released at {save.released}")
    for index, need in enumerate(trace.needs):
        _require(0 <= need.save < len(trace.saves), f"needs[{index}] is of save {need.save}")
        _require(trace.saves[need.save].tick < need.tick, f"needs[{index}] comes before its save")
        _require(need.tick < need.released <= trace.end, f"needs[{index}] is released at {need.released}")


def _check_versions(trace: Trace) -> None:
    """Check that each op reads the latest version, and that the op at `created` makes the storage."""
    versions = {storage.id: 0 for storage in trace.storages if storage.created < 0}
    for index, op in enumerate(trace.ops):
        place = f"ops[{index}] ({op.name})"
        for view in op.reads:
            found = versions.get(view.storage)
            _require(found == view.version, f"{place} reads version {view.version} of storage {view.storage}, "
                     f"whose version is {found}")  # fmt: skip
        for storage, version in sorted({(view.storage, view.version) for view in op.writes}):
            created, before = trace.storages[storage].created, versions.get(storage, -1)
            _require(version == before + 1, f"{place} writes version {version} of storage {storage} after {before}")
            _require(before >= 0 or created == op.tick, f"{place} makes storage {storage}, created at {created}")
            versions[storage] = version
    for home in trace.storages:
        _require(home.id in versions, f"storages[{home.id}] is made by no op")


def check(trace: Trace, plan: Plan) -> None:
    """Check a plan against its trace: every move is possible, and every storage is back when it is needed.

    Raises:
        UsageError: one of them is something else.
        TraceError: names the first decision that cannot be carried out, and why.
    """
    check_kinds(trace=(trace, Trace), plan=(plan, Plan))
    if plan.cuts:
        trace = slice_trace(trace, plan.cuts).trace
    gaps = {(storage, gap.index): gap for storage, found in trace.gaps.items() for gap in found}
    decided: dict[tuple[int, int], Decision] = {}
    for decision in plan.decisions:
        key = (decision.storage, decision.gap)
        place = f"decision for storage {decision.storage}, gap {decision.gap}"
        _require(key in gaps, f"{place}: there is no such gap")
        _require(key not in decided, f"{place}: it is decided twice")
        _require(decision.storage in trace.movable, f"{place}: this storage may not leave the device")
        gap = gaps[key]
        decided[key] = decision
        check_ticks(gap, decision, trace.end)
        if decision.choice is Choice.RECOMPUTE:
            _require(0 <= decision.segment < len(plan.segments), f"{place}: there is no segment {decision.segment}")
            outputs = plan.segments[decision.segment].outputs
            _require(decision.storage in outputs, f"{place}: segment {decision.segment} does not make it")
    drops = [(gaps[key], decision) for key, decision in decided.items() if decision.choice is Choice.RECOMPUTE]
    versions = _Versions(trace)
    replays: dict[int, int] = {}  # when each segment runs: at the first need of any of its outputs
    for gap, decision in drops:
        replays[decision.segment] = min(replays.get(decision.segment, trace.end), gap.closes)
    for index, segment in enumerate(plan.segments):
        _require(index in replays, f"segment {index}: nothing uses it")
        _check_segment(trace, versions, index, segment, replays[index])
    _check_drops(trace, plan, drops, replays)
    check_state(trace, plan, replays)


def check_ticks(gap: Gap, decision: Decision, end: int) -> None:
    """Check the ticks of a decision, in steps that end at tick `end`.

    Raises:
        TraceError: one lies outside the gap or the step, or they are out of order; or a storage that is dropped in
            this step would have to be recomputed in the next one.
    """
    place = f"decision for storage {decision.storage}, gap {decision.gap}"
    closes = gap.opens + gap.length(end)
    leave, release, back = (gap.unwrap(tick, end) for tick in (decision.leave, decision.release, decision.back))
    if decision.choice is Choice.OFFLOAD:
        back = closes if decision.back == gap.closes else back
        is_in_step = all(0 <= tick < end for tick in (decision.leave, decision.release, decision.back))
        in_order = gap.opens <= leave <= release < closes and release <= back <= closes
        _require(is_in_step and in_order, f"{place}: ticks out of order")
    elif decision.choice is Choice.RECOMPUTE:
        _require(not gap.is_wrapping, f"{place}: a replay in the next step cannot run ops of this one")
        _require(gap.opens <= leave < closes, f"{place}: dropped outside of its gap")


def _check_drops(trace: Trace, plan: Plan, drops: list[tuple[Gap, Decision]], replays: dict[int, int]) -> None:
    """Check that every drop precedes its segment's replay, and that no replay reads a dropped leaf."""
    events = sorted([save.tick for save in trace.saves] + [need.tick for need in trace.needs])
    away: dict[int, list[tuple[int, int, int]]] = {}
    for gap, decision in drops:
        gone = events[bisect.bisect_left(events, decision.leave)]
        back = replays[decision.segment]
        _require(gone < back, f"decision for storage {gap.storage}, gap {gap.index}: dropped at {gone}, but segment "
                 f"{decision.segment} runs at {back}")  # fmt: skip
        away.setdefault(gap.storage, []).append((gone, back, decision.segment))
    for index, segment in enumerate(plan.segments):
        for leaf in segment.leaves:
            for gone, back, other in away.get(leaf, ()):
                _require(not gone < replays[index] <= back, f"segment {index}: its leaf {leaf} is itself dropped then, "
                         f"until segment {other} runs at {back}")  # fmt: skip


def _check_segment(trace: Trace, versions: _Versions, index: int, segment: Segment, tick: int) -> None:
    """Simulate the replay at `tick`: every read is a leaf of the right version, or was made by an earlier op."""
    place = f"segment {index}"
    made: dict[int, int] = {}
    _require(list(segment.ops) == sorted(set(segment.ops)), f"{place}: its ops are not in order")
    for storage in (*segment.leaves, *segment.outputs):
        _require(0 <= storage < len(trace.storages), f"{place}: there is no storage {storage}")
    for leaf in segment.leaves:
        _check_leaf(trace, versions, leaf, tick, place)
    for op_tick in segment.ops:
        _require(op_tick in versions.ops, f"{place}: tick {op_tick} is not an op")
        _require(op_tick < tick, f"{place}: tick {op_tick} has not come yet when it runs, at {tick}")
        op = versions.ops[op_tick]
        _require(not op.barrier, f"{place}: {op.name} must not be replayed: {op.barrier}")
        for view in op.reads:
            is_leaf = view.storage in segment.leaves
            found = versions.at(view.storage, tick) if is_leaf else made.get(view.storage, -1)
            _require(found == view.version, f"{place}: {op.name} reads version {view.version} of storage "
                     f"{view.storage}, but finds {found}")  # fmt: skip
        for view in op.writes:
            _require(view.storage not in segment.leaves, f"{place}: {op.name} writes to leaf {view.storage}")
            made[view.storage] = view.version
    for output in segment.outputs:
        final = versions.at(output, tick)
        _require(made.get(output) == final, f"{place}: it does not make storage {output}")


def _check_leaf(trace: Trace, versions: _Versions, leaf: int, tick: int, place: str) -> None:
    home = trace.storages[leaf]
    held = home.created < tick < home.released
    claimed = any(save.tick < tick < save.released for save in versions.saves.get(leaf, ()))
    _require(held or claimed, f"{place}: nothing holds leaf {leaf} at tick {tick}")
    _require(trace.has_contents(leaf, tick), f"{place}: leaf {leaf} is not gathered at tick {tick}")


class _Versions:
    """Versions of every storage over time, and its saves."""

    def __init__(self, trace: Trace) -> None:
        self._created = [storage.created for storage in trace.storages]
        self._writes = trace.writes
        self.ops = {op.tick: op for op in trace.ops}
        self.saves: dict[int, list[Save]] = {}
        for save in trace.saves:
            self.saves.setdefault(save.storage, []).append(save)

    def at(self, storage: int, tick: int) -> int:
        """Return the version of a storage before an entry; -1 if it does not exist yet."""
        before = [write.version for write in self._writes[storage] if write.tick < tick]
        return before[-1] if before else (0 if self._created[storage] < 0 else -1)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise TraceError(what)

"""Explains why each block is where it is at the forecast peak.

Storages are grouped by origin and decision, so that a table of fifteen rows covers thousands of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.labels import name_group, name_module, name_storages, shorten
from elbowroom.ir.lifetimes import Lifetimes
from elbowroom.ir.plan import Choice, Decision, Plan
from elbowroom.ir.trace import Op, Role, Storage, Trace
from elbowroom.units import format_seconds

SMALL_BYTES = 1 << 14
"""Below this a move costs more than the bytes are worth."""

_STAY = {
    Role.PARAMETER: "live across steps, and stay",
    Role.GRADIENT: "stay until the optimizer has used them",
    Role.OPTIMIZER_STATE: "lives across steps, and stays",
    Role.BUFFER: "live across steps, and stay",
    Role.INPUT: "the program holds them",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockGroup:
    """Storages of the same role, module, op and decision.

    Attributes:
        what: display name. "transformer.h.*.mlp.act (tanh)" stands for the activations that `tanh` makes in all modules
            whose paths differ only in numbers.
        count, nbytes: number of storages, and their bytes, rounded up as by the device's allocator.
        is_away: whether they are off the device at the forecast peak.
        decision: "keep", "offload" or "recompute"; "-" if there is no choice.
        reason: explanation in a few words.
    """

    what: str
    count: int
    nbytes: int
    is_away: bool
    decision: str
    reason: str


def explain_blocks(trace: Trace, costs: Costs, plan: Plan, forecast: Forecast) -> tuple[BlockGroup, ...]:
    """Return groups of all storages that are on the device at the forecast peak, or away by decision; largest first.

    Cost: linear in the trace, and in the ops of every segment.
    """
    judge = _Judge(trace, costs, plan, forecast)
    groups: dict[_Fate, list[Storage]] = {}
    for storage in trace.storages:
        fate = judge.judge(storage)
        if fate is not None:
            groups.setdefault(fate, []).append(storage)
    blocks = [
        BlockGroup(
            what=name_storages(storages),
            count=len(storages),
            nbytes=sum(map(judge.round_up, storages)),
            is_away=is_away,
            decision=decision,
            reason=judge.reason(why, storages),
        )
        for (_, is_away, decision, why), storages in groups.items()
    ]
    blocks += judge.list_transients(sum(block.nbytes for block in blocks if not block.is_away))
    return tuple(sorted((block for block in blocks if block.nbytes), key=lambda block: (-block.nbytes, block.what)))


def count_seconds(trace: Trace, costs: Costs) -> list[float]:
    """Return the begin of each entry of the step if nothing waits, and the end of the last one."""
    seconds = [0.0] * trace.end
    for op, op_seconds in zip(trace.ops, costs.op_seconds, strict=True):
        seconds[op.tick] = op_seconds
    for tick in itertools.chain((save.tick for save in trace.saves), (need.tick for need in trace.needs)):
        seconds[tick] = costs.hook_seconds
    return [0.0, *itertools.accumulate(seconds)]


class _Fate(NamedTuple):
    """Key by which storages are grouped into one block."""

    kind: str
    is_away: bool
    decision: str
    why: str


class _Judge:
    """Classifies each storage at the forecast peak, and explains its place."""

    def __init__(self, trace: Trace, costs: Costs, plan: Plan, forecast: Forecast) -> None:
        self._trace = trace
        self._costs = costs
        self._plan = plan
        self._forecast = forecast
        self._tick = forecast.peak_tick
        self._lifetimes = Lifetimes(trace, plan)
        self._begins = count_seconds(trace, costs)
        self._barriers: dict[int, str] = {}
        for op in trace.ops:
            for view in op.writes if op.barrier else ():
                self._barriers.setdefault(view.storage, op.barrier)

    def round_up(self, storage: Storage) -> int:
        alignment = self._costs.alignment_bytes
        return -(-storage.nbytes // alignment) * alignment

    def judge(self, storage: Storage) -> _Fate | None:
        """Classify one storage at the peak; None if it is neither on the device nor moved away."""
        decision = self._lifetimes.decision_at(storage.id, self._tick)
        is_there = self._lifetimes.is_there(storage.id, self._tick)
        if not is_there and decision is None:
            return None
        what = name_group(storage)
        if decision is None:
            return _Fate(what, False, *self._judge_kept(storage))
        if decision.choice is Choice.RECOMPUTE:
            why = "still in use before it is dropped" if is_there else "recompute"
        elif is_there:
            is_leaving = self._unwrap(decision, self._tick) <= self._unwrap(decision, decision.release)
            why = "still leaving" if is_leaving else "arriving for its use"
        else:
            why = "offload"
        return _Fate(what, not is_there, str(decision.choice), why)

    def _judge_kept(self, storage: Storage) -> tuple[str, str]:
        if self._plan.state and storage.id in self._trace.state:
            is_idle = any(gap.covers(self._tick) for gap in self._trace.state_gaps[storage.id])
            return ("keep", "cost") if is_idle else ("-", "in use right there")
        if storage.role in _STAY:
            return ("-", _STAY[storage.role])
        if storage.id not in self._lifetimes.claims:
            return ("-", "the running code holds it")
        gaps = self._lifetimes.gaps.get(storage.id, ())
        gap = next((gap for gap in gaps if gap.covers(self._tick)), None)
        if gap is None:
            return ("-", "in use right there")
        if storage.id not in self._trace.movable:
            return ("keep", "written to after it was saved, so a copy would be out of date")
        if storage.released >= gap.closes:
            return ("keep", "the program itself holds it until it is needed")
        if storage.nbytes < SMALL_BYTES:
            return ("keep", "too small to be worth a move")
        return ("keep", f"no replay: {self._barriers[storage.id]}" if storage.id in self._barriers else "cost")

    def reason(self, why: str, storages: list[Storage]) -> str:
        """Return the explanation of a group, with figures of the whole group."""
        if why == "offload":
            return self._explain_offload(storages)
        if why == "recompute":
            return self._explain_recompute(storages)
        if why == "cost" or why.startswith("no replay"):
            link = self._costs.link
            out = self._move_seconds(storages, link.out_latency_seconds, link.out_bytes_per_second)
            back = self._move_seconds(storages, link.back_latency_seconds, link.back_bytes_per_second)
            cost = f"it fits; a move: {format_seconds(out)} out, {format_seconds(back)} back"
            return cost if why == "cost" else f"{cost}; {why}"
        return why

    def _explain_offload(self, storages: list[Storage]) -> str:
        link = self._costs.link
        decisions = self._decisions(storages)
        away = [self._count_away_seconds(decision) for decision in decisions]
        out = self._move_seconds(storages, link.out_latency_seconds, link.out_bytes_per_second)
        back = self._move_seconds(storages, link.back_latency_seconds, link.back_bytes_per_second)
        gaps = {decision.gap for decision in decisions}
        which = f"gap {next(iter(gaps))}" if len(gaps) == 1 else "several gaps"
        mean = format_seconds(sum(away) / len(away))
        return f"{which}, away {mean}; to {link.lower} {format_seconds(out)}, back {format_seconds(back)}"

    def _count_away_seconds(self, decision: Decision) -> float:
        seconds = self._begins[decision.back] - self._begins[decision.release]
        return seconds if seconds >= 0 else seconds + self._begins[-1]

    def _unwrap(self, decision: Decision, tick: int) -> int:
        return self._lifetimes.gap_of(decision).unwrap(tick, self._trace.end)

    def _explain_recompute(self, storages: list[Storage]) -> str:
        segments = {decision.segment for decision in self._decisions(storages)}
        ops = [tick for segment in segments for tick in self._plan.segments[segment].ops]
        seconds = sum(self._begins[tick + 1] - self._begins[tick] for tick in ops)
        names = _most_common(shorten(self._op_at(tick).name) for tick in ops)
        op_text = "1 op" if len(ops) == 1 else f"{len(ops)} ops"
        return f"made again by {op_text} ({names}) in {format_seconds(seconds)}"

    def _decisions(self, storages: Iterable[Storage]) -> list[Decision]:
        found = (self._lifetimes.decision_at(storage.id, self._tick) for storage in storages)
        return [decision for decision in found if decision is not None]

    def _op_at(self, tick: int) -> Op:
        index = self._lifetimes.op_at(tick)
        return self._trace.ops[index or 0]

    @staticmethod
    def _move_seconds(storages: list[Storage], latency_seconds: float, bytes_per_second: float) -> float:
        nbytes = sum(storage.nbytes for storage in storages)
        return len(storages) * latency_seconds + (nbytes / bytes_per_second if bytes_per_second else 0.0)

    def list_transients(self, held_bytes: int) -> list[BlockGroup]:
        """Return the bytes at the peak that belong to no storage: the op's workspace, replays, second copies."""
        index = self._lifetimes.op_at(self._tick)
        found = []
        workspace_bytes = 0
        if index is not None and self._trace.ops[index].tick == self._tick:
            workspace_bytes = self._costs.workspace_bytes[index]
            op = self._trace.ops[index]
            name = shorten(op.name) + ("" if op.module is None else f" in {name_module(op.module)}")
            found.append(_transient(f"workspace of {name}", workspace_bytes, "allocated inside the op at the peak"))
        other = self._forecast.peak_bytes - held_bytes - workspace_bytes
        found.append(_transient("replays and moves", max(0, other), "intermediate results and second copies"))
        return found


def _transient(what: str, nbytes: int, reason: str) -> BlockGroup:
    return BlockGroup(what=what, count=1, nbytes=nbytes, is_away=False, decision="-", reason=reason)


def _most_common(names: Iterable[str], most: int = 3) -> str:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    count_of: Callable[[str], tuple[int, str]] = lambda name: (-counts[name], name)  # noqa: E731
    ordered = sorted(counts, key=count_of)
    return ", ".join(ordered[:most]) + (", ..." if len(ordered) > most else "")

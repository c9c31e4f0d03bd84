"""Cost of each choice for each gap: keeping, offloading and recomputing, beside the decision of the plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from elbowroom.cost.transfers import drag_seconds, offload_seconds, reload_seconds
from elbowroom.ir.gaps import Gap
from elbowroom.ir.lifetimes import Lifetimes
from elbowroom.ir.plan import Choice, Decision
from elbowroom.ir.trace import PERSISTENT_ROLES, Trace
from elbowroom.replays.closure import find_closure
from elbowroom.replays.footprint import Footprints
from elbowroom.replays.graph import TraceGraph
from elbowroom.report.step_view import StepView

MOST_OPS = 256
"""Limit on the ops of a replay that is priced."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceCosts:
    """Costs of the three choices for one gap.

    Attributes:
        storage, opens, closes: the gap; it closes in the next step if closes <= opens.
        decision: the plan's choice.
        gap_seconds: from its end of use to its next use, in this step.
        kept_peak_bytes: most bytes on the device during the gap if the storage stays there.
        out_seconds, back_seconds: of its copies, on an idle link.
        exposed_seconds: part of these that does not fit the gap, and compute time lost while bytes move.
        replay_seconds: of recomputing it alone, from storages that autograd holds; infinite if that is impossible.
        replay_ops: number of ops of that replay.
        is_movable: whether it may leave at all.
        reason: why it cannot leave, or not be recomputed; "" if it can.
    """

    storage: int
    opens: int
    closes: int
    decision: Choice
    gap_seconds: float
    kept_peak_bytes: int
    out_seconds: float
    back_seconds: float
    exposed_seconds: float
    replay_seconds: float
    replay_ops: int
    is_movable: bool
    reason: str


def list_choice_costs(view: StepView) -> tuple[ChoiceCosts, ...]:
    """Return the costs of the choices for every gap of what autograd saves and of the model's state.

    Cost: linear in the trace, and in the ops of each replay.
    """
    return tuple(_Pricing(view).list_all())


class _Pricing:
    """Prices the gaps of one step."""

    def __init__(self, view: StepView) -> None:
        self._view = view
        self._trace = view.trace
        self._live = np.array(view.forecast.live_bytes, dtype=np.int64)
        self._lifetimes = Lifetimes(view.trace, view.plan)
        self._graph = TraceGraph(view.trace)
        alignment_bytes = view.costs.alignment_bytes
        self._rounded = [-(-home.nbytes // alignment_bytes) * alignment_bytes for home in view.trace.storages]
        self._footprints = Footprints(view.trace, view.costs, self._rounded)
        self._barriers = _find_barriers(view.trace)

    def list_all(self) -> Iterator[ChoiceCosts]:
        """Yield the costs of each gap."""
        decided = {(each.storage, each.gap): each for each in self._view.plan.decisions}
        for storage, gaps in self._trace.gaps.items():
            is_held = self._trace.storages[storage].role in PERSISTENT_ROLES
            for gap in () if is_held else gaps:
                yield self._price(storage, gap, decided.get((storage, gap.index)), is_state=False)
        state = {(each.storage, each.gap): each for each in self._view.plan.state}
        for storage, gaps in self._trace.state_gaps.items():
            for gap in gaps:
                yield self._price(storage, gap, state.get((storage, gap.index)), is_state=True)

    def _price(self, storage: int, gap: Gap, decision: Decision | None, *, is_state: bool) -> ChoiceCosts:
        view = self._view
        begins = view.begins
        seconds = begins[gap.closes] - begins[gap.opens + 1]
        if gap.is_wrapping:
            seconds += begins[-1]
        nbytes = self._trace.storages[storage].nbytes
        link = view.costs.link
        out = offload_seconds(link, nbytes)
        back = reload_seconds(link, nbytes)
        exposed = max(0.0, out + back - max(0.0, seconds)) + 2 * drag_seconds(link, nbytes)
        obstacle = self._find_obstacle(storage, gap, is_state=is_state)
        replay_seconds, replay_ops, reason = (
            (math.inf, 0, obstacle) if obstacle else self._price_replay(storage, gap, is_state=is_state)
        )
        return ChoiceCosts(
            storage=storage,
            opens=gap.opens,
            closes=gap.closes,
            decision=Choice.KEEP if decision is None else decision.choice,
            gap_seconds=max(0.0, seconds),
            kept_peak_bytes=self._find_kept_peak(storage, gap),
            out_seconds=out,
            back_seconds=back,
            exposed_seconds=exposed,
            replay_seconds=replay_seconds,
            replay_ops=replay_ops,
            is_movable=not obstacle,
            reason=reason,
        )

    def _find_obstacle(self, storage: int, gap: Gap, *, is_state: bool) -> str:
        """Return why a storage stays on the device during a gap; "" if it may leave."""
        if is_state:
            return ""
        if storage not in self._trace.movable:
            return "it is written to after it was saved, so a copy would be out of date"
        if self._trace.storages[storage].released >= gap.closes:
            return "the program itself holds it until it is needed"
        return ""

    def _find_kept_peak(self, storage: int, gap: Gap) -> int:
        """Return the most bytes during a gap if the storage were there throughout."""
        end = self._trace.end
        spans = [(gap.opens, end), (0, gap.closes)] if gap.is_wrapping else [(gap.opens, gap.closes)]
        there = self._lifetimes.spans(storage)
        most = 0
        for begin, until in spans:
            live = self._live[begin:until] + self._rounded[storage]
            for first, last in there:
                live[max(0, first - begin) : max(0, last - begin)] -= self._rounded[storage]
            most = max(most, int(live.max(initial=0)))
        return most

    def _price_replay(self, storage: int, gap: Gap, *, is_state: bool) -> tuple[float, int, str]:
        if is_state:
            return math.inf, 0, "model state is not computed within the step"
        graph = self._graph.at(gap.closes, lambda other: other == storage)
        closure = find_closure(graph, storage, most_ops=MOST_OPS)
        if closure is None:
            barrier = self._barriers.get(storage, "")
            return math.inf, 0, f"no replay: {barrier or 'its inputs are gone'}"
        outputs: Sequence[int] = (storage,)
        footprint = self._footprints.measure_replay(closure.ops, closure.leaves, outputs)
        return footprint.seconds, len(closure.ops), ""


def _find_barriers(trace: Trace) -> dict[int, str]:
    found: dict[int, str] = {}
    for op in trace.ops:
        for view in op.writes if op.barrier else ():
            found.setdefault(view.storage, op.barrier)
    return found

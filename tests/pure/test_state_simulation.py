"""Forecasts of plans that move the model's state, against a slow run of several steps in a row."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from elbowroom import check, simulate
from elbowroom.ir.costs import Costs
from elbowroom.ir.gaps import Gap
from elbowroom.ir.lifetimes import Lifetimes
from elbowroom.ir.plan import Choice, Decision, Plan
from elbowroom.ir.trace import Trace
from elbowroom.simulator.planned import PreparedTrace
from tests.generators import cyclic_steps, keep_everything

STEPS = 4


def draw_state(data: some.DataObject, trace: Trace) -> tuple[Decision, ...]:
    """Legal moves in some of the gaps, at any legal ticks."""
    decisions = []
    for storage, gaps in trace.state_gaps.items():
        for gap in gaps:
            ticks = [(gap.opens + offset) % trace.end for offset in range(gap.length(trace.end))]
            releases = [
                offset
                for offset, tick in enumerate(ticks)
                if tick in trace.state_ticks and (trace.storages[storage].created < 0 or gap.opens + offset < trace.end)
            ]
            if not data.draw(some.booleans()):
                continue
            release = data.draw(some.sampled_from(releases))
            backs = [offset for offset in range(release + 1, len(ticks)) if ticks[offset] in trace.state_ticks]
            chosen = data.draw(some.sampled_from([None, *backs])) if trace.is_reloaded(gap) else None
            back = gap.closes if chosen is None else ticks[chosen]
            decisions.append(
                Decision(storage=storage, gap=gap.index, choice=Choice.OFFLOAD, leave=gap.opens,
                         release=ticks[release], back=back, segment=-1)
            )  # fmt: skip
    return tuple(decisions)


class SlowSteps:
    """Several steps in a row, entry by entry, with nothing but flags a storage: the moves of the state alone."""

    def __init__(self, trace: Trace, costs: Costs, plan: Plan) -> None:
        self.trace, self.costs, self.plan = trace, costs, plan
        self.now = self.out_free = self.back_free = 0.0
        self.away: set[int] = set()
        self.clean: set[int] = set()
        self.open: dict[int, Decision] = {}
        self.done: dict[int, float] = {}
        self.live: list[list[int]] = []
        self.seconds: list[float] = []
        self.moved: list[tuple[int, int]] = []
        plain = Lifetimes(trace)
        self.spans = {home.id: plain.spans(home.id) for home in trace.storages}
        self.gaps = {(gap.storage, gap.opens): gap for gaps in trace.state_gaps.values() for gap in gaps}
        self.decided = {(each.storage, each.gap): each for each in plan.state}
        self.later = {after: made for made, after in trace.earlier_gradients.items()}
        for _ in range(STEPS):
            self.run_step()

    def run_step(self) -> None:
        begin, self.bytes_out, self.bytes_back = self.now, 0, 0
        self.live.append([])
        # Gradients left behind go on under another id, and all that a step makes is new.
        self.names = {before: made for before, made in self.later.items() if made in self.away or made in self.open}
        self.stale = {home.id for home in self.trace.storages if home.created >= 0}
        for tick in range(self.trace.end):
            self.run_entry(tick)
        self.now += self.costs.overhead_seconds
        self.seconds.append(self.now - begin)
        self.moved.append((self.bytes_out, self.bytes_back))

    def run_entry(self, tick: int) -> None:
        ops = {op.tick: (op, seconds) for op, seconds in zip(self.trace.ops, self.costs.op_seconds, strict=True)}
        op, seconds = ops.get(tick, (None, 0.0))
        used = {self.names.get(v.storage, v.storage) for v in (*op.reads, *op.writes)} if op is not None else set()
        for storage in {home.id for home in self.trace.storages if home.created == tick}:
            self.away.discard(storage)
            self.clean.discard(storage)
            self.open.pop(storage, None)
            self.stale.discard(storage)
        due = [each for each in self.open.values() if each.storage in self.away and each.back == tick]
        due = [each for each in due if self.trace.is_reloaded(self.gap(each))]
        for decision in sorted(due, key=lambda each: ((self.gap(each).closes - tick) % self.trace.end, each.storage)):
            self.away.discard(decision.storage)
            self.reload(decision.storage)
        for storage in used:
            assert storage not in self.away
            if storage in self.open:
                self.now = max(self.now, self.done.get(storage, 0.0))
                del self.open[storage]
        self.live[-1].append(self.count(tick))
        self.now += seconds
        for storage in {view.storage for view in op.writes} if op is not None else ():
            self.clean.discard(storage)
        for storage in sorted(used):
            gap = self.gaps.get((storage, tick))
            decision = None if gap is None else self.decided.get((storage, gap.index))
            if decision is not None:
                self.open[storage] = decision
                if storage not in self.clean:
                    self.offload(storage)
        for decision in sorted(self.open.values(), key=lambda each: each.storage):
            if decision.release == tick and decision.storage not in self.away:
                self.now = max(self.now, self.done.get(decision.storage, 0.0))
                self.away.add(decision.storage)

    def gap(self, decision: Decision) -> Gap:
        return self.trace.state_gaps[decision.storage][decision.gap]

    def count(self, tick: int) -> int:
        alive = [storage for storage, spans in self.spans.items() if any(a <= tick < b for a, b in spans)]
        there = [each for each in alive if self.names.get(each, each) not in self.away or each in self.stale]
        workspace = {op.tick: nbytes for op, nbytes in zip(self.trace.ops, self.costs.workspace_bytes, strict=True)}
        return sum(self.trace.storages[each].nbytes for each in there) + workspace.get(tick, 0)

    def offload(self, storage: int) -> None:
        nbytes = self.trace.storages[storage].nbytes
        self.bytes_out += nbytes
        self.clean.add(storage)
        begin = max(self.now, self.out_free, self.back_free if self.costs.link.half_duplex else 0.0)
        self.out_free = begin + self.costs.link.out_latency_seconds + nbytes / self.costs.link.out_bytes_per_second
        self.done[storage] = self.out_free

    def reload(self, storage: int) -> None:
        nbytes = self.trace.storages[storage].nbytes
        self.bytes_back += nbytes
        begin = max(self.now, self.back_free, self.out_free if self.costs.link.half_duplex else 0.0)
        self.back_free = begin + self.costs.link.back_latency_seconds + nbytes / self.costs.link.back_bytes_per_second
        self.done[storage] = self.back_free


@given(some.data(), cyclic_steps())
@settings(max_examples=150, deadline=None)
def test_a_forecast_is_the_second_of_two_steps_in_a_row(data: some.DataObject, step: tuple[Trace, Costs]) -> None:
    trace, costs = step
    moved = dataclasses.replace(keep_everything(costs), state=draw_state(data, trace))
    check(trace, moved)
    forecast, slow = simulate(trace, costs, moved), SlowSteps(trace, costs, moved)
    assert list(forecast.live_bytes) == slow.live[1] == slow.live[2]
    assert (forecast.offloaded_bytes, forecast.reloaded_bytes) == slow.moved[1] == slow.moved[2]
    assert forecast.state_offloaded_bytes == forecast.offloaded_bytes
    storages = {decision.storage for decision in moved.state}
    assert forecast.lower_tier_bytes == sum(trace.storages[each].nbytes for each in storages)
    if slow.seconds[3] == pytest.approx(slow.seconds[2]):  # else steps alternate
        assert forecast.step_seconds == pytest.approx(slow.seconds[3])
    assert forecast.begin_seconds[-1] == pytest.approx(forecast.step_seconds)


@given(cyclic_steps())
@settings(max_examples=20, deadline=None)
def test_copies_of_the_state_outlive_autograds_claims(step: tuple[Trace, Costs]) -> None:
    trace, costs = step
    prepared = PreparedTrace(trace, costs)
    device = prepared.make_device(None)
    device.keep_copies(sorted(trace.state))
    for storage in trace.state:
        device.discard_copy(storage)  # as where a weight that a replay reads is saved no more
    assert device.count_state_copies() == (sum(int(prepared.rounded[storage]) for storage in trace.state), 0)

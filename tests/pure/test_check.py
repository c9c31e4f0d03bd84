"""The judge: everything that cannot be is refused, and nothing that can. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as some

from elbowroom.errors import TraceError
from elbowroom.ir.check import check, check_trace
from elbowroom.ir.costs import Costs
from elbowroom.ir.digest import digest
from elbowroom.ir.plan import Choice, Decision, Plan, Segment
from elbowroom.ir.trace import Presence, Role, Trace
from elbowroom.planner.problem import plan, pose
from elbowroom.residency import plan_policy
from elbowroom.residency.machine import Machine
from elbowroom.simulator.simulate import simulate
from tests.generators import KIB, Program, example, jobs, keep_everything, make_chain, make_costs, traces
from tests.oracles import follow

TRACE = example()[0]


def change(owner: Any, path: str, **fields: Any) -> Any:
    """A copy with fields changed at a path such as "ops.3.reads.0"."""
    if not path:
        return dataclasses.replace(owner, **fields)
    head, _, rest = path.partition(".")
    if head.isdigit():
        index = int(head)
        return (*owner[:index], change(owner[index], rest, **fields), *owner[index + 1 :])
    return dataclasses.replace(owner, **{head: change(getattr(owner, head), rest, **fields)})


# -- traces -----------------------------------------------------------------------------------------------------------


@given(traces)
def test_good_traces_pass(trace: Trace) -> None:
    check_trace(trace)


def test_an_empty_trace_passes() -> None:
    check_trace(Trace(name="", device="cpu", ops=(), storages=(), saves=(), needs=(), end=0))


END = TRACE.end
FIRST_MADE = next(storage.id for storage in TRACE.storages if storage.created >= 0)
IN_PLACE = next(index for index, op in enumerate(TRACE.ops) if op.writes[0].version == 1)


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        ("storages.2", {"id": 3}, r"storages\[2\]"),
        ("storages.2", {"nbytes": -1}, r"storages\[2\]"),
        ("storages.2", {"created": END}, r"storages\[2\]"),
        ("storages.2", {"created": -2}, r"storages\[2\]"),
        ("storages.2", {"released": END + 1}, r"storages\[2\]"),
        (f"storages.{FIRST_MADE}", {"released": TRACE.storages[FIRST_MADE].created - 1}, rf"storages\[{FIRST_MADE}\]"),
        (f"storages.{FIRST_MADE}", {"created": -1}, r"ops\[0\]"),
        (f"storages.{FIRST_MADE}", {"created": TRACE.storages[FIRST_MADE].created + 1}, r"ops\[0\]"),
        ("ops.1", {"tick": 0}, r"ops\[1\]"),
        ("ops.0", {"tick": -1}, r"ops\[0\]"),
        ("ops.0", {"tick": 1}, r"saves\[0\]|ops"),
        (f"ops.{len(TRACE.ops) - 1}", {"tick": END}, r"ops"),
        ("saves.0", {"tick": 0}, r"saves\[0\]"),
        ("needs.0", {"tick": 0}, r"needs\[0\]"),
        ("", {"end": END + 1}, "ticks"),
        ("", {"end": END - 1}, r"storages\[0\]"),
        ("ops.0.reads.0", {"storage": len(TRACE.storages)}, r"ops\[0\]"),
        ("ops.0.reads.0", {"storage": -1}, r"ops\[0\]"),
        ("ops.0.reads.0", {"version": -1}, r"ops\[0\]"),
        ("ops.0.reads.0", {"version": 1}, r"ops\[0\]"),
        ("ops.0.reads.0", {"shape": (3, -1)}, r"ops\[0\]"),
        ("ops.0.reads.0", {"storage": len(TRACE.storages) - 1}, r"ops\[0\]"),
        ("ops.0.writes.0", {"version": 1}, r"ops\[0\]"),
        (f"ops.{IN_PLACE}.writes.0", {"version": 0}, rf"ops\[{IN_PLACE}\]"),
        ("ops.0", {"writes": ()}, r"ops\[|storages\["),
        ("ops.0", {"flops": -1}, r"ops\[0\]"),
        ("saves.0", {"storage": len(TRACE.storages)}, r"saves\[0\]"),
        ("saves.0", {"storage": -1}, r"saves\[0\]"),
        ("saves.0", {"released": TRACE.saves[0].tick}, r"saves\[0\]"),
        ("saves.0", {"released": END + 1}, r"saves\[0\]"),
        ("needs.0", {"save": len(TRACE.saves)}, r"needs\[0\]"),
        ("needs.0", {"save": -1}, r"needs\[0\]"),
        ("needs.0", {"released": TRACE.needs[0].tick}, r"needs\[0\]"),
        ("needs.0", {"released": END + 1}, r"needs\[0\]"),
    ],
)
def test_broken_traces_are_refused_by_place(path: str, fields: dict[str, Any], place: str) -> None:
    with pytest.raises(TraceError, match=place):
        check_trace(change(TRACE, path, **fields))


def test_a_need_before_its_save_is_refused() -> None:
    program = Program()
    made = program.op("make", [], KIB)
    first = program.save(made)
    program.need(first)
    program.save(made)
    trace = program.finish("backwards")
    check_trace(trace)
    with pytest.raises(TraceError, match=r"needs\[0\]"):
        check_trace(change(trace, "needs.0", save=1))


# -- plans ------------------------------------------------------------------------------------------------------------


def make_plan(strategy: str, share: float) -> Plan:
    trace, costs = example()
    plain = simulate(trace, costs, keep_everything(costs)).peak_bytes
    return plan(trace, costs, int(plain * share), strategy=strategy)


OFFLOADING = make_plan("offload_all", 0.8)
DROPPING = make_plan("recompute_all", 1.0)
MIXED = make_plan("auto", 2 / 3)


def test_good_plans_pass() -> None:
    for made in (OFFLOADING, DROPPING, MIXED, keep_everything(example()[1])):
        check(TRACE, made)
    assert DROPPING.segments
    assert OFFLOADING.decisions


GAPS = TRACE.gaps
MOVE = OFFLOADING.decisions[0]
GAP = GAPS[MOVE.storage][MOVE.gap]
DROP = DROPPING.decisions[0]
DROP_GAP = GAPS[DROP.storage][DROP.gap]
SEGMENT = DROPPING.segments[DROP.segment]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"storage": -1}, "no such gap"),
        ({"storage": 10**6}, "no such gap"),
        ({"gap": 10**6}, "no such gap"),
        ({"gap": -1}, "no such gap"),
        ({"leave": GAP.opens - 1}, "out of order"),
        ({"leave": MOVE.release + 1}, "out of order"),
        ({"release": GAP.closes, "back": GAP.closes}, "out of order"),
        ({"release": MOVE.leave - 1}, "out of order"),
        ({"back": MOVE.release - 1}, "out of order"),
        ({"back": GAP.closes + 1}, "out of order"),
        ({"choice": Choice.RECOMPUTE, "segment": 0}, "no segment"),
        ({"choice": Choice.RECOMPUTE, "segment": -1}, "no segment"),
    ],
)
def test_moves_that_cannot_be_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(TraceError, match=why):
        check(TRACE, change(OFFLOADING, "decisions.0", **fields))


def test_a_gap_is_decided_once() -> None:
    with pytest.raises(TraceError, match="twice"):
        check(TRACE, change(OFFLOADING, "", decisions=(*OFFLOADING.decisions, MOVE)))


@pytest.mark.parametrize("role", [Role.PARAMETER, Role.INPUT, Role.BUFFER, Role.GRADIENT, Role.OPTIMIZER_STATE])
def test_what_lives_across_steps_stays(role: Role) -> None:
    with pytest.raises(TraceError, match="may not leave"):
        check(change(TRACE, f"storages.{MOVE.storage}", role=role), OFFLOADING)


def test_what_is_written_after_its_save_stays() -> None:
    program = Program()
    made = program.op("make", [], KIB)
    save = program.save(made)
    program.op_in_place("change_", [made], made)
    program.release(storage=made)
    program.op("other", [], KIB)
    program.need(save)
    trace = program.finish("spoiled")
    check_trace(trace)
    decision = Decision(storage=made, gap=0, choice=Choice.OFFLOAD, leave=1, release=2, back=3, segment=-1)
    moving = Plan(trace_digest="", strategy="", budget_bytes=0, decisions=(decision,), segments=())
    with pytest.raises(TraceError, match="may not leave"):
        check(trace, moving)


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        (f"decisions.{DROPPING.decisions.index(DROP)}", {"leave": DROP_GAP.opens - 1}, "outside"),
        (f"decisions.{DROPPING.decisions.index(DROP)}", {"leave": DROP_GAP.closes}, "outside"),
        (f"decisions.{DROPPING.decisions.index(DROP)}", {"segment": len(DROPPING.segments)}, "no segment"),
        (f"segments.{DROP.segment}", {"outputs": ()}, "does not make it"),
        (f"segments.{DROP.segment}", {"ops": ()}, "does not make|reads"),
        (f"segments.{DROP.segment}", {"ops": SEGMENT.ops[::-1] * 2}, "not in order"),
        (f"segments.{DROP.segment}", {"ops": SEGMENT.ops[1:]}, "reads version|does not make"),
        (f"segments.{DROP.segment}", {"ops": (*SEGMENT.ops, END + 5)}, "not an op"),
        (f"segments.{DROP.segment}", {"ops": (*SEGMENT.ops, TRACE.ops[-1].tick)}, "has not come yet"),
        (f"segments.{DROP.segment}", {"leaves": ()}, "reads version"),
        (f"segments.{DROP.segment}", {"leaves": (*SEGMENT.leaves, 10**6)}, "no storage"),
        (f"segments.{DROP.segment}", {"leaves": (*SEGMENT.leaves, -1)}, "no storage"),
        (f"segments.{DROP.segment}", {"leaves": (*SEGMENT.leaves, *SEGMENT.outputs)}, "writes to leaf|reads"),
        (f"segments.{DROP.segment}", {"outputs": (*SEGMENT.outputs, 10**6)}, "no storage"),
        (f"segments.{DROP.segment}", {"outputs": (*SEGMENT.outputs, 0)}, "does not make"),
        ("", {"segments": (*DROPPING.segments, SEGMENT)}, "nothing uses it"),
    ],
)
def test_replays_that_cannot_be_are_refused(path: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(TraceError, match=why):
        check(TRACE, change(DROPPING, path, **fields))


def test_a_leaf_that_is_gone_is_refused() -> None:
    gone = next(storage for storage in TRACE.storages if storage.role is Role.TEMPORARY)
    broken = change(DROPPING, f"segments.{DROP.segment}", leaves=(*SEGMENT.leaves, gone.id))
    with pytest.raises(TraceError, match=f"nothing holds leaf {gone.id}"):
        check(TRACE, broken)


def test_a_leaf_whose_contents_are_away_is_refused() -> None:
    """As a weight that `fully_shard` has freed."""
    leaf = SEGMENT.leaves[0]
    runs = min(each.back for each in DROPPING.decisions if each.segment == DROP.segment)

    def check_with(*spans: tuple[int, int]) -> None:
        presences = tuple(Presence(storage=leaf, begin=begin, end=end) for begin, end in spans)
        trace = dataclasses.replace(TRACE, presences=presences)
        check(trace, dataclasses.replace(DROPPING, trace_digest=digest(trace)))

    for spans in ([(0, runs)], [(runs + 1, END)], [(0, runs), (runs + 1, END)]):
        with pytest.raises(TraceError, match=f"leaf {leaf} is not gathered at tick {runs}"):
            check_with(*spans)
    check_with((0, 1), (runs, runs + 1))


def test_a_barrier_is_not_replayed() -> None:
    index = next(index for index, op in enumerate(TRACE.ops) if op.tick in SEGMENT.ops)
    with pytest.raises(TraceError, match="draws numbers"):
        check(change(TRACE, f"ops.{index}", barrier="draws numbers"), DROPPING)


def test_a_leaf_must_not_be_dropped_itself() -> None:
    program = Program()
    base = program.op("base", [], KIB)
    first = program.op("first", [base], KIB)
    second = program.op("second", [first], KIB)
    saves = [program.save(storage) for storage in (base, first, second)]
    for storage in (base, first, second):
        program.release(storage=storage)
    program.op("other", [], KIB)
    for save in reversed(saves):
        program.need(save)
    trace = program.finish("three in a row")
    gaps = trace.gaps

    def drop(storage: int, segment: int) -> Decision:
        back = gaps[storage][0].closes
        leave = trace.saves[-1].tick
        return Decision(
            storage=storage, gap=0, choice=Choice.RECOMPUTE, leave=leave, release=leave, back=back, segment=segment
        )

    again = Segment(ops=(trace.ops[2].tick,), outputs=(second,), leaves=(first,))
    before = Segment(ops=(trace.ops[1].tick,), outputs=(first,), leaves=(base,))
    one = Plan(trace_digest="", strategy="", budget_bytes=0, decisions=(drop(second, 0),), segments=(again,))
    check(trace, one)
    both = change(one, "", decisions=(drop(first, 1), drop(second, 0)), segments=(again, before))
    with pytest.raises(TraceError, match="its leaf 1 is itself dropped"):
        check(trace, both)


def test_one_replay_serves_all_that_is_dropped() -> None:
    """A second drop after the replay would replay again, at a tick at which nobody has looked at its leaves."""
    trace = make_chain([64 * KIB] * 4, keeps="io")
    costs = make_costs(trace)
    made = plan(trace, costs, 10**9, strategy="recompute_all")
    index, segment = next((index, each) for index, each in enumerate(made.segments) if len(each.outputs) > 1)
    users = [each for each in made.decisions if each.segment == index]
    gaps = trace.gaps
    runs = min(gaps[each.storage][each.gap].closes for each in users)
    late = next(each for each in users if gaps[each.storage][each.gap].closes > runs + 1)
    assert late.storage in segment.outputs
    position = made.decisions.index(late)
    with pytest.raises(TraceError, match=f"runs at {runs}"):
        check(trace, change(made, f"decisions.{position}", leave=runs))


def _shake(made: Plan, draw: Callable[[Any], Any], trace: Trace) -> Plan:
    tick = some.integers(-1, trace.end + 1)
    storage = some.integers(-1, len(trace.storages))
    decisions, segments = list(made.decisions), list(made.segments)
    for _ in range(draw(some.integers(1, 3))):
        if segments and draw(some.booleans()):
            index = draw(some.integers(0, len(segments) - 1))
            field, item = draw(
                some.sampled_from(
                    [
                        ("ops", some.sampled_from([op.tick for op in trace.ops])),
                        ("outputs", storage),
                        ("leaves", storage),
                    ]
                )
            )
            values = list(getattr(segments[index], field))
            values = sorted(set(values) ^ {draw(item)})
            segments[index] = dataclasses.replace(segments[index], **{field: tuple(values)})
        elif decisions:
            index = draw(some.integers(0, len(decisions) - 1))
            near = some.integers(-3, 3)
            field = draw(some.sampled_from(["leave", "release", "back", "segment", "choice", "storage", "gap"]))
            if field == "choice":
                value: Any = draw(some.sampled_from(list(Choice)))
            elif field in ("leave", "release", "back"):
                value = getattr(decisions[index], field) + draw(near) if draw(some.booleans()) else draw(tick)
            else:
                value = getattr(decisions[index], field) + draw(near)
            decisions[index] = dataclasses.replace(decisions[index], **{field: value})
    return dataclasses.replace(made, decisions=tuple(decisions), segments=tuple(segments))


@given(data=some.data(), job=jobs(), strategy=some.sampled_from(["auto", "offload_all", "recompute_all"]))
def test_whatever_passes_can_be_carried_out(data: some.DataObject, job: tuple[Trace, Costs], strategy: str) -> None:
    """Plans changed at random: the judge lets through only those that give every need its contents."""
    trace, costs = job
    most_bytes = simulate(trace, costs, keep_everything(costs)).peak_bytes
    least_bytes = pose(trace, costs, most_bytes, min_offload_bytes=1).floor.peak_bytes
    # The other two move all they can, whatever the budget.
    budget_bytes = (most_bytes + least_bytes) // 2 if strategy == "auto" else 2 * most_bytes
    made = plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1)
    shaken = _shake(made, data.draw, trace)
    assume(shaken != made)
    try:
        check(trace, shaken)
    except TraceError:
        return
    follow(trace, Machine(plan_policy.Policy(plan_policy.list_moves(shaken)), shaken.segments))
    forecast = simulate(trace, costs, shaken)
    assert forecast.peak_bytes > 0
    assert min(forecast.live_bytes) >= 0

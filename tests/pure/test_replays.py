"""Computing a storage again: the ops make the right contents, no op is missing or too many, and bytes are counted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import PERSISTENT_ROLES, Op, Role, Trace, View
from elbowroom.replays.closure import Closure, find_closure
from elbowroom.replays.footprint import Footprints
from elbowroom.replays.graph import ExecutedOps, TraceGraph
from tests.generators import KIB, Program, jobs, make_chain, make_costs, make_residual_net
from tests.oracles import find_contents, run_ops, version_before

MOST_OPS = 64


@some.composite
def programs(draw: some.DrawFn) -> Trace:
    """Ops in any order, in place on anything, saved or not: more than a net would do."""
    program = Program()
    roles = some.sampled_from([Role.INPUT, Role.PARAMETER, Role.GRADIENT])
    held = [program.resident(64, draw(roles)) for _ in range(draw(some.integers(1, 3)))]
    before, saves = len(held), list[int]()
    barriers = some.sampled_from([""] * 9 + ["draws numbers"])
    for _ in range(draw(some.integers(3, 25))):
        kind = draw(some.sampled_from(["op", "op", "op", "in place", "save", "save", "need", "end save", "let go"]))
        if kind == "op":
            reads = draw(some.lists(some.sampled_from(held), min_size=1, max_size=3))
            role = draw(some.sampled_from([Role.ACTIVATION] * 4 + [Role.GRADIENT]))
            held.append(
                program.op(f"op{program.tick}", reads, draw(some.integers(1, 900)), role=role, barrier=draw(barriers))
            )
        elif kind == "in place":
            target = draw(some.sampled_from(held))
            reads = [target, *draw(some.lists(some.sampled_from(held), max_size=2))]
            program.op_in_place(f"op{program.tick}_", reads, target, barrier=draw(barriers))
        elif kind == "save":
            saves.append(program.save(draw(some.sampled_from(held))))
        elif kind == "need" and saves:
            program.need(draw(some.sampled_from(saves)))
        elif kind == "end save" and saves:
            program.release(save=saves.pop(draw(some.integers(0, len(saves) - 1))))
        elif kind == "let go" and len(held) > before:
            program.release(storage=held.pop(draw(some.integers(before, len(held) - 1))))
    return program.finish("random program")


TRACES = some.one_of(jobs().map(lambda job: job[0]), programs())


def claimed_at(trace: Trace, tick: int) -> set[int]:
    """Storages with a save that is older than a tick and not released by then."""
    return {save.storage for save in trace.saves if save.tick < tick < save.released}


def list_ops(trace: Trace, target: int, now: int, is_there: Callable[[View], bool]) -> Iterator[Op | None]:
    """The ops of a closure by its definition; None for a storage that no op made."""
    wanted = [(target, now)]
    for storage, before in wanted:  # grows
        writers = [op for op in trace.ops if op.tick < before and any(view.storage == storage for view in op.writes)]
        if not writers or trace.storages[storage].created < 0:
            yield None
        for op in writers:
            yield op
            missing = [(view.storage, op.tick) for view in op.reads if not is_there(view)]
            wanted += [each for each in dict.fromkeys(missing) if each not in wanted]


def judge(trace: Trace, closure: Closure | None, target: int, now: int, is_there: Callable[[View], bool]) -> None:
    """Compare a closure with its definition, and run it on symbols."""
    ops = set(list_ops(trace, target, now, is_there))
    if closure is None:
        read = {view.storage for op in ops if op is not None for view in op.reads if is_there(view)}
        written = {view.storage for op in ops if op is not None for view in op.writes}
        assert None in ops or any(op.barrier for op in ops if op is not None) or read & written
        return
    assert None not in ops
    assert closure.ops == tuple(sorted(op.tick for op in ops if op is not None))
    contents = find_contents(trace)
    leaves = {leaf: contents[leaf, version_before(trace, leaf, now)] for leaf in closure.leaves}
    held = run_ops(trace, closure.ops, leaves)
    assert held[target] == contents[target, version_before(trace, target, now)]
    for storage in closure.made:
        assert held[storage] == contents[storage, version_before(trace, storage, now)]


@settings(max_examples=150)
@given(trace=TRACES, data=some.data())
def test_a_planned_closure_makes_the_contents_with_the_ops_that_it_takes(trace: Trace, data: some.DataObject) -> None:
    graph = TraceGraph(trace)
    ids = [home.id for home in trace.storages]
    for _ in range(6):
        target = data.draw(some.sampled_from(ids))
        now = data.draw(some.integers(trace.storages[target].created + 1, trace.end))
        gone = {target, *data.draw(some.lists(some.sampled_from(ids)))}
        claimed = claimed_at(trace, now)

        def is_there(view: View) -> bool:
            home = trace.storages[view.storage]
            is_held = home.created < now < home.released if home.role in PERSISTENT_ROLES else home.id in claimed - gone  # noqa: B023
            return is_held and version_before(trace, home.id, now) == view.version  # noqa: B023

        judge(trace, find_closure(graph.at(now, gone.__contains__), target), target, now, is_there)


@settings(max_examples=75)
@given(trace=TRACES)
def test_a_running_step_finds_the_same_from_what_has_run(trace: Trace) -> None:
    executed = ExecutedOps(trace)
    for op in trace.ops:
        now = op.tick + 1
        executed.add(op)
        executed.claimed = {save.storage for save in trace.saves if save.tick < now <= save.released}
        for target in {view.storage for view in op.writes}:
            closure = find_closure(executed, target, most_ops=MOST_OPS)
            if closure is None:
                continue
            assert len(closure.ops) <= MOST_OPS
            contents = find_contents(trace)
            leaves = {leaf: contents[leaf, executed.versions[leaf]] for leaf in closure.leaves}
            assert all(leaf in executed.claimed or trace.storages[leaf].created < 0 for leaf in leaves)
            assert not any(trace.storages[leaf].role is Role.INPUT for leaf in leaves)
            assert run_ops(trace, closure.ops, leaves)[target] == contents[target, executed.versions[target]]


def count_peak(trace: Trace, costs: Costs, ticks: Collection[int], leaves: Collection[int], outputs: set[int]) -> int:
    """Most bytes during any op: what has been written and is still to be used, or stays."""
    ops = {op.tick: op for op in trace.ops if op.tick in ticks}
    align = costs.alignment_bytes
    most = 0
    for now, op in ops.items():
        written = {view.storage for tick, each in ops.items() if tick <= now for view in each.writes} - set(leaves)
        used = {view.storage for tick, each in ops.items() if tick >= now for view in (*each.reads, *each.writes)}
        live = sum(-(-trace.storages[each].nbytes // align) * align for each in written & (used | outputs))
        most = max(most, live + costs.workspace_bytes[trace.ops.index(op)])
    return most


@settings(max_examples=100)
@given(trace=TRACES, data=some.data())
def test_a_footprint_is_what_is_written_and_still_used(trace: Trace, data: some.DataObject) -> None:
    costs = make_costs(trace, workspace_bytes=data.draw(some.sampled_from([0, 700])))
    align = costs.alignment_bytes
    rounded = [-(-home.nbytes // align) * align for home in trace.storages]
    footprints, graph = Footprints(trace, costs, rounded), TraceGraph(trace)
    for need in trace.needs:
        target = trace.saves[need.save].storage
        closure = find_closure(graph.at(need.tick, lambda _: data.draw(some.booleans())), target)
        if closure is None:
            continue
        outputs = {target, *data.draw(some.sets(some.sampled_from(sorted({target, *closure.made}))))}
        found = footprints.measure_replay(closure.ops, closure.leaves, outputs)
        assert found.peak_bytes == count_peak(trace, costs, closure.ops, closure.leaves, outputs)
        assert found.output_bytes == sum(rounded[each] for each in outputs)
        assert found.extra_bytes == max(0, found.peak_bytes - found.output_bytes)
        assert found.seconds == pytest.approx(footprints.count_seconds(closure.ops))


def test_a_closure_goes_back_to_what_is_there() -> None:
    trace = make_chain([KIB] * 8)
    graph = TraceGraph(trace)
    made = [op.writes[0].storage for op in trace.ops[:8]]
    need = trace.needs[0]  # the last save: of the result of layer 6
    target = trace.saves[need.save].storage
    assert target == made[6]
    near = find_closure(graph.at(need.tick, lambda storage: storage == target), target)
    assert near is not None
    assert (len(near.ops), near.made) == (1, {target})
    assert made[5] in near.leaves
    far = find_closure(graph.at(need.tick, made.__contains__), target)
    assert far is not None
    assert (len(far.ops), far.made) == (7, set(made[:7]))
    assert not set(far.leaves) & set(made)
    assert find_closure(graph.at(need.tick, made.__contains__), target, most_ops=6) is None


def test_what_cannot_be_replayed_has_no_closure() -> None:
    trace = make_chain([KIB] * 4, barriers=frozenset({1}))
    graph = TraceGraph(trace)
    made = [op.writes[0].storage for op in trace.ops[:4]]
    tick = trace.needs[0].tick
    assert find_closure(graph.at(tick, lambda storage: storage == made[1]), made[1]) is None
    assert find_closure(graph.at(tick, lambda storage: storage == made[2]), made[2]) is not None
    assert find_closure(graph.at(tick, made.__contains__), made[2]) is None
    assert find_closure(graph.at(tick, lambda _: False), 0) is None  # an input was made by no op


def test_a_running_step_computes_from_what_it_has_saved_but_not_from_its_input() -> None:
    trace = make_residual_net(1, KIB)
    executed = ExecutedOps(trace)
    batch = next(home.id for home in trace.storages if home.role is Role.INPUT)
    first, second = trace.ops[:2]
    executed.add(first)
    executed.add(second)
    made = second.writes[0].storage
    assert batch in {view.storage for view in first.reads}
    assert find_closure(executed, made) is None, "its way leads to the input"
    executed.claimed.add(first.writes[0].storage)
    closure = find_closure(executed, made)
    assert closure is not None
    assert closure.ops == (second.tick,)


def overwrite_what_was_read() -> tuple[Trace, int, int]:
    """Something is read, then overwritten and saved, then read again: the step, that storage, and the last result."""
    program = Program()
    batch = program.resident(KIB, Role.PARAMETER)
    first = program.op("first", [batch], KIB)
    second = program.op("second", [first], KIB)
    program.op_in_place("overwrite_", [first], first)
    save = program.save(first)
    last = program.op("last", [second, first], KIB)
    program.need(save)
    return program.finish("overwrites"), first, last


def test_a_planned_replay_makes_no_later_version_than_it_reads() -> None:
    trace, _, last = overwrite_what_was_read()
    graph = TraceGraph(trace)
    second = trace.ops[1].writes[0].storage
    closure = find_closure(graph.at(trace.end - 1, lambda storage: storage == second), second)
    assert closure is not None
    assert closure.ops == (trace.ops[0].tick, trace.ops[1].tick), "without the op that overwrites"
    assert closure.made == {second}, "what is overwritten afterwards has not its final contents"
    needs_both = find_closure(graph.at(trace.end - 1, lambda storage: storage in (second, last)), last)
    assert needs_both is None, "one storage in two versions, one of them on the device"


def test_a_running_step_makes_all_versions_where_it_makes_one() -> None:
    trace, first, last = overwrite_what_was_read()
    executed = ExecutedOps(trace)
    for op in trace.ops:
        executed.add(op)
    executed.claimed.add(first)
    closure = find_closure(executed, last)
    assert closure is not None
    assert closure.ops == tuple(op.tick for op in trace.ops)
    assert first in closure.made
    assert first not in closure.leaves

"""The model's state in traces and plans: its uses and gaps, and the judge of plans that move it."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib

import pytest

from elbowroom import check, load, save
from elbowroom.errors import TraceError
from elbowroom.ir.digest import digest
from elbowroom.ir.plan import Choice, Decision, Plan, Segment
from elbowroom.ir.state import find_copied, list_away
from elbowroom.ir.trace import MIN_STATE_BYTES, STATE_ROLES, Role, Trace
from elbowroom.ir.use import UseKind
from tests.generators import KIB, Layer, Optimizer, make_trace

WEIGHT = 32 * KIB


def make_step(optimizer: Optimizer, *, layers: int = 3, parameter_bytes: int = WEIGHT) -> Trace:
    chain = [
        Layer(inputs=(position - 1,), nbytes=16 * KIB, parameter_bytes=parameter_bytes) for position in range(layers)
    ]
    return make_trace(chain, optimizer=optimizer)


def list_role(trace: Trace, role: Role) -> list[int]:
    return [home.id for home in trace.storages if home.role is role]


def offload(trace: Trace, storage: int, gap: int, *, release: int | None = None, back: int | None = None) -> Decision:
    """Move in a gap: freed at once and reloaded on demand, unless ticks are given."""
    found = trace.state_gaps[storage][gap]
    return Decision(
        storage=storage, gap=gap, choice=Choice.OFFLOAD, leave=found.opens, segment=-1,
        release=found.opens if release is None else release, back=found.closes if back is None else back,
    )  # fmt: skip


def make_plan(trace: Trace, *state: Decision, segments: tuple[Segment, ...] = ()) -> Plan:
    return Plan(trace_digest=digest(trace), strategy="made up", budget_bytes=0, decisions=(), segments=segments,
                state=state)  # fmt: skip


def test_uses_are_the_ops_that_touch_a_storage_and_its_last_gap_wraps() -> None:
    trace = make_step(Optimizer())
    ops = {op.tick: op for op in trace.ops}
    weights, states = list_role(trace, Role.PARAMETER), list_role(trace, Role.OPTIMIZER_STATE)
    for number, weight in enumerate(weights):
        kinds = {ops[use.tick].name: use.kind for use in trace.state_uses[weight]}
        backward = [f"weight{number}", f"back{number}"][: 2 if number else 1]
        assert list(kinds) == [f"layer{number}", *backward, "update"]
        assert [kind for kind in kinds.values() if kind is UseKind.OPTIMIZER] == [kinds["update"]]
        forward, *_, update = [use.tick for use in trace.state_uses[weight]]
        assert (trace.state_gaps[weight][-1].opens, trace.state_gaps[weight][-1].closes) == (update, forward)
    for state in states:
        [gap] = trace.state_gaps[state]
        assert gap.opens == gap.closes and gap.length(trace.end) == trace.end
    assert trace.state == {home.id for home in trace.storages if home.role in STATE_ROLES}
    assert trace.state.isdisjoint(trace.movable)
    assert trace.state_ticks == tuple(sorted({use.tick for uses in trace.state_uses.values() for use in uses}))


def test_small_and_unused_storages_stay() -> None:
    assert not make_step(Optimizer(), parameter_bytes=MIN_STATE_BYTES - 1).state
    trace = make_step(Optimizer(), parameter_bytes=MIN_STATE_BYTES)
    buffer = dataclasses.replace(trace.storages[0], id=len(trace.storages), role=Role.BUFFER, nbytes=1 << 20)
    grown = dataclasses.replace(trace, storages=(*trace.storages, buffer))
    assert grown.state == trace.state and len(trace.state) == 3 * 4


@pytest.mark.parametrize("begins_with_gradients", [False, True])
def test_a_gradient_that_is_left_behind_goes_on_as_the_one_that_the_next_step_begins_with(
    begins_with_gradients: bool,
) -> None:
    trace = make_step(Optimizer(begins_with_gradients=begins_with_gradients))
    made = [each for each in list_role(trace, Role.GRADIENT) if trace.storages[each].created >= 0]
    earlier = [trace.earlier_gradients.get(each) for each in made]
    assert [each is not None for each in earlier] == [begins_with_gradients] * 3
    for gradient, before in zip(made, earlier, strict=True):
        update, tail = trace.state_gaps[gradient]
        assert tail.opens == update.closes == trace.state_uses[gradient][-1].tick
        assert tail.closes == (0 if before is None else trace.storages[before].released)
        assert trace.is_reloaded(update) and not trace.is_reloaded(tail)
        plan = make_plan(trace, offload(trace, gradient, 0), offload(trace, gradient, 1))
        check(trace, plan)
        assert find_copied(trace, plan) == {(gradient, 0)}
        away = list_away(trace, plan)
        assert away.pop(gradient) == [
            span for span in ((update.opens + 1, update.closes), (tail.opens + 1, trace.end)) if span[0] < span[1]
        ]
        assert away == ({} if before is None else {before: [(0, trace.storages[before].released)]})


def test_a_copy_is_made_only_of_what_was_written_since_the_last_one() -> None:
    trace = make_step(Optimizer(frozen=3))
    *_, trained, frozen = list_role(trace, Role.PARAMETER)
    wrapping = len(trace.state_gaps[trained]) - 1
    both = make_plan(trace, offload(trace, trained, 0), offload(trace, trained, wrapping))
    assert find_copied(trace, both) == {(trained, wrapping)}
    assert find_copied(trace, make_plan(trace, offload(trace, trained, 0))) == {(trained, 0)}
    assert find_copied(trace, make_plan(trace, offload(trace, frozen, 0))) == set()


def test_the_judge_accepts_all_legal_ticks_and_no_others() -> None:
    trace = make_step(Optimizer(group=2))
    for storage, gaps in trace.state_gaps.items():
        for gap in gaps:
            ticks = [(gap.opens + offset) % trace.end for offset in range(gap.length(trace.end) + 1)]
            legal = {
                (ticks[release], ticks[back] if back < len(ticks) - 1 else gap.closes)
                for release in range(len(ticks) - 1)
                for back in range(release + 1, len(ticks))
                if ticks[release] in trace.state_ticks
                and (ticks[back] in trace.state_ticks or back == len(ticks) - 1)
                and (trace.is_reloaded(gap) or back == len(ticks) - 1)
                and (trace.storages[storage].created < 0 or gap.opens + release < trace.end)
            }
            found = set()
            for release in range(-1, trace.end + 1):
                for back in range(-1, trace.end + 1):
                    try:
                        check(trace, make_plan(trace, offload(trace, storage, gap.index, release=release, back=back)))
                    except TraceError:
                        continue
                    found.add((release, back))
            assert found == legal, (storage, gap)


def test_the_judge_refuses_what_cannot_be_carried_out() -> None:
    trace = make_step(Optimizer())
    weight = list_role(trace, Role.PARAMETER)[0]
    move = offload(trace, weight, 0)
    refused = {
        "there is no such gap": dataclasses.replace(move, gap=9),
        "can only be offloaded": dataclasses.replace(move, choice=Choice.KEEP),
        "not where the gap opens": dataclasses.replace(move, leave=move.leave + 1),
    }
    for message, decision in refused.items():
        with pytest.raises(TraceError, match=message):
            check(trace, make_plan(trace, decision))
    with pytest.raises(TraceError, match="there is no such gap"):
        check(trace, make_plan(trace, dataclasses.replace(move, storage=trace.ops[0].writes[0].storage)))
    with pytest.raises(TraceError, match="repeated"):
        check(trace, make_plan(trace, move, move))


def test_a_replay_finds_the_state_that_it_reads() -> None:
    trace = make_step(Optimizer())
    saved = trace.saves[1].storage  # the first layer's result
    [gap] = trace.gaps[saved]
    segment = Segment(ops=(trace.ops[0].tick,), outputs=(saved,), leaves=tuple(
        view.storage for view in trace.ops[0].reads))  # fmt: skip
    drop = Decision(storage=saved, gap=0, choice=Choice.RECOMPUTE, leave=gap.opens, release=gap.opens,
                    back=gap.closes, segment=0)  # fmt: skip
    weight = list_role(trace, Role.PARAMETER)[0]
    between = [tick for tick in trace.state_ticks if tick < gap.closes]
    plan = dataclasses.replace(make_plan(trace, segments=(segment,)), decisions=(drop,))
    check(trace, plan)
    back = offload(trace, weight, 0, back=between[-1])
    check(trace, dataclasses.replace(plan, state=(back,)))
    with pytest.raises(TraceError, match="away when it runs"):
        check(trace, dataclasses.replace(plan, state=(offload(trace, weight, 0),)))


def test_plans_with_state_are_saved_and_older_files_are_read(tmp_path: pathlib.Path) -> None:
    trace = make_step(Optimizer())
    plan = make_plan(trace, *(offload(trace, storage, 0) for storage in sorted(trace.state)))
    path = tmp_path / "plan.json.gz"
    save(plan, path)
    assert load(Plan, path) == plan
    document = json.loads(gzip.decompress(path.read_bytes()))
    del document["value"]["state"]
    path.write_bytes(gzip.compress(json.dumps({**document, "version": 2}).encode()))
    assert load(Plan, path) == dataclasses.replace(plan, state=())

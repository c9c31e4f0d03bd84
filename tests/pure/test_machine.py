"""The residency machine and its policies, fed with anything. No torch."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom._family import get, names
from elbowroom.errors import UnknownMember
from elbowroom.ir.actions import Action, Offload, Recompute, Release, Reload, Wait
from elbowroom.ir.costs import Costs
from elbowroom.ir.events import Event, StorageFreed, StorageNeeded, StorageSaved
from elbowroom.ir.plan import Choice, Decision, Plan, Segment
from elbowroom.ir.trace import Trace
from elbowroom.residency import capacity_first, plan_policy, policies
from elbowroom.residency.machine import Drop, Intent, Machine, State
from tests.generators import jobs, traces
from tests.oracles import follow


class Script:
    """A policy that asks for what it is told to, event by event."""

    def __init__(self, *intents: Iterable[Intent]) -> None:
        self._left = [list(each) for each in intents]

    def decide(self, event: Event) -> Iterable[Intent]:
        return self._left.pop(0) if self._left else ()


def run(script: Script, *events: Event, segments: tuple[Segment, ...] = ()) -> list[list[Action]]:
    machine = Machine(script, segments)
    return [machine.feed(event) for event in events]


SAVED, NEEDED, FREED = StorageSaved(7, 1), StorageNeeded(7, 5), StorageFreed(7, 9)


def test_what_nobody_decides_on_stays() -> None:
    assert run(Script(), SAVED, NEEDED, FREED) == [[], [], [Release(7)]]


def test_an_offload_is_awaited_before_its_release() -> None:
    actions = run(
        Script([Offload(7)], [Release(7)], [Reload(7)]), SAVED, StorageSaved(8, 2), StorageSaved(9, 3), NEEDED
    )
    assert actions == [[Offload(7)], [Wait(7), Release(7)], [Reload(7)], [Wait(7)]]


def test_what_is_needed_while_it_leaves_is_still_there() -> None:
    assert run(Script([Offload(7)]), SAVED, NEEDED, FREED) == [[Offload(7)], [], [Wait(7), Release(7)]]


def test_what_is_away_comes_back_on_need() -> None:
    actions = run(Script([Offload(7), Release(7)]), SAVED, NEEDED, FREED)
    assert actions == [[Offload(7), Wait(7), Release(7)], [Reload(7), Wait(7)], [Release(7)]]


def test_a_clean_copy_leaves_again_for_nothing() -> None:
    script = Script([Offload(7), Release(7)], [Offload(7), Release(7)])
    actions = run(script, SAVED, NEEDED, StorageNeeded(7, 6), FREED)
    assert actions[1:] == [[Reload(7), Wait(7), Release(7)], [Reload(7), Wait(7)], [Release(7)]]


def test_what_was_never_copied_is_never_released() -> None:
    assert run(Script([Release(7), Reload(7)]), SAVED, NEEDED) == [[], []]


def test_what_is_free_is_left_alone() -> None:
    intents: list[Intent] = [Offload(7), Release(7), Reload(7), Drop(7, 0)]
    assert run(Script([], [], intents), SAVED, FREED, StorageSaved(8, 10)) == [[], [Release(7)], []]
    assert run(Script(intents), StorageSaved(8, 0)) == [[]]


def test_freed_while_away_or_under_way() -> None:
    assert run(Script([Offload(7), Release(7)]), SAVED, FREED)[1] == []
    assert run(Script([Offload(7), Release(7)], [Reload(7)]), SAVED, StorageSaved(8, 2), FREED)[2] == [
        Wait(7),
        Release(7),
    ]


def test_a_replay_fetches_its_leaves_and_serves_all_that_is_dropped() -> None:
    segments = (Segment(ops=(3, 4), outputs=(7, 8), leaves=(5, 6)),)
    script = Script([], [Offload(6), Release(6)], [Drop(7, 0)], [Drop(8, 0)])
    saves = [StorageSaved(storage, storage) for storage in (5, 6, 7, 8)]
    actions = run(script, *saves, StorageNeeded(8, 20), StorageNeeded(7, 21), segments=segments)
    assert actions[2:] == [
        [Release(7)],
        [Release(8)],
        [Reload(6), Wait(6), Recompute(0, (7, 8))],
        [],
    ]


def test_a_replay_of_a_replay() -> None:
    segments = (
        Segment(ops=(3,), outputs=(8,), leaves=(7,)),
        Segment(ops=(2,), outputs=(7,), leaves=()),
    )
    script = Script([Drop(7, 1)], [Drop(8, 0)])
    actions = run(script, StorageSaved(7, 0), StorageSaved(8, 1), StorageNeeded(8, 9), segments=segments)
    assert actions[2] == [Recompute(1, (7,)), Recompute(0, (8,))]


def test_a_move_that_failed_leaves_it_where_it_was() -> None:
    machine = Machine(Script([Offload(7)], [Release(7)]))
    assert machine.feed(SAVED) == [Offload(7)]
    machine.refuse(7)
    assert machine.state(7) is State.RESIDENT
    assert machine.feed(StorageSaved(8, 2)) == []
    assert machine.feed(NEEDED) == []
    machine.refuse(99)


def test_states() -> None:
    segments = (Segment(ops=(3,), outputs=(7,), leaves=()),)
    machine = Machine(Script([Drop(7, 0)]), segments)
    assert machine.state(7) is None
    assert machine.is_on_device(7)
    machine.feed(SAVED)
    assert (machine.state(7), machine.is_on_device(7), machine.segment_of(7)) == (State.DROPPED, False, 0)
    machine.feed(NEEDED)
    assert (machine.state(7), machine.is_on_device(7), machine.segment_of(7)) == (State.RESIDENT, True, None)
    machine.feed(FREED)
    assert machine.state(7) is None


# -- anything at all --------------------------------------------------------------------------------------------------

STORAGES = range(5)
SEGMENTS = (
    Segment(ops=(1,), outputs=(0, 1), leaves=(2,)),
    Segment(ops=(2,), outputs=(2,), leaves=(3, 99)),
    Segment(ops=(3,), outputs=(4,), leaves=(0, 1)),
)
ids = some.sampled_from(STORAGES)
intents = some.one_of(
    some.builds(Offload, ids),
    some.builds(Release, ids),
    some.builds(Reload, ids),
    some.sampled_from([Drop(0, 0), Drop(1, 0), Drop(2, 1), Drop(4, 2)]),
)
steps = some.lists(
    some.tuples(some.sampled_from(["save", "need", "free"]), ids, some.lists(intents, max_size=4)), max_size=40
)


@given(steps)
def test_no_order_of_events_and_wishes_breaks_the_rules(script: list[tuple[str, int, list[Intent]]]) -> None:
    saved: set[int] = set()
    there: set[int] = set()
    below: set[int] = set()
    moving: set[int] = set()
    dropped: set[int] = set()
    machine = Machine(Script(), SEGMENTS)
    for tick, (kind, storage, wishes) in enumerate(script):
        if kind != "save" and storage not in saved:
            continue
        machine.policy = Script(wishes)
        event: Event
        if kind == "save":
            event = StorageSaved(storage, tick)
            if storage not in saved:
                saved.add(storage)
                there.add(storage)
        elif kind == "need":
            event = StorageNeeded(storage, tick)
        else:
            event = StorageFreed(storage, tick)
        served = kind != "need"
        for action in machine.feed(event):
            if isinstance(action, Recompute):
                for leaf in SEGMENTS[action.segment].leaves:
                    assert leaf not in saved or leaf in there, "a replay reads what is not there"
                for output in action.outputs:
                    assert output in dropped
                    assert output in SEGMENTS[action.segment].outputs
                    dropped.discard(output)
                    there.add(output)
                continue
            target = action.storage
            assert target in saved, "an action on what is free"
            if isinstance(action, Wait):
                assert target in moving, "nothing to wait for"
                moving.discard(target)
            elif isinstance(action, Offload):
                assert target in there
                assert target not in moving | below
                moving.add(target)
                below.add(target)
            elif isinstance(action, Reload):
                assert target in below
                assert target not in there | moving
                moving.add(target)
                there.add(target)
            else:
                assert target not in moving, "a release before its transfer has ended"
                assert target in there
                if kind == "need" and target == storage:
                    served = True
                there.discard(target)
                if not (kind == "free" and target == storage) and target not in below:
                    assert machine.segment_of(target) is not None, "the last copy is gone"
                    dropped.add(target)
        if kind == "need":
            assert served or (storage in there and machine.state(storage) is not State.ARRIVING)
        if kind == "free":
            assert storage not in there | moving
            for group in (saved, below, dropped):
                group.discard(storage)
        for each in saved:
            assert machine.is_on_device(each) == (each in there)


# -- policies ---------------------------------------------------------------------------------------------------------


def test_the_family() -> None:
    assert {"delta", "dtr", "lru"} <= set(names(policies))
    for name in names(policies):
        assert callable(get(policies, name, "Policy").decide)
    with pytest.raises(UnknownMember, match="delta"):
        get(policies, "no_such", "Policy")


def test_moves_of_a_plan_come_at_the_first_event_at_or_after_their_tick() -> None:
    def decide(storage: int, leave: int, release: int, back: int) -> Decision:
        return Decision(
            storage=storage, gap=0, choice=Choice.OFFLOAD, leave=leave, release=release, back=back, segment=-1
        )

    keep = Decision(storage=1, gap=0, choice=Choice.KEEP, leave=0, release=0, back=0, segment=-1)
    drop = Decision(storage=4, gap=0, choice=Choice.RECOMPUTE, leave=6, release=6, back=20, segment=3)
    plan = Plan(
        trace_digest="", strategy="", budget_bytes=0, segments=(),
        decisions=(keep, decide(2, 3, 5, 10), decide(3, 3, 6, 10), drop)
    )  # fmt: skip
    policy = plan_policy.Policy(plan_policy.list_moves(plan))
    assert list(policy.decide(StorageSaved(9, 2))) == []
    assert list(policy.decide(StorageFreed(9, 4))) == []
    assert list(policy.decide(StorageSaved(9, 4))) == [Offload(2), Offload(3)]
    assert list(policy.decide(StorageNeeded(9, 6))) == [Release(2), Release(3), Drop(4, 3)]
    assert list(policy.decide(StorageNeeded(9, 50))) == [Reload(2), Reload(3)]
    assert list(policy.decide(StorageNeeded(9, 99))) == []


def test_capacity_first_lets_everything_go_as_soon_as_it_may() -> None:
    policy = capacity_first.Policy(lambda storage: storage != 1)
    assert list(policy.decide(StorageSaved(0, 0))) == [Offload(0), Release(0)]
    assert list(policy.decide(StorageSaved(1, 1))) == []
    assert list(policy.decide(StorageNeeded(0, 2))) == []
    assert list(policy.decide(StorageNeeded(0, 3))) == []
    assert list(policy.decide(StorageFreed(0, 4))) == []
    assert list(policy.decide(StorageNeeded(2, 5))) == [Release(0)]
    assert list(policy.decide(StorageNeeded(1, 6))) == [Release(2)]
    assert list(policy.decide(StorageNeeded(1, 7))) == []


@given(traces)
def test_capacity_first_gives_every_need_its_contents(trace: Trace) -> None:
    movable = trace.movable
    actions = follow(trace, Machine(capacity_first.Policy(movable.__contains__)))
    assert {action.storage for action in actions if isinstance(action, Offload)} == movable


@given(data=some.data(), job=jobs())
def test_any_wishes_at_any_time_give_every_need_its_contents(data: some.DataObject, job: tuple[Trace, Costs]) -> None:
    trace, _ = job
    movable = sorted(trace.movable)
    if not movable:
        return
    kinds = some.sampled_from([Offload, Release, Reload])

    class Whim:
        def decide(self, event: Event) -> Iterable[Intent]:
            wishes = data.draw(some.lists(some.tuples(kinds, some.sampled_from(movable)), max_size=3))
            return [kind(storage) for kind, storage in wishes]

    follow(trace, Machine(Whim()))

"""Gaps between uses, those that wrap into the next step included; and that a trace is searched for them once."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import pickle

import pytest

from elbowroom import check, load, plan, save, simulate
from elbowroom.errors import TraceError
from elbowroom.ir import trace as trace_module
from elbowroom.ir.check import check_ticks
from elbowroom.ir.digest import digest
from elbowroom.ir.gaps import Gap, find_gaps
from elbowroom.ir.plan import Choice, Decision
from elbowroom.ir.trace import Trace
from elbowroom.ir.use import StorageUse, UseKind
from elbowroom.planner.problem import pose
from tests.generators import make_costs, make_residual_net

END = 5
EVERY_GAP = [Gap(storage=0, index=0, opens=opens, closes=closes) for opens in range(END) for closes in range(END)]


def walk(gap: Gap) -> list[int]:
    """The ticks that pass from one use to the other, both included."""
    ticks = [gap.opens]
    while len(ticks) == 1 or ticks[-1] != gap.closes:
        ticks.append((ticks[-1] + 1) % END)
    return ticks


@pytest.mark.parametrize("gap", EVERY_GAP, ids=lambda gap: f"{gap.opens}-{gap.closes}")
def test_a_gap_covers_what_lies_between_its_uses(gap: Gap) -> None:
    ticks = walk(gap)
    assert gap.length(END) == len(ticks) - 1
    assert [gap.covers(tick) for tick in range(END)] == [tick in ticks[1:-1] for tick in range(END)]
    assert [gap.unwrap(tick, END) - gap.opens for tick in ticks[:-1]] == list(range(len(ticks) - 1))
    assert gap.is_wrapping == (0 in ticks[1:])


@pytest.mark.parametrize("gap", EVERY_GAP, ids=lambda gap: f"{gap.opens}-{gap.closes}")
def test_moves_are_judged_in_order_of_time_across_the_step_boundary(gap: Gap) -> None:
    ticks = walk(gap)
    last = len(ticks) - 1
    legal = {
        (ticks[leave], ticks[release], ticks[back])
        for leave, release, back in itertools.product(range(last), range(last), range(last + 1))
        if leave <= release <= back
    }
    found = set()
    for leave, release, back in itertools.product(range(-1, 2 * END), repeat=3):
        decision = Decision(
            storage=0, gap=0, choice=Choice.OFFLOAD, leave=leave, release=release, back=back, segment=-1
        )
        try:
            check_ticks(gap, decision, END)
        except TraceError:
            continue
        found.add((leave, release, back))
    assert found == legal


def test_what_is_recomputed_is_back_in_the_same_step() -> None:
    drop = Decision(storage=0, gap=0, choice=Choice.RECOMPUTE, leave=3, release=3, back=4, segment=0)
    check_ticks(Gap(storage=0, index=0, opens=3, closes=4), drop, END)
    with pytest.raises(TraceError, match="in the next step"):
        check_ticks(Gap(storage=0, index=0, opens=3, closes=1), drop, END)


def test_gaps_lie_between_uses_of_any_kind() -> None:
    kinds = {2: UseKind.OP, 3: UseKind.SAVE, 9: UseKind.NEED, 14: UseKind.OPTIMIZER}
    uses = [StorageUse(tick, 7, kind) for tick, kind in kinds.items()]
    within = [(3, 9), (9, 14)]
    assert [(gap.opens, gap.closes) for gap in find_gaps(uses)] == within
    across = find_gaps(uses, wraps=True)
    assert [(gap.opens, gap.closes) for gap in across] == [*within, (14, 2)]
    assert [(gap.storage, gap.index, gap.is_wrapping) for gap in across] == [(7, 0, False), (7, 1, False), (7, 2, True)]
    assert [gap.length(20) for gap in find_gaps(uses[-1:], wraps=True)] == [20]
    assert find_gaps([]) == find_gaps([], wraps=True) == ()


def test_a_trace_is_searched_once_for_a_plan_and_its_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: dict[str, list[int]] = {}
    for name in ("_find_claims", "_find_uses", "_find_movable", "_find_writes", "find_gaps"):
        inner = getattr(trace_module, name)

        def count(found, *, name=name, inner=inner):  # type: ignore[no-untyped-def]
            searched.setdefault(name, []).append(id(found))
            return inner(found)

        monkeypatch.setattr(trace_module, name, count)
    trace = make_residual_net(6, 1 << 20)
    costs = make_costs(trace)
    problem = pose(trace, costs, 1)
    made = plan(trace, costs, (problem.floor.peak_bytes + problem.plain.peak_bytes) // 2)
    assert made.decisions
    check(trace, made)
    simulate(trace, costs, made)
    of_storages = searched.pop("find_gaps")
    assert len(of_storages) == len(set(of_storages)) == len(trace.gaps)
    assert {name: len(calls) for name, calls in searched.items()} == dict.fromkeys(searched, 1)
    assert len(searched) == 4


def test_what_is_found_in_a_trace_is_no_part_of_it(tmp_path: pathlib.Path) -> None:
    fresh, searched = make_residual_net(2, 1 << 20), make_residual_net(2, 1 << 20)
    assert searched.gaps and searched.movable and searched.writes
    save(searched, tmp_path / "trace.json")
    for same in (searched, load(Trace, tmp_path / "trace.json"), pickle.loads(pickle.dumps(searched))):
        assert (same, hash(same), digest(same)) == (fresh, hash(fresh), digest(fresh))
    changed = dataclasses.replace(searched, saves=(), needs=())
    assert not changed.gaps and not changed.claims and not changed.movable

"""Traces whose ops run in slices, and plans for them. No torch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pathlib
from collections import Counter

import pytest

from elbowroom.errors import Infeasible, TraceError, UnknownMember
from elbowroom.ir.check import check, check_trace
from elbowroom.ir.costs import Costs
from elbowroom.ir.digest import digest
from elbowroom.ir.files import load, save
from elbowroom.ir.plan import Plan
from elbowroom.ir.sliced_trace import ON_SECTIONS, apply_cuts, slice_trace
from elbowroom.ir.slicing import Loop, OpCut, OpSlicing, SlicePass
from elbowroom.ir.trace import Op, Role, Trace, View
from elbowroom.planner.comparison.batches import try_batches
from elbowroom.planner.problem import plan, pose
from elbowroom.planner.slicing.choice import Slices
from elbowroom.simulator.simulate import simulate
from tests.generators import KIB, Layer, make_costs, make_link, make_trace

MIB = KIB * KIB
ROWS = 64
BYTES = 8 * MIB

NET = make_trace(
    [
        Layer(inputs=(-1,), nbytes=BYTES, parameter_bytes=64 * KIB),
        Layer(inputs=(0,), nbytes=BYTES, keeps="o", in_place=True),
        Layer(inputs=(1,), nbytes=BYTES, parameter_bytes=64 * KIB),
        Layer(inputs=(2,), nbytes=BYTES // 4),
        Layer(inputs=(3,), nbytes=KIB),
    ],
    batch_bytes=BYTES // 8,
)


def make_sliceable(trace: Trace, *, is_summed: bool = False) -> Trace:
    """Give large activations rows, and ops slices along them; gradients of weights are summed over slices."""

    def is_large(view: View) -> bool:
        return trace.storages[view.storage].nbytes > 128 * KIB

    def shape(view: View) -> View:
        nbytes = trace.storages[view.storage].nbytes
        return dataclasses.replace(view, dtype="float32", shape=(ROWS, nbytes // 4 // ROWS)) if is_large(view) else view

    slicing, ops = [], []
    for op in trace.ops:
        reads, writes = tuple(map(shape, op.reads)), tuple(map(shape, op.writes))
        ops.append(dataclasses.replace(op, reads=reads, writes=writes))
        if not any(map(is_large, (*reads, *writes))):
            continue
        narrowed = [0 if is_large(view) else None for view in reads]
        results = [0 if is_large(view) else None for view in writes]
        sums = None in results
        loop = Loop(ROWS, 1, tuple(narrowed), tuple(results))
        passes = SlicePass((loop,), tuple(range(len(reads))), tuple(range(len(writes))), sums=sums)
        if not sums or is_summed:
            slicing.append(OpSlicing(op.tick, ((passes,),), _list_strides(reads), _list_strides(writes)))
    return dataclasses.replace(trace, ops=tuple(ops), slicing=tuple(slicing))


def _list_strides(views: tuple[View, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple((view.shape[1], 1) if len(view.shape) == 2 else (1,) for view in views)


TRACE = make_sliceable(NET, is_summed=True)
COSTS = make_costs(TRACE, op_seconds=1e-3, link=make_link(per_second=1e11, latency_seconds=0.0))


def cut(trace: Trace, parts: int) -> tuple[OpCut, ...]:
    """Cut every op that can be cut."""
    return tuple(OpCut(each.tick, each.alternatives[0], ((parts,),)) for each in trace.slicing)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, ROWS, 1000])
def test_slices_make_up_the_op(parts: int) -> None:
    sliced = slice_trace(TRACE, cut(TRACE, parts))
    check_trace(sliced.trace)
    shares: dict[int, float] = {}
    for source, share in zip(sliced.sources, sliced.shares, strict=True):
        shares[source] = shares.get(source, 0.0) + share
    assert all(total == pytest.approx(1.0) for total in shares.values()) and len(shares) == len(TRACE.ops)
    made: Counter[int] = Counter()
    first = len(TRACE.storages)
    for op, source in zip(sliced.trace.ops, sliced.sources, strict=True):
        for view in op.writes:
            if view.storage >= first:
                made[sliced.sections[view.storage - first], source] += sliced.trace.storages[view.storage].nbytes
    assert set(made.values()) <= {BYTES, BYTES // 4}
    assert bool(made) == (parts > 1)


def test_the_sum_of_costs_stays() -> None:
    sliced = slice_trace(TRACE, cut(TRACE, 8))
    costs = sliced.slice_costs(dataclasses.replace(COSTS, workspace_bytes=(80,) * len(TRACE.ops)))
    assert math.fsum(costs.op_seconds) == pytest.approx(math.fsum(COSTS.op_seconds))
    assert {10, 80} == set(costs.workspace_bytes)  # in slices, and whole


def test_each_slice_reads_its_section_alone() -> None:
    sliced = slice_trace(TRACE, cut(TRACE, 4))
    first = len(TRACE.storages)
    for op, share in zip(sliced.trace.ops, sliced.shares, strict=True):
        sections = [view.storage for view in op.reads if view.storage >= first]
        assert len({sliced.sections[each - first] for each in sections}) == len(sections) or share == 1.0


def test_an_op_in_place_makes_new_sections() -> None:
    """Otherwise a section that was saved could not leave, since it is written later."""
    sliced = slice_trace(TRACE, cut(TRACE, 4))
    assert all(storage in sliced.trace.movable for storage in sliced.trace.claims if storage >= len(TRACE.storages))
    assert all(
        op.barrier == ON_SECTIONS for op, share in zip(sliced.trace.ops, sliced.shares, strict=True) if share < 1
    )


def test_a_whole_op_reads_all_sections() -> None:
    writer = next(each for each in TRACE.slicing)
    sliced = slice_trace(TRACE, (OpCut(writer.tick, writer.alternatives[0], ((4,),)),))
    check_trace(sliced.trace)
    op = next(op for op, source in zip(sliced.trace.ops, sliced.sources, strict=True) if source == 1)
    assert sum(view.storage >= len(TRACE.storages) for view in op.reads) == 4
    needs = [need for need in sliced.trace.needs if op.tick - 4 <= need.tick < op.tick]
    assert len(needs) == 4 and all(need.released == op.tick + 1 for need in needs)


def test_ops_with_other_slices_share_the_finer_sections() -> None:
    first, second = TRACE.slicing[:2]
    cuts = (OpCut(first.tick, first.alternatives[0], ((2,),)), OpCut(second.tick, second.alternatives[0], ((3,),)))
    sliced = slice_trace(TRACE, cuts)
    of_first = [
        sliced.trace.storages[view.storage].nbytes
        for op, source in zip(sliced.trace.ops, sliced.sources, strict=True)
        for view in op.writes
        if source == 0
    ]
    rows = [nbytes * ROWS // BYTES for nbytes in of_first]
    assert rows == [21, 11, 10, 22]  # cut at 21, 32 and 42 of 64 rows


def test_sections_of_two_axes() -> None:
    """A loop over columns cuts each section of rows."""
    first, second = TRACE.slicing[:2]
    old = second.alternatives[0][0]
    loop = dataclasses.replace(
        old.loops[0],
        length=BYTES // 4 // ROWS,
        reads=tuple(each if each is None else 1 for each in old.loops[0].reads),
        writes=tuple(each if each is None else 1 for each in old.loops[0].writes),
    )
    by_columns = dataclasses.replace(second, alternatives=((dataclasses.replace(old, loops=(loop,)),),))
    trace = dataclasses.replace(TRACE, slicing=(first, by_columns, *TRACE.slicing[2:]))
    cuts = tuple(OpCut(each.tick, each.alternatives[0], ((4,),)) for each in trace.slicing[:2])
    sliced = slice_trace(trace, cuts)
    check_trace(sliced.trace)
    ops = [op for op, source in zip(sliced.trace.ops, sliced.sources, strict=True) if source == 1]
    assert len(ops) == 4
    for op in ops:
        sections = [view for view in op.reads if view.storage >= len(trace.storages)]
        assert [sliced.trace.storages[view.storage].nbytes for view in sections] == [BYTES // 16] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tick": 10_000}, "cannot run in slices"),
        ({"parts": ((0,),)}, "no numbers of slices"),
        ({"parts": ((2, 2),)}, "no numbers of slices"),
        ({"passes": ()}, "not known to be independent"),
    ],
)
def test_cuts_that_are_none_of_the_op(change: dict[str, object], message: str) -> None:
    good = cut(TRACE, 2)[0]
    with pytest.raises(TraceError, match=message):
        slice_trace(TRACE, (dataclasses.replace(good, **change),))  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="comes after"):
        slice_trace(TRACE, (good, good))


@functools.cache
def find_lowest_budgets() -> tuple[int, int]:
    """The smallest budgets with whole ops, and in slices."""
    needed = []
    for slices in (Slices.NONE, Slices.ANY):
        with pytest.raises(Infeasible) as caught:
            plan(TRACE, COSTS, 1, strategy="offload_all", slices=slices)
        needed.append(caught.value.needed_bytes)
    return needed[0], needed[1]


@pytest.mark.parametrize("strategy", ["auto", "tvdnn_heuristic", "tvdnn_ilp", "offload_all"])
def test_a_plan_below_the_working_set_of_an_op(strategy: str, tmp_path: pathlib.Path) -> None:
    whole_bytes, sliced_bytes = find_lowest_budgets()
    assert sliced_bytes < whole_bytes / 2
    budget_bytes = (whole_bytes + sliced_bytes) // 2
    made = plan(TRACE, COSTS, budget_bytes, strategy=strategy, slices="any")
    assert made.cuts and made.trace_digest == digest(TRACE)
    forecast = simulate(TRACE, COSTS, made)
    assert forecast.peak_bytes <= budget_bytes
    assert forecast.recompute_seconds == 0.0  # ops on sections are not replayed
    check(TRACE, made)
    save(made, tmp_path / "plan.json")
    save(TRACE, tmp_path / "trace.json")
    assert load(Plan, tmp_path / "plan.json") == made
    assert load(Trace, tmp_path / "trace.json").slicing == TRACE.slicing
    assert digest(dataclasses.replace(TRACE, slicing=())) == digest(TRACE)


def test_auto_is_as_fast_as_tvdnn_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in very many slices are not searched."""
    monkeypatch.setattr("elbowroom.planner.searching.nested_budgets.MOST_SECTION_GAPS", 0)
    whole_bytes, sliced_bytes = find_lowest_budgets()
    for share in (0.2, 0.5, 0.8):
        budget_bytes = int(sliced_bytes + share * (whole_bytes - sliced_bytes))
        seconds = {
            strategy: simulate(
                TRACE, COSTS, plan(TRACE, COSTS, budget_bytes, strategy=strategy, slices="any")
            ).step_seconds
            for strategy in ("auto", "tvdnn_ilp", "tvdnn_heuristic")
        }
        assert seconds["auto"] == min(seconds.values())


def test_the_smallest_budget_works_and_no_smaller_one() -> None:
    whole_bytes, sliced_bytes = find_lowest_budgets()
    assert (
        simulate(TRACE, COSTS, plan(TRACE, COSTS, sliced_bytes, strategy="offload_all", slices="any")).peak_bytes
        <= sliced_bytes
    )
    with pytest.raises(Infeasible, match=rf"That is with ops in slices; whole ops need .* \({whole_bytes} bytes\)"):
        plan(TRACE, COSTS, sliced_bytes // 2, strategy="offload_all", slices="any")
    with pytest.raises(Infeasible) as caught:
        plan(TRACE, COSTS, whole_bytes - 1, strategy="offload_all", slices="none")
    assert caught.value.needed_bytes == whole_bytes


def test_larger_slices_where_there_would_be_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_bytes, _ = find_lowest_budgets()
    budget_bytes = 3 * whole_bytes // 4

    def count_entries() -> int:
        made = plan(TRACE, COSTS, budget_bytes, strategy="offload_all", slices="exact")
        assert simulate(TRACE, COSTS, made).peak_bytes <= budget_bytes
        return apply_cuts(TRACE, COSTS, made)[0].end

    monkeypatch.setattr("elbowroom.planner.slicing.choice.SHARES", ())  # smaller slices than are needed
    entries = count_entries()
    monkeypatch.setattr("elbowroom.planner.slicing.choice.MOST_ENTRIES", entries - 1)
    assert count_entries() < entries


def test_nothing_is_cut_where_whole_ops_fit() -> None:
    whole_bytes, _ = find_lowest_budgets()
    for strategy in ("auto", "tvdnn_ilp"):
        made = plan(TRACE, COSTS, whole_bytes, strategy=strategy)
        assert made == plan(dataclasses.replace(TRACE, slicing=()), COSTS, whole_bytes, strategy=strategy)
        assert made.cuts == () and apply_cuts(TRACE, COSTS, made) == (TRACE, COSTS, made)


def test_sums_over_slices_need_permission() -> None:
    exact = make_sliceable(NET)
    ticks = {
        op.tick for op in TRACE.ops if any(TRACE.storages[view.storage].role is Role.GRADIENT for view in op.writes)
    }
    assert ticks & {each.tick for each in TRACE.slicing} and not ticks & {each.tick for each in exact.slicing}
    _, sliced_bytes = find_lowest_budgets()
    summing = {cut.tick for cut in plan(TRACE, COSTS, sliced_bytes, strategy="offload_all", slices="any").cuts}
    assert summing & ticks


def test_an_op_without_slices_sets_the_floor() -> None:
    without: tuple[Op, ...] = tuple(op for op in TRACE.ops if op.name == "layer2")
    trace = dataclasses.replace(TRACE, slicing=tuple(each for each in TRACE.slicing if each.tick != without[0].tick))
    with pytest.raises(Infeasible) as caught:
        plan(trace, COSTS, 1, strategy="offload_all", slices="any")
    assert caught.value.needed_bytes >= 2 * BYTES  # its argument and its result


def test_a_larger_batch_fits() -> None:
    def load(batch: int) -> tuple[Trace, Costs]:
        layers = [Layer(inputs=(position - 1,), nbytes=batch * MIB) for position in range(4)]
        trace = make_sliceable(make_trace(layers, batch_bytes=KIB), is_summed=True)
        return trace, make_costs(trace)

    largest = []
    for slices in (Slices.NONE, Slices.EXACT):
        trials = try_batches(load, 13 * MIB, strategy="offload_all", slices=slices)
        found = {trial.batch: trial for trial in itertools.islice(trials, 8)}
        largest.append(max(batch for batch, trial in found.items() if trial.planned.outcome is not None))
    assert largest[0] <= 6 and largest[1] >= 3 * largest[0]


def test_unknown_slices() -> None:
    with pytest.raises(UnknownMember, match="exact"):
        plan(TRACE, COSTS, 1, slices="some")


def test_the_floor_of_slices_is_that_of_their_problem() -> None:
    _, sliced_bytes = find_lowest_budgets()
    trace, costs, _ = apply_cuts(TRACE, COSTS, plan(TRACE, COSTS, sliced_bytes, strategy="offload_all", slices="any"))
    assert pose(trace, costs, sliced_bytes).floor.peak_bytes <= sliced_bytes

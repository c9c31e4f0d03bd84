"""The text report: right figures, the reasons of every decision, and no page that fails for want of a value."""

from __future__ import annotations

import dataclasses
import html.parser
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.errors import TraceError, UsageError
from elbowroom.hardware.shipped import list_shipped, load_shipped
from elbowroom.ir.costs import Costs
from elbowroom.ir.digest import digest
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.journal import Journal, Mode, StepRecord
from elbowroom.ir.lifetimes import Lifetimes
from elbowroom.ir.plan import Choice, Plan
from elbowroom.ir.trace import Trace
from elbowroom.planner.problem import plan, pose
from elbowroom.report.blocks import BlockGroup, count_seconds, explain_blocks
from elbowroom.report.chart import draw_chart
from elbowroom.report.modules import count_by_module
from elbowroom.report.steady import find_steady
from elbowroom.report.summary import summarize
from elbowroom.report.table import render_table
from elbowroom.simulator.simulate import simulate
from elbowroom.units import format_bytes, format_seconds
from tests import generators
from tests.generators import KIB, make_chain, make_costs, make_link

EMPTY = Journal(steps=())


def record(step: int, mode: Mode, **fields: object) -> StepRecord:
    """One step of a journal; what is not given is 0, and not metered."""
    values: dict[str, object] = dict.fromkeys(
        ("stall_seconds", "budget_bytes", "offloaded_bytes", "reloaded_bytes", "recomputed"), 0
    )
    values |= {"peak_bytes": None, "resident_bytes": None, "seconds": 1.0, "saves": 4, "needs": 4, "note": ""} | fields
    return StepRecord(step=step, mode=mode, **values)  # type: ignore[arg-type]


JOURNAL = Journal(
    steps=(
        record(0, Mode.CAPTURE, seconds=9.0, peak_bytes=900 * KIB, resident_bytes=5000 * KIB),
        record(1, Mode.PLANNED, seconds=3.0, peak_bytes=1000 * KIB, resident_bytes=4000 * KIB, recomputed=2),
        record(2, Mode.PLANNED, seconds=2.0, offloaded_bytes=64 * KIB, reloaded_bytes=64 * KIB, recomputed=2),
        record(3, Mode.PLANNED, seconds=2.2, offloaded_bytes=64 * KIB, reloaded_bytes=64 * KIB, recomputed=2),
    )
)


def planned(trace: Trace, costs: Costs, share: float = 0.5) -> tuple[Plan, Forecast, int]:
    """A plan at some share of the way from the smallest budget to the plain peak, its forecast, and the budget."""
    keep = generators.keep_everything(costs)
    floor_bytes, plain_bytes = pose(trace, costs, 1).floor.peak_bytes, simulate(trace, costs, keep).peak_bytes
    budget_bytes = floor_bytes + int(share * (plain_bytes - floor_bytes))
    made = plan(trace, costs, budget_bytes, min_offload_bytes=1)
    return made, simulate(trace, costs, made), budget_bytes


def describe(trace: Trace, costs: Costs, share: float = 0.5, journal: Journal = EMPTY) -> str:
    """The whole page of a planned step."""
    made, forecast, budget_bytes = planned(trace, costs, share)
    return summarize(budget_bytes=budget_bytes, journal=journal, trace=trace, costs=costs, plan=made, forecast=forecast)


# -- figures ----------------------------------------------------------------------------------------------------------


@given(generators.jobs())
def test_the_plain_step_is_counted_as_the_simulator_counts_it(job: tuple[Trace, Costs]) -> None:
    trace, costs = job
    forecast = simulate(trace, costs, generators.keep_everything(costs))
    assert Lifetimes(trace).count_plain(costs) == list(forecast.live_bytes)


def test_steady_steps_are_those_since_the_last_capture() -> None:
    steady = find_steady(JOURNAL)
    assert steady is not None
    assert (steady.mode, steady.steps) == (Mode.PLANNED, 3)
    assert steady.seconds == pytest.approx(2.2)
    assert (steady.peak_bytes, steady.recomputed, steady.offloaded_bytes) == (1000 * KIB, 2, 64 * KIB)

    again = Journal(steps=(*JOURNAL.steps, record(4, Mode.CAPTURE), record(5, Mode.PLAIN, seconds=0.5)))
    steady = find_steady(again)
    assert steady is not None
    assert (steady.mode, steady.steps, steady.seconds) == (Mode.PLAIN, 1, 0.5)

    captures = Journal(steps=JOURNAL.steps[:1])
    steady = find_steady(captures)
    assert steady is not None
    assert steady.mode is Mode.CAPTURE
    assert find_steady(EMPTY) is None


# -- pages ------------------------------------------------------------------------------------------------------------


def test_a_planned_step_shows_forecast_beside_measured() -> None:
    trace, costs = generators.example()
    page = describe(trace, costs, journal=JOURNAL)
    head = page.splitlines()[0]
    assert trace.name in head and "within" in head
    assert "1 captured, 3 planned" in page
    assert "all kept" in page and "measured" in page and "2.20 s" in page
    assert "median of 3 planned steps" in page
    assert "offloaded a step" in page and "stalls" in page
    assert "Why each block is where it is" in page
    assert all(len(line) <= 140 and line == line.rstrip() for line in page.splitlines())


def test_a_step_in_which_all_is_kept_takes_as_long_as_its_forecast() -> None:
    trace, costs = generators.example()
    costs = dataclasses.replace(costs, hook_seconds=sum(costs.op_seconds) / len(trace.saves))
    keep = generators.keep_everything(costs)
    forecast = simulate(trace, costs, keep)
    page = summarize(budget_bytes=1 << 40, journal=EMPTY, trace=trace, costs=costs, plan=keep, forecast=forecast)
    row = next(line for line in page.splitlines() if line.startswith("step "))
    assert row.count(format_seconds(forecast.step_seconds)) == 2


def test_nothing_known_yet() -> None:
    page = summarize(budget_bytes=1 << 30, journal=EMPTY, trace=None, costs=None, plan=None, forecast=None)
    assert "within 1.00 GiB" in page
    assert "none run" in page and "none yet" in page


def test_a_journal_alone() -> None:
    page = summarize(budget_bytes=0, journal=JOURNAL, trace=None, costs=None, plan=None, forecast=None)
    assert "not at hand" in page and "2.20 s" in page
    assert "within" not in page and "budget" not in page.lower()


@pytest.mark.parametrize("mode", Mode)
def test_every_mode_has_a_word(mode: Mode) -> None:
    page = summarize(budget_bytes=1 << 20, journal=Journal(steps=(record(0, mode, note="why"),)))
    assert f"1 {str(mode).replace('capture', 'captured')}" in page


def test_dynamic_steps_have_no_plan_and_say_so() -> None:
    page = summarize(budget_bytes=1 << 20, journal=Journal(steps=(record(0, Mode.DYNAMIC),)))
    assert "decided while a step runs" in page


def test_a_trace_without_a_plan() -> None:
    trace, costs = generators.example()
    page = summarize(budget_bytes=1 << 20, journal=JOURNAL, trace=trace, costs=costs, plan=None, forecast=None)
    assert "all kept" in page and "Why each block" not in page


def test_plain_mode_says_that_nothing_is_done() -> None:
    trace, costs = generators.example()
    keep = generators.keep_everything(costs)
    journal = Journal(steps=(record(0, Mode.CAPTURE, peak_bytes=1), record(1, Mode.PLAIN)))
    forecast = simulate(trace, costs, keep)
    page = summarize(budget_bytes=1 << 40, journal=journal, trace=trace, costs=costs, plan=keep, forecast=forecast)
    assert "everything fits" in page
    assert "offloaded a step" not in page and "  away " not in page


def test_drift_and_steps_without_a_plan_say_why() -> None:
    steps = [record(step, Mode.DRIFTED, note="save 3 is of another size") for step in range(6)]
    steps.append(record(6, Mode.DYNAMIC, note="backward() ran outside"))
    page = summarize(
        budget_bytes=1 << 30, journal=Journal(steps=tuple(steps)), trace=None, costs=None, plan=None, forecast=None
    )
    assert "drift in step 0, 1, 2, 3 and 2 more: save 3 is of another size" in page
    assert "no plan in step 6: backward() ran outside" in page


def test_a_broken_budget_cannot_be_overlooked() -> None:
    page = summarize(budget_bytes=950 * KIB, journal=JOURNAL, trace=None, costs=None, plan=None, forecast=None)
    assert "OVER BUDGET in 1 of 2 metered steps; worst in step 1, by 50.0 KiB" in page
    page = summarize(budget_bytes=1000 * KIB, journal=JOURNAL, trace=None, costs=None, plan=None, forecast=None)
    assert "Within budget in all 2 steps that were metered" in page


def test_a_budget_that_has_changed() -> None:
    """Each step is judged by its own budget, and the figures are those since the last change."""
    budgets = [(900, 880), (900, 890), (600, 590), (600, 595)]
    steps = tuple(
        record(step, Mode.PLANNED, budget_bytes=budget * KIB, peak_bytes=peak * KIB)
        for step, (budget, peak) in enumerate(budgets)
    )
    page = summarize(
        budget_bytes=600 * KIB, journal=Journal(steps=steps), trace=None, costs=None, plan=None, forecast=None
    )
    assert "Within budget in all 4 steps that were metered" in page
    steady = find_steady(Journal(steps=steps))
    assert steady is not None and (steady.steps, steady.peak_bytes) == (2, 595 * KIB)


def test_the_time_axis_has_waits_and_replays_in_it() -> None:
    trace = make_chain([64 * KIB] * 6, barriers=frozenset(range(6)))
    costs = make_costs(trace, link=make_link(per_second=1e6))
    made, forecast, budget_bytes = planned(trace, costs, 0.0)
    begins = forecast.begin_seconds
    assert forecast.stall_seconds > 0 and len(begins) == trace.end + 1
    assert list(begins) == sorted(begins) and begins[0] == 0
    assert begins[-1] == pytest.approx(forecast.step_seconds)
    page = summarize(budget_bytes=budget_bytes, journal=EMPTY, trace=trace, costs=costs, plan=made, forecast=forecast)
    (axis,) = [line for line in page.splitlines() if line.lstrip().startswith("0 s ")]
    assert axis.endswith(f" {format_seconds(forecast.step_seconds)}")


@given(generators.jobs(), some.floats(0.0, 1.0))
def test_entries_begin_in_order_and_end_with_the_step(job: tuple[Trace, Costs], share: float) -> None:
    trace, costs = job
    _, forecast, _ = planned(trace, costs, share)
    begins = forecast.begin_seconds
    assert len(begins) == trace.end + 1 and list(begins) == sorted(begins)
    assert begins[-1] == pytest.approx(forecast.step_seconds)


def test_no_line_is_wider_than_a_terminal() -> None:
    """Reasons, notes and names of ops may be of any length."""
    trace, costs = generators.example()
    ops = tuple(dataclasses.replace(op, name=f"mine.an_op_whose_name_alone_is_{'very_' * 12}long.{op.name}")
                for op in trace.ops)  # fmt: skip
    long = dataclasses.replace(trace, ops=ops)
    records = [record(step, Mode.DRIFTED, note="save 3 is of another size than " + "that before, " * 9)
               for step in range(6)]  # fmt: skip
    journal = Journal(steps=(*JOURNAL.steps, *records, *(record(9, Mode.PLANNED, peak_bytes=KIB),)))
    for job in ((trace, costs), (long, dataclasses.replace(costs, trace_digest=digest(long)))):
        page = describe(*job, 0.3, journal)
        assert "save 3 is of another size" in page and "Why each block is where it is" in page
        assert [line for line in page.splitlines() if len(line) > 80] == []


# -- reasons ----------------------------------------------------------------------------------------------------------


def find_block(trace: Trace, costs: Costs, made: Plan, decision: str) -> BlockGroup:
    """The largest block with a decision, of those that are away at the peak if there are any."""
    blocks = [block for block in explain_blocks(trace, costs, made, simulate(trace, costs, made))
              if block.decision == decision]  # fmt: skip
    return max(blocks, key=lambda block: (block.is_away, block.nbytes))


def test_offloaded_blocks_say_for_how_long_and_at_what_price() -> None:
    trace = make_chain([64 * KIB] * 8, barriers=frozenset(range(8)))
    costs = make_costs(trace, op_seconds=1e-3)
    made, _, _ = planned(trace, costs, 0.3)
    block = find_block(trace, costs, made, "offload")
    assert block.is_away
    assert block.reason.startswith("gap 0, away ") and "to below" in block.reason and "back" in block.reason


def test_recomputed_blocks_say_by_what() -> None:
    trace = make_chain([64 * KIB] * 8)
    # The link is of no use, so whatever goes is made again.
    costs = make_costs(trace, op_seconds=1e-3, link=generators.make_link(per_second=1e3))
    made, _, _ = planned(trace, costs, 0.6)
    block = find_block(trace, costs, made, "recompute")
    assert block.is_away
    assert block.reason.startswith("made again by ") and "layer" in block.reason and " in " in block.reason


def test_kept_blocks_say_what_a_move_would_take_and_what_forbids_a_replay() -> None:
    trace = make_chain([64 * KIB] * 8, barriers=frozenset({1, 2, 3}))
    costs = make_costs(trace, op_seconds=1e-3)
    blocks = explain_blocks(trace, costs, keep := generators.keep_everything(costs), simulate(trace, costs, keep))
    reasons = [block.reason for block in blocks if block.decision == "keep"]
    assert any("no replay: draws numbers" in reason for reason in reasons)
    assert any(reason.startswith("it fits; a move: 6") and "no replay" not in reason for reason in reasons)
    small = make_chain([15 * KIB] * 8)
    costs = make_costs(small)
    keep = generators.keep_everything(costs)
    block = find_block(small, costs, keep, "keep")
    assert block.reason == "too small to be worth a move"


# -- by module --------------------------------------------------------------------------------------------------------


def name_modules(trace: Trace, paths: Sequence[str | None]) -> Trace:
    """The trace with these modules for its ops, one after the other; storages have that of their op."""
    modules = {op.tick: paths[index % len(paths)] for index, op in enumerate(trace.ops)}
    ops = tuple(dataclasses.replace(op, module=modules[op.tick], line="model.py:1") for op in trace.ops)
    storages = tuple(dataclasses.replace(each, module=modules.get(each.created, paths[0])) for each in trace.storages)
    return dataclasses.replace(trace, ops=ops, storages=storages)


PATHS = (None, "", "h.0.attn", "h.0.mlp.act", "h.1.attn", "h.1.mlp.act", "head")


@given(generators.jobs(), some.floats(0.0, 1.0))
def test_blocks_and_modules_add_up_to_the_forecast(job: tuple[Trace, Costs], share: float) -> None:
    trace, costs = name_modules(job[0], PATHS), job[1]
    made, forecast, budget_bytes = planned(trace, costs, share)
    blocks = explain_blocks(trace, costs, made, forecast)
    assert sum(block.nbytes for block in blocks if not block.is_away) == pytest.approx(forecast.peak_bytes, abs=1)
    assert all(block.nbytes > 0 and block.count > 0 and block.reason for block in blocks)
    assert summarize(budget_bytes=budget_bytes, journal=JOURNAL, trace=trace, costs=costs, plan=made, forecast=forecast)
    counted = count_by_module(trace, costs, made, forecast)
    assert len({each.path for each in counted}) == len(counted)
    held = sum(block.nbytes for block in blocks
               if not block.is_away and block.what != "replays and moves")  # fmt: skip
    assert sum(each.peak_bytes for each in counted) == held <= forecast.peak_bytes
    assert sum(each.offloaded_bytes for each in counted) >= forecast.offloaded_bytes
    assert all(0 <= each.state_bytes <= each.peak_bytes for each in counted)
    plain = count_by_module(trace, costs)
    assert sum(each.peak_bytes for each in plain) == max(Lifetimes(trace).count_plain(costs))
    assert sum(each.saved_bytes - each.kept_bytes for each in plain) == 0
    page = summarize(budget_bytes=1, journal=EMPTY, trace=trace, costs=costs, plan=made, forecast=forecast, by="module")
    assert "Bytes by module" in page and [line for line in page.splitlines() if len(line) > 80] == []


def read_rows(trace: Trace, costs: Costs, depth: int | None = None) -> dict[str, str]:
    """The first figure of each row of that table, by the row's name without its indent."""
    page = summarize(budget_bytes=1, journal=EMPTY, trace=trace, costs=costs, by="module", depth=depth)
    lines = page[page.index("  module ") :].splitlines()
    table = lines[1 : lines.index("")]
    names = [re.split(r"\s{2,}", line.strip()) for line in table]
    return {cells[0]: cells[1] for cells in names}


def test_the_tree_of_modules_has_sums_and_as_many_levels_as_are_asked_for() -> None:
    trace = make_chain([64 * KIB] * 24)
    paths = [f"body.h.{index}.mlp" for index in range(24)]
    trace = name_modules(trace, [*paths, "", None])
    costs = make_costs(trace)
    one = read_rows(trace, costs, 1)
    two = read_rows(trace, costs, 2)
    three = read_rows(trace, costs, 3)
    assert "body" in one and "h" not in one
    assert "h" in two and two["h"] == two["body"] == one["body"] and "0" not in two
    assert {"0", "5"} <= three.keys() and "mlp" not in three
    assert read_rows(trace, costs) == three  # four levels would be twice as many rows
    counted = {each.path: each for each in count_by_module(trace, costs)}
    assert three["5"] == f"{counted['body.h.5.mlp'].peak_bytes / KIB:,.1f}"
    total = sum(each.peak_bytes for each in counted.values())
    assert one["together"] == f"{total / KIB:,.1f}"
    assert one["the model itself"] == f"{counted[''].peak_bytes / KIB:,.1f}"
    page = summarize(budget_bytes=1, journal=EMPTY, trace=trace, costs=costs, by="module", depth=2)
    assert "most is saved by body.h.*.mlp" in page and "2 of 4 levels of modules are shown" in page
    # Hundreds side by side, most of them small.
    wide = name_modules(make_chain([(1 if index % 10 else 64) * KIB for index in range(300)]),
                        [f"layer_{index}" for index in range(300)])  # fmt: skip
    rows = read_rows(wide, make_costs(wide))
    assert len(rows) <= 33 and any(name.endswith(" small modules") for name in rows)


def test_reports_by_module_that_cannot_be() -> None:
    trace, costs = generators.example()
    values: dict[str, Any] = {"budget_bytes": 1, "journal": EMPTY}
    page = summarize(**values, by="module")
    assert "known once a step has been captured" in page
    assert "names no modules" in summarize(**values, trace=trace, costs=costs, by="module")
    for by, depth in (("layer", None), ("module", 0), ("module", True), ("module", 1.5), ("kind", 2), (None, None)):
        with pytest.raises(UsageError):
            summarize(**values, by=by, depth=depth)  # type: ignore[arg-type]


def test_blocks_are_named_by_module_and_op() -> None:
    trace = make_chain([64 * KIB] * 8, barriers=frozenset(range(8)))
    paths = [f"h.{index}.mlp" for index in range(8)]
    trace = name_modules(trace, paths)
    costs = make_costs(trace, op_seconds=1e-3)
    keep = generators.keep_everything(costs)
    whats = {block.what for block in explain_blocks(trace, costs, keep, simulate(trace, costs, keep))}
    assert any(re.fullmatch(r"h\.\*\.mlp \(layer\d+\)|h\.\d\.mlp \(layer\d+\)", what) for what in whats)
    assert not any(what.startswith("activation of") for what in whats)
    alike = dataclasses.replace(
        trace, storages=tuple(dataclasses.replace(each, label="aten.gelu.default") if each.label.startswith("layer")
                              else each for each in trace.storages)
    )  # fmt: skip
    blocks = {block.what: block for block in explain_blocks(alike, costs, keep, simulate(alike, costs, keep))}
    assert blocks["h.*.mlp (gelu)"].count >= 6


# -- the chart --------------------------------------------------------------------------------------------------------


def test_the_chart_has_the_budget_and_the_highest_column_at_the_peak() -> None:
    live = [10, 20, 100, 20, 10, 10, 10, 10]
    lines = draw_chart(live, [float(i) for i in range(9)], budget_bytes=50, width=16, height=4)
    assert len(lines) == 6
    assert "100 B" in lines[0] and "█" in lines[0]
    assert lines[0].index("█") - lines[0].index("│") - 1 in (4, 5)
    assert sum("50 B" in line and "─" in line for line in lines) == 1
    assert lines[-1].endswith("8.00 s")
    assert all(len(line) <= 13 + 16 for line in lines)


def test_the_chart_of_strange_steps() -> None:
    assert draw_chart([], []) == []
    assert draw_chart([5], [0.0, 0.0])  # no time at all
    assert draw_chart([0, 0], [0.0, 1.0, 2.0], budget_bytes=10)
    dotted = draw_chart([1, 1], [0.0, 1.0, 2.0], plain_bytes=[8, 8], width=8, height=8)
    assert "········" in dotted[0]


def test_seconds_follow_the_entries() -> None:
    trace, costs = generators.example()
    costs = dataclasses.replace(costs, hook_seconds=1e-6)
    begins = count_seconds(trace, costs)
    assert len(begins) == trace.end + 1
    hooks = (len(trace.saves) + len(trace.needs)) * 1e-6
    assert begins[-1] == pytest.approx(sum(costs.op_seconds) + hooks)


def test_figures_of_another_step_are_refused() -> None:
    trace, costs = generators.example()
    made = plan(trace, costs, 1 << 40)
    forecast = simulate(trace, costs, made)
    for change, said in (
        ({"forecast": dataclasses.replace(forecast, live_bytes=forecast.live_bytes[:-1])}, "forecast of .* entries"),
        ({"forecast": dataclasses.replace(forecast, live_bytes=(*forecast.live_bytes, 1))}, "forecast of .* entries"),
        ({"costs": dataclasses.replace(costs, op_seconds=(), workspace_bytes=())}, "costs of 0 ops do not fit"),
        ({"plan": dataclasses.replace(made, trace_digest="0" * 64)}, "the plan is for trace 000000000000"),
    ):
        values: dict[str, Any] = {"costs": costs, "plan": made, "forecast": forecast} | change
        with pytest.raises(TraceError, match=said):
            summarize(budget_bytes=1, journal=EMPTY, trace=trace, **values)


# -- as one line, and as a table in a notebook ------------------------------------------------------------------------


def test_nouns_print_as_one_line_however_long_they_are() -> None:
    trace = dataclasses.replace(make_chain([64 * KIB] * 300), name="module:" + "function" * 100)
    costs = dataclasses.replace(make_costs(trace), profile_name="machine " * 100)
    made, forecast, budget_bytes = planned(trace, costs)
    profile = load_shipped(list_shipped()[0])
    journal = Journal(steps=JOURNAL.steps * 1000)
    for value in (trace, costs, made, forecast, journal, EMPTY, profile):
        assert len(repr(value)) < 200 and "\n" not in repr(value), repr(value)
    assert f"{len(trace.ops)} ops, {len(trace.storages)} storages" in repr(trace)
    assert f"within {format_bytes(budget_bytes)}" in repr(made)
    assert f"{sum(each.choice is Choice.OFFLOAD for each in made.decisions)} gaps offloaded" in repr(made)
    assert f"peak {format_bytes(forecast.peak_bytes)}, step {format_seconds(forecast.step_seconds)}" in repr(forecast)
    assert repr(JOURNAL) == "<Journal: steps by mode: capture 1, planned 3; step 3 took 2.20 s, max peak 1000.0 KiB>"
    assert repr(EMPTY) == "<Journal: no step>"
    assert profile.name in repr(profile)


def test_tables_are_escaped_and_have_units() -> None:
    page = render_table("<b>&", {"peak_bytes": 3 << 20, "step_seconds": 0.5, "step": 7, "mode": "<script>"})
    found: list[str] = []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            assert tag in ("table", "caption", "tbody", "tr", "th", "td")

        def handle_data(self, data: str) -> None:
            found.append(data)

    reader = Reader()
    reader.feed(page)
    reader.close()
    words = [each for each in found if each.strip()]
    assert words == ["<b>&", "peak", "3.0 MiB", "step time", "500.0 ms", "step", "7", "mode", "<script>"]

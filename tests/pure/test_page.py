"""The page of a step, its Perfetto trace and its memory snapshot: right figures, self-contained, and small enough."""

from __future__ import annotations

import dataclasses
import hashlib
import html.parser
import itertools
import json
import math
import pathlib
import pickle
import pickletools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from elbowroom.ir.costs import Costs
from elbowroom.ir.journal import Journal, Mode
from elbowroom.ir.plan import Choice, Plan
from elbowroom.ir.timeline import Lane
from elbowroom.ir.trace import Role, Trace
from elbowroom.report.choice_costs import list_choice_costs
from elbowroom.report.memory_viz import make_snapshot, write_snapshot
from elbowroom.report.page import html as html_module
from elbowroom.report.page.content import PageContent, PlanPoint, choose_ticks, describe_page
from elbowroom.report.page.html import render_page
from elbowroom.report.perfetto import write_perfetto
from elbowroom.report.step_view import CLASSES, StepView, lay_out_blocks, view_step
from elbowroom.simulator.planned import PreparedTrace
from tests import generators
from tests.pure.test_report import JOURNAL, planned
from tests.pure.test_state_simulation import draw_state

VIEWER_OPCODES = {
    "PROTO", "FRAME", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "APPEND",
    "APPENDS", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1",
    "NEWFALSE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "STOP",
}  # fmt: skip
"""Opcodes that the unpickler of PyTorch's viewer knows."""


def view(trace: Trace, costs: Costs, share: float = 0.4) -> tuple[StepView, Plan]:
    """A planned step."""
    plan, _, _ = planned(trace, costs, share)
    return view_step(PreparedTrace(trace, costs), plan), plan


@pytest.fixture(scope="module")
def example() -> StepView:
    return view(*generators.example())[0]


def make_content(step: StepView, journal: Journal = JOURNAL) -> PageContent:
    """All that a page may show."""
    return PageContent(
        planned=step,
        plain=view_step(PreparedTrace(step.trace, step.costs)),
        budget_bytes=step.plan.budget_bytes,
        journal=journal,
        bounds=((step.plan.budget_bytes, 0.5), (1, math.inf)),
        front=(PlanPoint(strategy="<b>auto", budget_bytes=10, peak_bytes=9, step_seconds=1.0),),
        measured=step.activities[:5],
    )


@settings(max_examples=12)
@given(generators.jobs())
def test_blocks_classes_and_forecast_agree(job: tuple[Trace, Costs]) -> None:
    """Bytes by class add up to the forecast, blocks to the bytes of their class, and no blocks overlap."""
    trace, costs = job
    for step in (view(trace, costs)[0], view_step(PreparedTrace(trace, costs))):
        total = sum(step.bytes_by_class[name] for name in CLASSES)
        assert tuple(np.asarray(total)) == step.forecast.live_bytes
        assert all((each >= 0).all() for each in step.bytes_by_class.values())
        layout = lay_out_blocks(step)
        for tick in range(0, trace.end, max(1, trace.end // 7)):
            there = sorted(
                (offset, block.nbytes)
                for offset, block in zip(layout.offsets, step.blocks, strict=True)
                if block.begin_tick <= tick < block.end_tick
            )
            assert all(low + size <= high for (low, size), (high, _) in itertools.pairwise(there))
            held = sum(step.bytes_by_class[name][tick] for name in CLASSES if name not in ("workspace", "replays"))
            assert sum(size for _, size in there) == held


@settings(max_examples=12)
@given(generators.jobs(disk=True))
def test_lanes_agree_with_the_forecast(job: tuple[Trace, Costs]) -> None:
    """Each lane is busy for the forecast's seconds and bytes, and does one thing at a time."""
    trace, costs = job
    step, plan = view(trace, costs)
    busy = {lane: [each for each in step.activities if each.lane is lane] for lane in Lane}
    stretch = step.seconds / max(step.seconds - costs.overhead_seconds, 1e-12)

    def count(lane: Lane) -> float:
        return sum(each.end - each.begin for each in busy[lane])

    for lane, seconds in ((Lane.STALL, step.forecast.stall_seconds), (Lane.RECOMPUTE, step.forecast.recompute_seconds)):
        assert seconds * 0.999 - 1e-9 <= count(lane) <= seconds * stretch * 1.001 + 1e-9
    moved = sum(trace.storages[each.subject].nbytes for each in busy[Lane.OFFLOAD])
    assert moved == step.forecast.offloaded_bytes
    assert len(busy[Lane.RECOMPUTE]) == step.forecast.replays
    assert len(busy[Lane.COMPUTE]) == sum(seconds > 0 for seconds in costs.op_seconds)
    for lane in (Lane.COMPUTE, Lane.OFFLOAD, Lane.RELOAD, Lane.RECOMPUTE):
        ends = [(each.begin, each.end) for each in busy[lane]]
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in itertools.pairwise(ends)), lane
    assert plan.count_gaps(Choice.RECOMPUTE) >= len(plan.segments)


@settings(max_examples=12)
@given(generators.jobs())
def test_costs_of_choices(job: tuple[Trace, Costs]) -> None:
    """Decisions are those of the plan; keeping a storage never lowers the peak; what is recomputed has a price."""
    trace, costs = job
    step, plan = view(trace, costs)
    found = list_choice_costs(step)
    choices = sorted((each.storage, each.opens, each.decision) for each in found if each.decision is not Choice.KEEP)
    gaps = trace.gaps
    made = sorted((each.storage, gaps[each.storage][each.gap].opens, each.choice) for each in plan.decisions)
    assert choices == [each for each in made if each[2] is not Choice.KEEP]
    live = step.forecast.live_bytes
    for each in found:
        if each.opens < each.closes:
            assert each.kept_peak_bytes >= max(live[each.opens : each.closes])
        assert each.decision is Choice.KEEP or each.is_movable
        assert each.exposed_seconds >= 0 and each.gap_seconds >= 0
        assert math.isinf(each.replay_seconds) == bool(each.reason)


@settings(max_examples=30, deadline=None)
@given(some.data(), generators.cyclic_steps())
def test_moves_of_model_state_in_all_formats(data: some.DataObject, job: tuple[Trace, Costs]) -> None:
    """State that is away when the step begins or ends: bytes, lanes, costs of choices and the snapshot agree."""
    trace, costs = job
    plan = dataclasses.replace(generators.keep_everything(costs), state=draw_state(data, trace))
    step = view_step(PreparedTrace(trace, costs), plan)
    assert tuple(np.asarray(sum(step.bytes_by_class.values()))) == step.forecast.live_bytes
    assert all((each >= 0).all() for each in step.bytes_by_class.values())
    assert not step.bytes_by_class["replays"].any()
    compute = [each for each in step.activities if each.lane is Lane.COMPUTE]
    assert all(first.end <= second.begin + 1e-9 for first, second in itertools.pairwise(compute))
    waits = [each for each in step.activities if each.lane is Lane.STALL]
    for wait in waits:  # no op runs while compute waits
        middle = (wait.begin + wait.end) / 2
        assert not any(each.begin + 1e-9 < middle < each.end - 1e-9 for each in compute)  # but for rounding
    found = {(each.storage, each.opens): each for each in list_choice_costs(step)}
    for decision in plan.state:
        gap = trace.state_gaps[decision.storage][decision.gap]
        priced = found[decision.storage, gap.opens]
        assert priced.decision is Choice.OFFLOAD and priced.is_movable and math.isinf(priced.replay_seconds)
    content = PageContent(planned=step, plain=view_step(PreparedTrace(trace, costs)), budget_bytes=0)
    assert json.dumps(describe_page(content), allow_nan=False)
    assert make_snapshot(step)["device_traces"]


def test_a_curve_of_few_points_keeps_its_peak(example: StepView) -> None:
    for most in (1, 3, 7, 10**6):
        ticks = choose_ticks(example, most)
        assert len(ticks) <= most and ticks == sorted(set(ticks))
        assert max(example.forecast.live_bytes[tick] for tick in ticks) == example.forecast.peak_bytes


# -- the page ---------------------------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Elements of a page: opening and closing tags, addresses, and the texts of scripts by id."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.scripts: dict[str, str] = {}
        self.policy = ""
        self._script = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag not in self.VOID:
            self.open.append(tag)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "action", "data")]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        if tag == "script":
            self._script = found.get("id") or f"script {len(self.scripts)}"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[self._script] = self.scripts.get(self._script, "") + data


def test_the_page_is_one_file_without_addresses(example: StepView) -> None:
    text = render_page(make_content(example))
    page = Page(text)
    assert page.open == []
    assert page.addresses == []
    assert "default-src 'none'" in page.policy and "connect-src" not in page.policy
    assert len(page.ids) == len(set(page.ids)) > 15
    own = [script for name, script in page.scripts.items() if name != "data" and len(script) < 200_000]
    assert len(own) == 1
    for call in ("fetch(", "XMLHttpRequest", "import(", "http:", "https:", "WebSocket"):
        assert call not in own[0]
    wanted = set(re.findall(r'getElementById\("([\w-]+)"\)|fillLegend\("([\w-]+)"', own[0]))
    assert {one or other for one, other in wanted} <= set(page.ids)
    assert "{{" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert len(text) < 1_400_000
    assert json.loads(page.scripts["data"]) == json.loads(json.dumps(describe_page(make_content(example))))


def test_the_chart_library_is_as_published() -> None:
    """Apache ECharts 5.6.0, dist/echarts.min.js; its licences lie beside it."""
    assets = pathlib.Path(html_module.__file__).parent / "assets"
    digest = hashlib.sha256((assets / "echarts.min.js").read_bytes()).hexdigest()
    assert digest == "bf4a223524e40b77c304bec67e1222cf551f14880cf42c69dc046558e11c07b1"
    assert "Apache License" in (assets / "ECHARTS-LICENSE.txt").read_text()


def test_names_cannot_end_the_data(example: StepView) -> None:
    content = make_content(example)
    hostile = "</script><script>alert(1)</script>\u2028<!--"
    trace = example.trace
    named = dataclasses.replace(content, planned=_rename(content.planned, hostile))
    page = Page(render_page(named))
    assert len(page.scripts) == 3
    assert json.loads(page.scripts["data"])["title"] == hostile != trace.name


def _rename(step: StepView, name: str) -> StepView:
    return dataclasses.replace(step, trace=dataclasses.replace(step.trace, name=name))


def test_the_data_of_the_page(example: StepView) -> None:
    data: dict[str, Any] = describe_page(make_content(example))
    assert data["planned"]["peak_bytes"] == example.forecast.peak_bytes
    columns = zip(*data["planned"]["bytes"].values(), strict=True)
    assert max(map(sum, columns)) == example.forecast.peak_bytes
    assert len(data["blocks"]["offset"]) == len(data["blocks"]["storage"]) == len(example.blocks)
    for table in ("blocks", "storages", "gaps", "lanes", "measured_lanes"):
        assert len({len(column) for column in data[table].values()}) == 1, table
    classes = list(data["colours"]["classes"])
    roles = [str(storage.role) for storage in example.trace.storages]
    assert [classes[place] for place in data["storages"]["class"]] == roles
    assert list(data["planned"]["bytes"]) == classes == list(CLASSES) and {*map(str, Role)} <= {*classes}
    places = [*data["storages"]["label"], *data["storages"]["module"], *data["gaps"]["reason"]]
    assert max(places) < len(data["names"])
    rows = {row[0]: row[2:] for row in data["comparison"]}
    assert rows["peak"][1:] == [example.forecast.peak_bytes, 1000 * generators.KIB]
    assert rows["step time"][1] == example.forecast.step_seconds
    assert rows["step time"][2] == 2.2  # the median of the planned steps
    assert [step[1] for step in data["steps"]] == [str(record.mode) for record in JOURNAL.steps]
    assert data["front"]["bounds"] == [[example.plan.budget_bytes, 0.5]]  # and none that is infinite
    assert data["front"]["own"] == [example.forecast.peak_bytes, example.forecast.step_seconds]
    assert data["front"]["measured"] == [1000 * generators.KIB, 2.2]
    assert {each.mode for each in JOURNAL.steps} >= {Mode.CAPTURE, Mode.PLANNED}


def test_a_page_of_an_empty_step() -> None:
    trace = Trace(name="nothing", device="cpu", ops=(), storages=(), saves=(), needs=(), end=0)
    costs = generators.make_costs(trace)
    step = view_step(PreparedTrace(trace, costs))
    content = PageContent(planned=step, plain=step, budget_bytes=0)
    assert Page(render_page(content)).open == []
    assert json.loads(write_perfetto(step))["traceEvents"]
    assert make_snapshot(step)["segments"] == []


# -- other formats ----------------------------------------------------------------------------------------------------


def test_the_perfetto_trace(example: StepView) -> None:
    budget_bytes = example.plan.budget_bytes
    document = json.loads(write_perfetto(example, budget_bytes, example.activities[:3]))
    events = document["traceEvents"]
    assert all({"ph", "pid", "name"} <= event.keys() for event in events)
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(example.activities) + 3
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in spans} == named
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["forecast", "measured"]
    counters = [event for event in events if event["ph"] == "C" and event["name"] == "bytes on the device"]
    assert max(sum(event["args"].values()) for event in counters) == example.forecast.peak_bytes
    budget = [event["args"] for event in events if event["name"] == "budget"]
    assert budget == [{"bytes": budget_bytes}] * 2


@settings(max_examples=12)
@given(generators.jobs())
def test_the_memory_snapshot(job: tuple[Trace, Costs]) -> None:
    """Replaying its events never overlaps blocks, reaches the peak without replays, and ends with its blocks."""
    trace, costs = job
    step, _ = view(trace, costs)
    data = write_snapshot(step)
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= VIEWER_OPCODES
    snapshot = pickle.loads(data)
    (segment,), (events,) = snapshot["segments"], snapshot["device_traces"]
    live: dict[int, int] = {}
    peak = 0
    for event in events:
        assert segment["address"] <= event["addr"]
        assert event["addr"] + event["size"] <= segment["address"] + segment["total_size"]
        if event["action"] == "alloc":
            assert all(
                event["addr"] + event["size"] <= address or address + size <= event["addr"]
                for address, size in live.items()
            )
            live[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(event["addr"]) == event["size"]
        peak = max(peak, sum(live.values()))
    without_replays = sum(step.bytes_by_class[name] for name in CLASSES if name != "replays")
    assert peak == np.asarray(without_replays).max()
    left = {each["address"]: each["size"] for each in segment["blocks"] if each["state"] == "active_allocated"}
    assert left == live
    assert sum(each["size"] for each in segment["blocks"]) == segment["total_size"]
    categories = {event["category"] for event in events if "category" in event}
    assert "unknown" in categories  # without it the viewer fails on any others
    assert [event["time_us"] for event in events] == sorted(event["time_us"] for event in events)

"""The command `view`: pages, traces and snapshots of real runs and of forecasts, read by PyTorch's own viewer."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz
from typer.testing import CliRunner, Result

import elbowroom
from elbowroom.cli.main import make_app
from elbowroom.cost.price import price
from elbowroom.errors import UsageError
from elbowroom.ir import files as files_of_nouns
from elbowroom.ir.costs import Costs
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Journal
from elbowroom.ir.run_step import RunStep
from elbowroom.ir.timeline import Lane
from elbowroom.ir.trace import Trace
from elbowroom.scripts.exit_codes import MISUSED
from tests.leaks import profile as make_profile

WIDTH = 128
ROWS = 512
LAYERS = 6


class Block(nn.Module):
    """Some activations that can be recomputed, and some that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.sin(self.linear(x)))


def make_job() -> Any:
    """A workload: model, optimizer and step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(ROWS, WIDTH)

    def step() -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def call(*arguments: object) -> Result:
    return CliRunner().invoke(make_app(), [str(argument) for argument in arguments])


def succeed(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code == MISUSED, result.output
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a profile, a trace, a plan, and a run within a budget."""
    folder = tmp_path_factory.mktemp("view")
    elbowroom.save(make_profile.__wrapped__(), folder / "profile.json")  # type: ignore[attr-defined]
    sys.modules["job_of_test_view"] = sys.modules[__name__]
    spec, hardware = "job_of_test_view:make_job", ("--hardware", folder / "profile.json")
    succeed("run", spec, "--budget", "2560KiB", "--steps", 5, *hardware, "-o", folder / "run.json",
            "--save-trace", folder / "trace.json", "--save-plan", folder / "plan.json",
            "--save-costs", folder / "costs.json")  # fmt: skip
    return folder


def read_data(path: pathlib.Path) -> dict[str, Any]:
    text = path.read_text().partition('<script id="data" type="application/json">')[2].partition("</script>")[0]
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_run_keeps_its_step_beside_its_journal(folder: pathlib.Path) -> None:
    journal = elbowroom.load(Journal, folder / "run.json")
    step: RunStep = files_of_nouns.load_fields({"step": RunStep}, folder / "run.json")["step"]
    assert step.trace == elbowroom.load(Trace, folder / "trace.json")
    last = journal.steps[-1]
    assert all(0 <= each.begin < each.end <= last.seconds + 1 for each in step.activities)
    assert [each.lane for each in step.activities].count(Lane.RECOMPUTE) <= last.recomputed
    named = [each for each in step.activities if each.subject >= 0]
    assert {each.subject for each in named} <= {decision.storage for decision in step.plan.decisions}
    reloads = [step.trace.storages[each.subject].nbytes for each in named if each.lane is Lane.RELOAD]
    assert 0 < sum(reloads) <= last.reloaded_bytes
    assert (
        sum(each.end - each.begin for each in step.activities if each.lane is Lane.STALL) <= last.stall_seconds + 1e-6
    )


def test_replays_of_a_real_step_are_timed(tmp_path: pathlib.Path) -> None:
    model, optimizer, take_step = make_job()
    profile = make_profile.__wrapped__()  # type: ignore[attr-defined]
    with elbowroom.fit(model, optimizer, "4800KiB", profile=profile, strategy="recompute_all") as room:
        for _ in range(4):
            with room.step():
                take_step()
        last = room.journal().steps[-1]
        room.save_run(tmp_path / "run.json")
    step: RunStep = files_of_nouns.load_fields({"step": RunStep}, tmp_path / "run.json")["step"]
    found = step.activities
    replays = [each for each in found if each.lane is Lane.RECOMPUTE]
    assert 0 < len(replays) <= last.recomputed
    assert 0 < sum(each.end - each.begin for each in replays) < last.seconds
    offloads = [each for each in found if each.lane is Lane.OFFLOAD]
    assert all(begin.end <= end.begin for begin, end in itertools.pairwise(offloads))  # one thread makes them


def test_the_page_of_a_run(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    said = succeed("view", folder / "run.json", "-o", tmp_path / "run.html")
    assert "run.html" in said
    data = read_data(tmp_path / "run.html")
    steps = elbowroom.load(Journal, folder / "run.json").steps
    assert [each[0] for each in data["steps"]] == [each.step for each in steps]
    assert data["budget_bytes"] == 2560 * 1024
    assert data["are_costs_measured"] and data["measured_lanes"]["lane"]
    bounds = data["front"]["bounds"]
    assert len(bounds) > 2 and bounds == sorted(bounds, key=lambda each: (each[0], -each[1]))
    assert data["front"]["own"][1] >= min(seconds for nbytes, seconds in bounds if nbytes >= data["budget_bytes"])
    assert {path for path, *_ in data["modules"]} >= {f"{layer}.linear" for layer in range(LAYERS)}
    succeed("report", folder / "run.json", "--html", tmp_path / "report.html")
    assert read_data(tmp_path / "report.html") == data


def test_the_page_of_a_run_in_which_everything_fits(tmp_path: pathlib.Path) -> None:
    model, optimizer, take_step = make_job()
    with elbowroom.fit(model, optimizer, "1GiB", profile=make_profile.__wrapped__()) as room:  # type: ignore[attr-defined]
        for _ in range(4):
            with room.step():
                take_step()
        room.save_run(tmp_path / "run.json")
    succeed("view", tmp_path / "run.json", "-o", tmp_path / "run.html", "--bounds", 2, "--plans", 2)
    assert len(read_data(tmp_path / "run.html")["front"]["bounds"]) == 2
    succeed("report", tmp_path / "run.json", "--html", tmp_path / "report.html")


def test_a_page_from_a_trace_and_the_front_of_a_comparison(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    given = (folder / "trace.json", "--costs", folder / "costs.json")
    succeed("compare", *given, "--budgets", "90%peak,100%peak", "--strategies", "keep_all,vdnn",
            "-o", tmp_path / "front.json.gz")  # fmt: skip
    succeed("view", *given, "--bounds", 0, "--front", tmp_path / "front.json.gz", "-o", tmp_path / "plain.html")
    data = read_data(tmp_path / "plain.html")
    assert data["planned"] == data["plain"] and data["steps"] == [] and data["front"]["bounds"] == []
    assert {each[2] for each in data["front"]["plans"]} >= {"keep_all"}
    succeed("plan", *given, "--budget", "2560KiB", "-o", tmp_path / "plan.json")
    succeed("view", *given, "--plan", tmp_path / "plan.json", "--bounds", 2, "--plans", 2,
            "-o", tmp_path / "planned.html")  # fmt: skip
    planned = read_data(tmp_path / "planned.html")
    assert planned["planned"]["peak_bytes"] <= 2560 * 1024 < planned["plain"]["peak_bytes"]
    (least, slow, *_), (most, fast, *_) = planned["front"]["plans"]
    assert least < planned["planned"]["peak_bytes"] <= most == planned["plain"]["peak_bytes"] and fast <= slow
    for nbytes, seconds in planned["front"]["bounds"]:
        assert all(step >= seconds * (1 - 1e-9) for peak, step, *_ in planned["front"]["plans"] if peak <= nbytes)


def test_the_front_of_another_step_is_refused(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    given = (folder / "trace.json", "--costs", folder / "costs.json")
    front, out = tmp_path / "front.json", ("--bounds", 0, "-o", tmp_path / "page.html")
    succeed("compare", *given, "--budgets", "100%peak", "--strategies", "keep_all", "-o", front)
    document = json.loads(front.read_text())
    assert document["digest"] == elbowroom.load(Costs, folder / "costs.json").trace_digest

    def refuse(**fields: Any) -> str:
        front.write_text(json.dumps({**document, **fields}))
        return fail("view", *given, "--front", front, *out)

    assert "compares plans for trace 000000000000, but this is" in refuse(digest="0" * 64)
    assert "compares plans for the machine 'v100'" in refuse(hardware="v100")
    assert "run `elbowroom compare` again" in refuse(digest=None)
    entry = document["entries"][0]
    for changed in ({"step_seconds": -1.0}, {"step_seconds": float("inf")}, {"step_seconds": float("nan")},
                    {"peak_bytes": -1}, {"peak_bytes": float("inf")}, {"peak_bytes": []}):  # fmt: skip
        said = refuse(entries=[{**entry, "plan": {**entry["plan"], **changed}}])
        assert "was not written by `elbowroom compare --output`" in said
    assert "was not written by" in refuse(manages="nothing") and "was not written by" in refuse(entries=[1])
    assert "cannot read" in fail("view", *given, "--front", tmp_path, *out)
    assert "cannot read" in fail("view", *given, "--front", tmp_path / "none.json", *out)
    for text in ("[" * 100_000, "[]", "nonsense"):
        front.write_text(text)
        assert "was not written by" in fail("view", *given, "--front", front, *out)


def test_bounds_hold_for_plans_of_a_front_that_move_state(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    given = (folder / "trace.json", "--costs", folder / "costs.json")
    front = tmp_path / "front.json"
    succeed("compare", *given, "--budgets", "30%peak,60%peak", "--strategies", "auto", "--manages", "everything",
            "-o", front)  # fmt: skip
    succeed("view", *given, "--bounds", 4, "--front", front, "-o", tmp_path / "page.html")
    found = read_data(tmp_path / "page.html")["front"]
    smallest = json.loads(front.read_text())["smallest_budget_bytes"]
    assert found["bounds"][0][0] == smallest <= min(peak for peak, *_ in found["plans"])


def test_no_command_writes_over_what_it_reads(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    named = {each.name: tmp_path / each.name for each in folder.iterdir()}
    for name, path in named.items():
        path.write_bytes((folder / name).read_bytes())
    trace, costs = named["trace.json"], named["costs.json"]
    for arguments in (
        ("view", named["run.json"], "-o", named["run.json"]),
        ("view", trace, "--costs", costs, "--plan", named["plan.json"], "-o", named["plan.json"]),
        ("report", named["run.json"], "--html", tmp_path / "." / "run.json"),
        ("compare", trace, "--costs", costs, "-o", trace),
        ("plan", trace, "--costs", costs, "--budget", "90%peak", "-o", costs),
        ("layout", trace, "-o", trace),
    ):
        assert "it is one of the files that are read" in fail(*arguments)
    assert all(path.read_bytes() == (folder / name).read_bytes() for name, path in named.items())


def test_a_report_of_another_step_is_refused(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model, optimizer, step = make_job()
    other = elbowroom.capture(lambda: (step(), step()), model, optimizer)
    elbowroom.save(other, tmp_path / "other.json")
    elbowroom.save(price(other, elbowroom.load(HardwareProfile, folder / "profile.json")), tmp_path / "costs.json")
    given = "--trace", tmp_path / "other.json", "--costs", tmp_path / "costs.json"
    assert "which it holds: leave" in fail("report", folder / "run.json", *given)
    succeed("report", folder / "run.json", "--plan", folder / "plan.json")


def test_a_device_is_no_file_for_a_run(tmp_path: pathlib.Path, folder: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    journal = elbowroom.load(Journal, folder / "run.json")
    for path, words in (("fifo", "not a regular file"), (".", "a folder"), ("x" * 300, "too long")):
        with pytest.raises(UsageError, match=words):
            elbowroom.save(journal, tmp_path / path)
    assert [each.name for each in tmp_path.iterdir()] == ["fifo"] and (tmp_path / "fifo").is_fifo()


def test_formats_of_other_viewers(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    succeed("view", folder / "run.json", "--format", "perfetto", "-o", tmp_path / "run.perfetto.json")
    events = json.loads((tmp_path / "run.perfetto.json").read_text())["traceEvents"]
    assert {each["args"]["name"] for each in events if each["name"] == "process_name"} == {"forecast", "measured"}
    succeed("view", folder / "run.json", "--format", "memory_viz", "-o", tmp_path / "run.pickle")
    snapshot = pickle.loads((tmp_path / "run.pickle").read_bytes())
    assert "active" not in _memory_viz.segsum(snapshot) and "segments: 1" in _memory_viz.segsum(snapshot)
    shown = _memory_viz.trace(snapshot)
    assert shown.count(" = cudaMalloc") == 1 and shown.count("del ") == shown.count("# free completed")
    assert "0.linear.weight (parameter) in 0.linear" in _memory_viz.memory(snapshot, format_flamegraph=str)
    left = sum(block["requested_size"] for block in snapshot["segments"][0]["blocks"])
    lines = _memory_viz.segments(snapshot, format_flamegraph=str).splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in lines if ";active_allocated;" in line) == left > 0
    assert "MemoryViz.js" in _memory_viz.trace_plot(snapshot)


def test_misuse_is_explained(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = ("-o", tmp_path / "page.html")
    elbowroom.save(elbowroom.load(Journal, folder / "run.json"), tmp_path / "journal.json")
    assert "--save-trace" in fail("view", tmp_path / "journal.json", *out)
    costs = ("--trace", folder / "trace.json", "--costs", folder / "costs.json")
    succeed("view", tmp_path / "journal.json", *costs, "--bounds", 0, *out)
    assert "leave out --trace" in fail("view", folder / "trace.json", *costs, *out)
    assert "belong to --trace" in fail("view", folder / "run.json", "--plan", folder / "plan.json", *out)
    assert "--format perfetto" in fail("view", folder / "run.json", "--front", "x", "--format", "perfetto", *out)
    assert "--bounds belongs to the page" in fail(
        "view", folder / "run.json", "--bounds", 3, "--format", "perfetto", *out
    )
    for command in (("report", folder / "run.json"), ("view", folder / "run.json", "--bounds", 0, *out)):
        assert "--hardware belongs to --trace" in fail(*command, "--hardware", "v100")
    assert "--costs belongs to --trace" in fail("report", folder / "run.json", "--costs", folder / "costs.json")
    planned = (folder / "trace.json", "--costs", folder / "costs.json", "--plan", folder / "plan.json")
    for more in ((), ("--format", "perfetto")):
        assert "--host-memory: the plan puts" in fail("view", *planned, "--host-memory", "1KiB", *more, *out)
    given = (folder / "trace.json", folder / "plan.json", "--costs", folder / "costs.json")
    assert "--host-memory: the plan puts" in fail("simulate", *given, "--host-memory", 0)
    (tmp_path / "other.json").write_text("{}")
    assert "compare" in fail("view", folder / "run.json", "--bounds", 0, "--front", tmp_path / "other.json", *out)
    for other in (tmp_path / "other.json", folder / "plan.json"):
        assert "neither a trace" in fail("view", other, *out)
    assert "not a folder" in fail("view", folder / "run.json", "-o", tmp_path / "none" / "page.html")
    document = json.loads((folder / "run.json").read_text())
    document["step"]["plan"]["trace_digest"] = "0" * 64
    (tmp_path / "mixed.json").write_text(json.dumps(document))
    assert "mixed.json" in fail("view", tmp_path / "mixed.json", *out)
    document["step_version"] = 99
    (tmp_path / "newer.json").write_text(json.dumps(document))
    assert "does not read" in fail("view", tmp_path / "newer.json", *out)

"""The command line: every command for people and for programs, every kind of error with its exit code."""

from __future__ import annotations

import dataclasses
import errno
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

import elbowroom
from elbowroom import workloads
from elbowroom.cli.commands import demo as demo_command
from elbowroom.cli.demonstration import processes, results
from elbowroom.cli.journal_files import load_journal
from elbowroom.cli.main import make_app
from elbowroom.errors import ElbowroomError, Infeasible, TierFull, TraceError, UnknownMember, UsageError
from elbowroom.hardware.memory import count_device_bytes
from elbowroom.hardware.shipped import list_shipped
from elbowroom.ir import files as files_of_nouns
from elbowroom.ir.costs import Costs
from elbowroom.ir.digest import digest
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Journal
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace
from elbowroom.layout.lay_out import list_allocators
from elbowroom.native.library import NATIVE, find_library
from elbowroom.planner.problem import list_strategies
from elbowroom.scripts.exit_codes import FAILED, INFEASIBLE, INTERRUPTED, MISUSED, find_exit_code
from elbowroom.units import format_bytes

# Without optimizer state to speak of, so that a budget below the plain peak means something.
IMAGES = ["torchvision:squeezenet1_1", "--batch", "8", "--image-size", "96", "--optimizer", "sgd"]
TEXT = ["transformers:gpt2", "--layers", "1", "--batch", "1", "--sequence-length", "16"]


@pytest.fixture(autouse=True)
def found_by_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that a test starts find the package that is being tested."""
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(elbowroom.__file__).parents[1]))


def call(*arguments: object) -> Result:
    """Run the program in this process."""
    return CliRunner().invoke(make_app(), [str(argument) for argument in arguments])


def succeed(*arguments: object) -> str:
    """Run the program; what it printed."""
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def document(*arguments: object) -> dict[str, Any]:
    """Run the program with `--json`; its document."""
    found: dict[str, Any] = json.loads(succeed(*arguments, "--json"))
    assert found["command"] == arguments[0]
    return found


def fail(code: int, *arguments: object) -> str:
    """Run the program into an error of ours; what it said."""
    result = call(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a profile, a trace, a plan of it, and a run with what was saved of it."""
    folder = tmp_path_factory.mktemp("files")
    elbowroom.save(_paper_machine(), folder / "profile.json")
    succeed("capture", *IMAGES, "-o", folder / "trace.json.gz")
    hardware = ("--hardware", folder / "profile.json")
    succeed("plan", folder / "trace.json.gz", "--budget", "90%peak", *hardware, "-o", folder / "plan.json")
    saved = [f"--save-{name}={folder / f'run-{name}.json'}" for name in ("trace", "plan", "costs")]
    run = ("run", *IMAGES, "--device", "cpu", "--budget", "32MiB", "--steps", 5)
    result = call(*run, *hardware, "-o", folder / "run.json", *saved)
    assert result.exit_code == 0, result.output
    (folder / "run.txt").write_text(result.stdout)
    (folder / "progress.txt").write_text(result.stderr)
    return folder


def _paper_machine() -> HardwareProfile:
    from tests import leaks

    made: HardwareProfile = leaks.profile.__wrapped__()  # type: ignore[attr-defined]
    return made


# -- the program ------------------------------------------------------------------------------------------------------


def test_help_is_there_at_once() -> None:
    code = (
        "import sys; from elbowroom.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code and 'torch' not in sys.modules, sys.modules.get('torch')"
    )
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    for name in ("probe", "capture", "import", "plan", "simulate", "compare", "max-batch", "run", "report", "demo"):
        assert f" {name} " in done.stdout
    assert "demo-part" not in done.stdout


def test_the_module_is_the_program() -> None:
    command = [sys.executable, "-m", "elbowroom", "plan", "--help"]
    assert "--budget" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), MISUSED),
        (UnknownMember("strategy", "x", ("auto",)), MISUSED),
        (TraceError("x"), MISUSED),
        (Infeasible(needed_bytes=2, budget_bytes=1, op="op", is_whole_step=True), INFEASIBLE),
        (TierFull("disk", 2, 1, "free some"), FAILED),
        (ElbowroomError("x"), FAILED),
    ],
)
def test_exit_codes(error: ElbowroomError, code: int) -> None:
    assert find_exit_code(error) == code


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("elbowroom.cli.commands.probe.measure_machine", interrupt)
    assert "interrupted" in fail(INTERRUPTED, "probe")


def test_output_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("elbowroom.cli.commands.probe.measure_machine", write)
    assert "cannot write the output: No space left on device" in fail(FAILED, "probe")
    monkeypatch.setattr("typer.echo", write)
    assert "cannot write the output: No space left on device" in fail(FAILED, "--version")


def test_versions() -> None:
    pytorch = importlib.metadata.version("torch")  # which may leave out the kind of build
    said = succeed("--version")
    assert said == f"elbowroom {elbowroom.__version__}, PyTorch {pytorch}, Python {platform.python_version()}\n"


def test_help_names_what_there_is() -> None:
    words = " ".join(succeed("plan", "--help").replace("│", " ").split())
    assert ", ".join(list_strategies()) in words and ", ".join(list_shipped()) in words
    words = " ".join(succeed("layout", "--help").replace("│", " ").split())
    assert ", ".join(list_allocators()) in words


def test_a_shell_completes_commands_options_and_names() -> None:
    def complete(*words: str) -> list[str]:
        environment = {"_ELBOWROOM_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(("elbowroom", *words)),
                       "COMP_CWORD": str(len(words))}  # fmt: skip
        return CliRunner().invoke(make_app(), prog_name="elbowroom", env=environment).stdout.split()

    assert complete("sim") == ["simulate"]
    assert complete("plan", "--strategy", "au") == ["auto", "autoswap"]
    assert complete("plan", "--hardware", "rtx3") == ["rtx3090"]


# -- probe, capture, plan, simulate -----------------------------------------------------------------------------------


def test_probe(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def probe(device: str, *, spill_folder: str | None, most_bytes: None, progress: Any) -> HardwareProfile:
        told.append(f"{device} {spill_folder}")
        progress("links", 0.5)
        return _paper_machine()

    monkeypatch.setattr("elbowroom.hardware.profile_store.probe", probe)
    target = tmp_path / "profile.json"
    shown = succeed("probe", "--device", "cpu", "--spill-folder", tmp_path, "--output", target)
    assert "paper machine" in shown and "convolution" in shown and "disk" in shown
    assert elbowroom.load(HardwareProfile, target) == _paper_machine()
    found = document("probe")
    assert found["profile"]["name"] == "paper machine" and found["output"] is None
    assert told == [f"cpu {tmp_path}", "auto None"]


def test_capture(files: pathlib.Path, tmp_path: pathlib.Path) -> None:
    trace = elbowroom.load(Trace, files / "trace.json.gz")
    assert trace.name == IMAGES[0] and trace.needs
    found = document("capture", *TEXT, "--output", tmp_path / "text.json")
    assert found["ops"] == len(elbowroom.load(Trace, tmp_path / "text.json").ops)
    assert found["bytes_by_role"]["parameter"] > 0 and found["movable_bytes"] > 0


@pytest.fixture
def own_spec(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A function in the current folder that makes a perceptron."""
    (tmp_path / "mine_for_capture.py").write_text(
        "import torch\n"
        "def build(batch=8, device='cpu'):\n"
        "    print('a word on stdout')\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    x = torch.randn(batch, 8)\n"
        "    def step():\n"
        "        loss = model(x).mean(); loss.backward(); optimizer.step(); optimizer.zero_grad(); return loss\n"
        "    return model, optimizer, step\n"
    )
    monkeypatch.chdir(tmp_path)
    return "mine_for_capture:build"


def test_capture_of_a_function_of_ones_own(own_spec: str) -> None:
    found = document("capture", own_spec, "--batch", "4")
    assert found["name"] == own_spec and found["saves"] > 0


def test_plan(files: pathlib.Path) -> None:
    hardware = ("--hardware", files / "profile.json")
    shown = succeed("plan", files / "trace.json.gz", "--budget", "90%peak", *hardware)
    for name in ("plain peak", "smallest budget that works", "forecast peak", "forecast step", "planned in"):
        assert name in shown
    found = document("plan", files / "trace.json.gz", "--budget", "90%peak", *hardware)
    assert found["smallest_budget_bytes"] <= found["budget_bytes"] < found["plain_peak_bytes"]
    assert found["forecast_peak_bytes"] <= found["budget_bytes"]
    assert found["decisions"]["offload"] + found["decisions"]["recompute"] > 0
    assert found["slowdown"] >= 1 and found["planning_seconds"] > 0
    made = elbowroom.load(Plan, files / "plan.json")
    assert made.budget_bytes == found["budget_bytes"]
    tight = (
        "--budget",
        str(found["smallest_budget_bytes"] - 1),
        "--manages",
        "everything",
        "--strategy",
        "auto:effort=0.02",
    )
    found = document("plan", files / "trace.json.gz", *tight, *hardware)
    assert found["forecast_peak_bytes"] <= found["budget_bytes"] and found["state_reloaded_bytes"] > 0


def test_plan_of_a_spec_for_a_card_that_is_not_here() -> None:
    result = call("plan", *IMAGES, "--budget", "1GiB", "--hardware", "v100", "--strategy", "keep_all", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert "V100" in found["hardware"] and found["slowdown"] == 1
    assert "captured on cpu, with costs of" in result.stderr


def test_simulate(files: pathlib.Path) -> None:
    arguments = ("simulate", files / "trace.json.gz", files / "plan.json", "--hardware", files / "profile.json")
    shown = succeed(*arguments)
    assert "forecast" in shown and "Why each block is where it is" in shown
    found = document(*arguments)
    forecast = found["forecast"]
    assert found["fits"] and forecast["peak_bytes"] <= found["budget_bytes"]
    assert forecast["lower_arena_bytes"] >= forecast["lower_tier_bytes"] - 512
    assert forecast["reserved_bytes"] == forecast["arena_bytes"] == 0


def test_simulate_a_policy(files: pathlib.Path) -> None:
    step = ("simulate", files / "trace.json.gz", "--hardware", files / "profile.json", "--budget", "90%peak")
    shown = succeed(*step, "--policy", "lru", "--allocator", "caching")
    assert "Policy  lru" in shown and "evictions" in shown and "lower bound" in shown
    assert "A caching allocator would take" in shown and "laid out" not in shown
    found = document(*step, "--policy", "lru")
    forecast = found["forecast"]
    assert (found["policy"], found["strategy"], found["fits"]) == ("lru", None, True)
    assert 0 < forecast["peak_bytes"] <= found["budget_bytes"]
    assert forecast["evictions"] > 0 and forecast["replays"] == 0 and forecast["reloaded_bytes"] > 0
    assert forecast["reserved_bytes"] == 0
    first, third = (document(*step, "--policy", "habit", "--steps", count)["forecast"] for count in (1, 3))
    assert third["step_seconds"] != first["step_seconds"], "it tries what the steps before have taught"
    assert "are needed at once when" in fail(INFEASIBLE, *step[:-1], "1MiB", "--policy", "dtr")


def test_a_plan_or_a_policy(files: pathlib.Path) -> None:
    step = ("simulate", files / "trace.json.gz")
    policy, budget, hardware = ("--policy", "dtr"), ("--budget", "1GiB"), ("--hardware", files / "profile.json")
    assert "give a PLAN" in fail(MISUSED, *step, *hardware)
    assert "needs --budget" in fail(MISUSED, *step, *policy, *hardware)
    assert "leave out" in fail(MISUSED, *step, files / "plan.json", *policy, *budget, *hardware)
    assert "its own budget" in fail(MISUSED, *step, files / "plan.json", *budget, *hardware)
    assert "--steps belongs to --policy" in fail(MISUSED, *step, files / "plan.json", "--steps", 2, *hardware)
    assert "there are: coop, delta" in fail(MISUSED, *step, "--policy", "drt", *budget, *hardware)
    assert "--budget" in fail(MISUSED, *step, *policy, "--budget", "much", *hardware)
    assert "needs a plan" in fail(MISUSED, *step, *policy, *budget, "--allocator", "planned", *hardware)


def test_what_blocks_take_laid_out(files: pathlib.Path) -> None:
    given = ("--hardware", files / "profile.json")
    step = ("simulate", files / "trace.json.gz", files / "plan.json", *given, "--allocator", "planned")
    shown, forecast = succeed(*step), document(*step)["forecast"]
    assert "A caching allocator would take" in shown and "Laid out in one arena the same blocks take" in shown
    assert 0 < forecast["arena_bytes"] <= forecast["reserved_bytes"]
    laid_out = document("layout", files / "trace.json.gz", "--plan", files / "plan.json", *given)
    assert laid_out["arena_bytes"] == forecast["arena_bytes"]
    assert laid_out["pools"]["caching"] == forecast["reserved_bytes"]
    table = files / "blocks.csv"
    table.write_text("id,lower,upper,size\n1,0,4,1024\n")
    assert "blocks.csv is a table" in fail(MISUSED, "layout", table, "--plan", files / "plan.json", *given)


# -- run, report ------------------------------------------------------------------------------------------------------


def test_run(files: pathlib.Path) -> None:
    shown, progress = (files / "run.txt").read_text(), (files / "progress.txt").read_text()
    assert "Within budget in" in shown and "Why each block is where it is" in shown
    assert "step 5 of 5 (planned), loss" in progress
    journal = elbowroom.load(Journal, files / "run.json")
    assert len(journal.steps) == 5
    trace = elbowroom.load(Trace, files / "run-trace.json")
    assert len(elbowroom.load(Costs, files / "run-costs.json").op_seconds) == len(trace.ops)


def test_run_for_a_program(files: pathlib.Path, tmp_path: pathlib.Path) -> None:
    hardware = ("--hardware", files / "profile.json", "--device", "cpu")
    found = document("run", *IMAGES, "--budget", "100%peak", "--steps", 2, *hardware, "--ahead")
    assert len(found["losses"]) == len(found["journal"]["steps"]) == 2
    assert [float.fromhex(text) for text in found["losses_hex"]] == found["losses"]
    assert all(math.isfinite(loss) for loss in found["losses"])
    assert "everything fits" in found["report"]
    (tmp_path / "document.json").write_text(json.dumps(found))
    assert f"within {format_bytes(found['budget_bytes'])}" in succeed("report", tmp_path / "document.json")


def test_run_without_a_plan(files: pathlib.Path, tmp_path: pathlib.Path) -> None:
    hardware = ("--hardware", files / "profile.json", "--device", "cpu")
    planned = document("run", *IMAGES, "--budget", "100%peak", "--steps", 2, *hardware)
    for policy in ((), ("--policy", "lru")):
        found = document("run", *IMAGES, "--budget", "90%peak", "--steps", 2, *hardware, "--mode", "dynamic", *policy)
        assert [step["mode"] for step in found["journal"]["steps"]] == ["dynamic", "dynamic"]
        assert found["losses_hex"] == planned["losses_hex"]
        assert found["forecast"] is None
    assert "bytes" in fail(INFEASIBLE, "run", *IMAGES, "--budget", "1MiB", *hardware, "--mode", "dynamic")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--mode", "guess"), ("auto", "dynamic")),
        (("--mode", "dynamic", "--policy", "wishful"), ("no policy is called 'wishful'", "predictive", "lru")),
        (("--policy", "lru"), ("--mode dynamic",)),
        (("--mode", "dynamic", "--ahead"), ("plans nothing", "--ahead")),
        (("--mode", "dynamic", "--strategy", "offload_all"), ("plans nothing", "--strategy")),
        (("--mode", "dynamic", "--save-plan", "plan.json"), ("plans nothing", "--save-plan")),
    ],
)
def test_modes_and_policies_that_mean_nothing(options: tuple[str, ...], words: tuple[str, ...]) -> None:
    said = fail(MISUSED, "run", *IMAGES, "--budget", "1GiB", *options)
    assert all(word in said for word in words)


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), INTERRUPTED), (Infeasible(needed_bytes=2, budget_bytes=1, op="op", is_whole_step=True), 3)],
)
def test_a_run_that_ends_early_keeps_the_steps_that_are_done(
    files: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    build, counter = workloads.build, itertools.count()

    def build_and_stop(spec: str, **options: Any) -> workloads.Workload:
        workload = build(spec, **options)

        def step() -> object:
            if next(counter) == 3:
                raise error
            return workload.step()

        return dataclasses.replace(workload, step=step)

    monkeypatch.setattr(workloads, "build", build_and_stop)
    common = ("run", *IMAGES, "--device", "cpu", "--budget", "32M", "--hardware", files / "profile.json", "--json")
    result = call(*common, "-o", tmp_path / "run.json", "--save-plan", tmp_path / "plan.json")
    assert result.exit_code == code, result.output
    found = json.loads(result.stdout)
    assert not found["complete"] and len(found["losses"]) == 3
    assert [step.step for step in elbowroom.load(Journal, tmp_path / "run.json").steps] == [0, 1, 2]
    assert elbowroom.load(Plan, tmp_path / "plan.json").budget_bytes == 32 << 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "run.json"]
    assert ("interrupted" if code == INTERRUPTED else "op") in result.stderr


def test_a_share_of_this_device_is_what_fit_takes_it_for(files: pathlib.Path) -> None:
    hardware = ("--hardware", files / "profile.json", "--device", "cpu")
    result = call("run", *IMAGES, "--budget", "50%", "--steps", 1, *hardware, "--json")
    nbytes = count_device_bytes(torch.device("cpu")) // 2
    assert json.loads(result.stdout)["budget_bytes"] == nbytes
    assert f"({nbytes} bytes), a share of device memory" in result.stderr


def test_the_result_of_an_older_run_is_read(files: pathlib.Path, tmp_path: pathlib.Path) -> None:
    steps = [files_of_nouns.to_json(step) for step in elbowroom.load(Journal, files / "run.json").steps]
    steps[-1] |= {"peak_bytes": 0, "resident_bytes": 0}
    old = {"command": "run", "budget_bytes": 32 << 20, "journal": {"steps": steps}}
    (tmp_path / "old.json").write_text(json.dumps(old))
    journal, budget_bytes = load_journal(tmp_path / "old.json")
    assert journal.steps[-1].peak_bytes is None and budget_bytes == 32 << 20
    for version, said in ((0, "does not read"), (99, "does not read"), ("2", "expected an integer")):
        (tmp_path / "new.json").write_text(json.dumps(old | {"journal_version": version}))
        assert said in fail(MISUSED, "report", tmp_path / "new.json")


def test_reports_fit_a_terminal_of_80_columns(files: pathlib.Path) -> None:
    given = ("--hardware", files / "profile.json")
    assert max(map(len, (files / "run.txt").read_text().splitlines()[:-1])) <= 80
    shown = succeed("simulate", files / "trace.json.gz", files / "plan.json", *given)
    assert "Why each block is where it is" in shown
    assert max(map(len, shown.partition("\nBelow the device")[0].splitlines())) <= 80


def test_report_from_files_is_the_report_of_the_run(files: pathlib.Path, tmp_path: pathlib.Path) -> None:
    given = [f"--{name}={files / f'run-{name}.json'}" for name in ("trace", "plan", "costs")]
    shown = succeed("report", files / "run.json", *given)
    told = (files / "run.txt").read_text()
    manages = next(line for line in told.splitlines() if line.startswith("Manages everything"))
    assert shown.strip() in told.replace(manages + "\n", "")  # of the run, not of its files
    assert succeed("report", files / "run.json") == shown  # from the step in the file itself
    elbowroom.save(elbowroom.load(Journal, files / "run.json"), tmp_path / "journal.json")
    alone = succeed("report", tmp_path / "journal.json")
    assert "2 captured" in alone and "Why each block" not in alone
    found = document("report", files / "run.json", files / "run.json", *given)
    assert len(found["reports"]) == 2
    assert found["reports"][0]["steady"]["mode"] == "planned"
    assert found["reports"][0]["forecast_peak_bytes"] > 0 and found["modules"] is None
    shown = succeed("report", files / "run.json", *given, "--by", "module", "--depth", "1")
    assert "Bytes by module" in shown and "Why each block" not in shown and "features" in shown
    assert max(map(len, shown.splitlines())) <= 80
    found = document("report", files / "run.json", *given, "--by", "module")
    modules = {each["path"]: each for each in found["modules"]}
    assert {"features.0", "classifier.1", None} <= modules.keys()
    assert sum(each["peak_bytes"] for each in modules.values()) <= found["reports"][0]["forecast_peak_bytes"]
    assert "by kind or by module" in fail(MISUSED, "report", files / "run.json", *given, "--by", "layer")
    assert "depth" in fail(MISUSED, "report", files / "run.json", *given, "--depth", "2")


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["much", "-5", "0", "120%", "8XB", "nan", ""])
@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_budget_that_means_nothing(command: str, budget: str) -> None:
    # `--budget=` and not two words: "-5" would be taken for an option.
    assert "--budget" in fail(MISUSED, command, *IMAGES, f"--budget={budget}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("capture", "resnet50"), "names no workload"),
        (("capture", "torchvision:resnet5000"), "resnet50"),
        (("capture", "no.such.module:build"), "no.such"),
        (("capture", "torchvision:resnet18", "--batch", "0"), "batch"),
        (("capture", "torchvision:resnet18", "--dtype", "int3"), "dtype"),
        (("capture", "torchvision:resnet18", "--sequence-length", "5"), "sequence_length"),
        (("capture", "torchvision:resnet18", "--device", "abacus"), "abacus"),
        (("capture", "torchvision:resnet18", "-o", "no/such/folder/trace.json"), "no/such/folder"),
        (("plan", "no-such-file.json.gz", "--budget", "1GiB", "--hardware", "v100"), "no-such-file"),
        (("simulate", "no-trace.json", "no-plan.json"), "no-trace.json"),
        (("report", "no-journal.json"), "no-journal.json"),
        (("probe", "--device", "abacus"), "abacus"),
        (("probe", "--spill-folder", "no/such/folder"), "no/such/folder"),
    ],
)
def test_what_cannot_mean_anything(arguments: tuple[str, ...], words: str) -> None:
    assert words in fail(MISUSED, *arguments)


def test_an_error_of_a_workload_shows_the_frames_of_the_workload(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, code, says in (
        ("fails_to_build", "def make(): raise KeyError('no data set')", "KeyError: 'no data set'"),
        ("fails_to_import", "import is_not_there\ndef make(): pass", "No module named 'is_not_there'"),
    ):
        (tmp_path / f"{name}.py").write_text(code)
        result = call("capture", f"{name}:make", "-o", tmp_path / "trace.json")
        assert result.exit_code == FAILED and says in result.stderr
        assert result.stderr.count('File "') == 1 and f"{name}.py" in result.stderr
    assert not (tmp_path / "trace.json").exists()


def test_a_result_that_cannot_be_written_is_noticed_before_the_work(
    files: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("work has begun")

    monkeypatch.setattr("elbowroom.cli.sources.load_trace", work)
    monkeypatch.setattr("elbowroom.workloads.build", work)
    common = ("plan", files / "trace.json.gz", "--budget", "1GiB", "--hardware", "v100", "-o")
    os.mkfifo(tmp_path / "fifo")
    for path, words in (
        (tmp_path, "it is a folder"), (tmp_path / "fifo", "not a regular file"), (tmp_path / ("x" * 250), "too long"),
        (tmp_path / ("x" * 300), "too long"),
        (tmp_path / "fifo" / "plan.json", "is not a folder"),
    ):  # fmt: skip
        assert words in fail(MISUSED, *common, path)
    twice = ("-o", tmp_path / "run.json", "--save-plan", tmp_path / "." / "run.json")
    assert "given for two results" in fail(MISUSED, "run", *IMAGES, "--budget", "1GiB", *twice)
    assert [path.name for path in tmp_path.iterdir()] == ["fifo"]

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)  # as a file system does that is mounted to be read only
    assert "Permission denied" in fail(MISUSED, *common, tmp_path / "plan.json")


def test_names_that_mean_nothing_are_noticed_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("work has begun")

    monkeypatch.setattr("elbowroom.workloads.build", work)
    assert "auto" in fail(MISUSED, "plan", *IMAGES, "--budget", "1GiB", "--strategy", "autoo")
    assert "auto" in fail(MISUSED, "run", *IMAGES, "--budget", "1GiB", "--strategy", "autoo")
    assert "best_fit" in fail(MISUSED, "layout", "no-trace.json", "--allocator", "wishful")


def test_arguments_that_are_no_arguments() -> None:
    for arguments in (["plan"], ["no-such-command"], ["plan", "x", "--no-such-option"], ["run", "x", "--steps", "0"]):
        assert call(*arguments).exit_code == MISUSED


def test_unknown_members(files: pathlib.Path) -> None:
    trace = files / "trace.json.gz"
    said = fail(MISUSED, "plan", trace, "--budget", "90%peak", "--hardware", "rtx9999")
    assert "rtx3090" in said
    said = fail(
        MISUSED, "plan", trace, "--budget", "90%peak", "--hardware", files / "profile.json", "--strategy", "wishful"
    )
    assert "auto" in said and "keep_all" in said
    assert "--batch" in fail(MISUSED, "plan", trace, "--budget", "90%peak", "--batch", "4")


def test_infeasible_says_how_much_is_needed(files: pathlib.Path, own_spec: str) -> None:
    hardware = ("--hardware", files / "profile.json")
    succeed("capture", own_spec, "--batch", 64, "-o", "own.json")
    said = fail(INFEASIBLE, "plan", "own.json", "--budget", "512", *hardware)
    needed = document("plan", "own.json", "--budget", "100%peak", *hardware)["smallest_budget_bytes"]
    assert "512 bytes" in said and f"{needed} bytes" in said
    result = call("run", own_spec, "--batch", 64, "--budget", "512", *hardware, "--device", "cpu", "--ahead")
    assert result.exit_code == INFEASIBLE, result.output
    said = result.stderr
    assert "Set the memory budget to at least" in said


def _damage(path: pathlib.Path, how: str) -> bytes:
    whole = path.read_bytes()
    document = json.loads(whole)
    if how == "cut off":
        return whole[: len(whole) // 2]
    if how == "newer":
        return json.dumps(document | {"version": 999}).encode()
    if how == "another format":
        return json.dumps(document | {"format": "elbowroom.poem"}).encode()
    if how == "inconsistent":
        value = document["value"]
        first = next(key for key in ("ops", "decisions", "rates", "op_seconds", "steps") if key in value)
        value[first] = "not a list"
        return json.dumps(document).encode()
    return b"\x00\x80 not even text"


@pytest.mark.parametrize("how", ["cut off", "newer", "another format", "inconsistent", "noise"])
def test_damaged_files(files: pathlib.Path, tmp_path: pathlib.Path, how: str) -> None:
    names = {
        "trace": "run-trace.json", "plan": "run-plan.json", "profile": "profile.json", "costs": "run-costs.json",
        "journal": "run.json",
    }  # fmt: skip
    for kind, name in names.items():
        bad = tmp_path / name
        bad.write_bytes(_damage(files / name, how))
        good = {other: files / path for other, path in names.items()} | {kind: bad}
        arguments: Sequence[object] = ("simulate", good["trace"], good["plan"], "--hardware", good["profile"])
        if kind == "costs":
            arguments = ("simulate", good["trace"], good["plan"], "--costs", bad)
        elif kind == "journal":
            arguments = ("report", bad)
        assert name in fail(MISUSED, *arguments), kind


def test_files_of_another_step(files: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = tmp_path / "other.json.gz"
    succeed("capture", *TEXT, "-o", other)
    hardware = ("--hardware", files / "profile.json")
    own, found = elbowroom.load(Plan, files / "plan.json").trace_digest[:12], digest(elbowroom.load(Trace, other))[:12]
    for command in (
        ("simulate", other, files / "plan.json", *hardware),
        ("layout", other, "--plan", files / "plan.json", *hardware),
        ("report", files / "run.json", "--trace", other, "--plan", files / "plan.json", *hardware),
    ):
        assert f"plan.json is a plan for trace {own}, but this is {found}" in fail(MISUSED, *command)
    fail(MISUSED, "simulate", other, files / "plan.json", "--costs", files / "run-costs.json")
    (tmp_path / "document.json").write_text('{"command": "plan"}')
    assert "run --json" in fail(MISUSED, "report", tmp_path / "document.json")


# -- the demo ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_demo(files: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The demo with one small model, its parts in this process and not in their own; the parts that ran."""
    ran: list[str] = []

    def run_part(arguments: Sequence[str]) -> dict[str, Any]:
        ran.append(arguments[0])
        if arguments[0] == "probe":
            pathlib.Path(arguments[-1]).write_bytes((files / "profile.json").read_bytes())
            return {}
        return document(*arguments)

    options = {"batch": 8, "image_size": 96}
    part = demo_command.Part(spec=IMAGES[0], options=options, budget="95%peak", steps=5, patience_seconds=60)
    monkeypatch.setattr(demo_command, "PARTS", (part,))
    monkeypatch.setattr(processes, "run_part", run_part)
    return ran


def test_demo(small_demo: list[str]) -> None:
    found = document("demo")
    assert small_demo == ["probe", "demo-part", "demo-part"]
    (row,) = found["results"]
    assert row["losses_equal"] and row["budget_held"] and found["problems"] == []
    assert row["within"]["forecast_peak_bytes"] <= row["budget_bytes"]
    assert len(row["plain"]["losses"]) == 5


def test_demo_finds_the_smallest_budget(files: pathlib.Path) -> None:
    common = ("demo-part", IMAGES[0], "--batch", "8", "--image-size", "96", "--profile", files / "profile.json")
    found = document(*common, "--steps", 5, "--patience", "0.001", "--floor")["result"]
    assert 0 < found["smallest_budget_bytes"] <= found["peak_bytes"]
    assert len(found["losses"]) == 5  # at least so many, however impatient


def test_demo_fails_when_something_is_wrong(small_demo: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {
        "losses": ["0x1p0", "0x1p1"], "seconds": 1.0, "peak_bytes": 100, "resident_bytes": 300, "device": "cpu",
        "smallest_budget_bytes": 50,
    }  # fmt: skip
    within = {
        "losses": ["0x1p0", "0x1p2"], "seconds": 1.1, "peak_bytes": 96, "resident_bytes": 200,
        "forecast_peak_bytes": 94, "forecast_seconds": 1.05,
    }  # fmt: skip

    def run_part(arguments: Sequence[str]) -> dict[str, Any]:
        return {"result": within if "--budget" in arguments else plain}

    monkeypatch.setattr(processes, "run_part", run_part)
    result = call("demo")
    assert result.exit_code == FAILED
    assert "losses differ from step 2 on" in result.stdout
    assert "96 bytes is above the budget of 95" in result.stdout
    assert "NO" in result.stdout and "1.10 x" in result.stdout


@pytest.mark.parametrize("has_other_bits", [False, True])
def test_demo_tells_whether_plain_pytorch_repeats_itself(
    has_other_bits: bool, small_demo: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"seconds": 1.0, "peak_bytes": 100, "resident_bytes": 300, "device": "cpu", "smallest_budget_bytes": 50}
    within = {
        "losses": ["0x1p0", "0x1p3" if has_other_bits else "0x1p2"], "seconds": 1.1, "peak_bytes": 90,
        "resident_bytes": 200, "forecast_peak_bytes": 90, "forecast_seconds": 1.05,
    }  # fmt: skip
    outcomes = itertools.cycle([["0x1p0", "0x1p1"], ["0x1p0", "0x1p2"]])

    def run_part(arguments: Sequence[str]) -> dict[str, Any]:
        if arguments[0] == "probe":
            return {}
        return {"result": within if "--budget" in arguments else {**plain, "losses": next(outcomes)}}

    monkeypatch.setattr(processes, "run_part", run_part)
    result = call("demo")
    assert result.exit_code == (FAILED if has_other_bits else 0)
    shown = " ".join(result.stdout.split())
    assert "two plain processes had different losses" in shown
    assert ("equal the second's" in shown) is not has_other_bits


def test_halfway_is_never_below_what_works() -> None:
    assert demo_command.choose_budget("halfway", 100, 50) == 75
    assert demo_command.choose_budget("halfway", 99, 100) == 100
    assert demo_command.choose_budget("50%peak", 1000, 0) == 500


def test_a_part_that_fails_is_named() -> None:
    with pytest.raises(ElbowroomError, match=r"no-such-command.*exit code 2"):
        processes.run_part(["no-such-command"])


def test_a_result_without_a_measured_peak_is_a_problem() -> None:
    plain = {"losses": ["0x1p0"], "peak_bytes": 100}
    result = results.Result(spec="x", budget_bytes=50, plain=plain, within={"losses": ["0x1p0"], "peak_bytes": None})
    assert results.find_problems([result]) == ["x: no peak was measured"]


def test_build_says_where_the_library_is(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    said = succeed("build")
    assert "the planner's loops: ready in" in said and "was there already" in said
    found = document("build")
    assert found["loops_seconds"] > 0
    assert (found["library"], found["was_there"], found["is_usable"]) == (str(find_library(NATIVE)), True, True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = call("build")
    assert result.exit_code == MISUSED and "no-such-compiler was not found" in result.stderr
    assert list(tmp_path.rglob("*")) == []


def test_every_command_takes_json() -> None:
    group = typer.main.get_command(make_app())
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--json" in options, name

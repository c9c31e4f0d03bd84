"""Where PyTorch is not installed, files are read, and steps planned and simulated; what needs it says so."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from elbowroom.ir import files
from elbowroom.ir.run_step import RUN_STEP_VERSION, RunStep
from tests import generators
from tests.pure.test_report import JOURNAL, planned

ROOT = pathlib.Path(__file__).parents[2]
CODE = """
import importlib, json, sys
sys.path.insert(0, {source!r})
sys.modules["torch"] = None  # importing it raises ModuleNotFoundError, and importlib finds no such package
from typer.testing import CliRunner
from elbowroom.cli.main import make_app

def run(arguments):
    done = CliRunner().invoke(make_app(), arguments)
    return done.exit_code, done.stderr if done.exit_code else done.stdout, repr(done.exception)

print(json.dumps([run(each) for each in {commands!r}]))
"""
FILES = (
    ["view", "run.json", "-o", "run.html"],
    ["view", "run.json", "--format", "perfetto", "-o", "run.perfetto.json"],
    ["view", "run.json", "--format", "memory_viz", "-o", "run.pickle"],
    ["view", "trace.json", "--hardware", "rtx3090", "-o", "trace.html"],
    ["report", "run.json", "--html", "report.html"],
    ["plan", "trace.json", "--budget", "60%peak", "--hardware", "rtx3090", "--strategy", "autoswap", "-o", "plan.json"],
    ["plan", "trace.json", "--budget", "60%peak", "--hardware", "rtx3090", "--json"],
    ["simulate", "trace.json", "plan.json", "--hardware", "rtx3090", "--allocator", "planned"],
    ["simulate", "trace.json", "--policy", "predictive", "--budget", "80%peak", "--hardware", "rtx3090"],
    ["compare", "trace.json", "--budgets", "60%peak", "--strategies", "keep_all,autoswap", "--hardware", "rtx3090"],
    ["layout", "trace.json", "--plan", "plan.json", "--hardware", "rtx3090"],
)
WITHOUT_FILES = (["--version"], ["--help"], ["jobs", "--help"], ["share", "--help"], ["import", "--help"])
NEED_TORCH = (
    ["plan", "trace.json", "--budget", "60%peak"],
    ["capture", "transformers:gpt2", "-o", "gpt2.json"],
    ["probe"],
    ["run", "transformers:gpt2", "--budget", "1GiB"],
)

Results = dict[str, tuple[int, str, str]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Exit code, output and exception of each command, run one after another in a fresh interpreter."""
    folder = tmp_path_factory.mktemp("without_torch")
    trace, costs = generators.example()
    plan, _, _ = planned(trace, costs, 0.4)
    step = RunStep(trace=trace, costs=costs, plan=plan, budget_bytes=plan.budget_bytes, host_bytes=None, activities=())
    files.save(trace, folder / "trace.json")
    files.save(JOURNAL, folder / "run.json", {"step": files.to_json(step), "step_version": RUN_STEP_VERSION})
    commands = [*FILES, *WITHOUT_FILES, *NEED_TORCH]
    code = CODE.format(source=str(ROOT / "src"), commands=commands)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return {" ".join(command): tuple(found) for command, found in zip(commands, json.loads(done.stdout), strict=True)}


@pytest.mark.parametrize("command", [*FILES, *WITHOUT_FILES], ids=" ".join)
def test_command_needs_no_torch(command: list[str], results: Results) -> None:
    code, output, exception = results[" ".join(command)]
    assert code == 0, f"{output} {exception}"


@pytest.mark.parametrize("command", NEED_TORCH, ids=" ".join)
def test_command_says_that_it_needs_torch(command: list[str], results: Results) -> None:
    code, output, _ = results[" ".join(command)]
    assert code == 2
    assert "needs PyTorch, which is not installed here: pip install 'elbowroom[torch]'" in " ".join(output.split())

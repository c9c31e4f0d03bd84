"""The tutorial's commands print what the page says, the notebook runs, and the site builds without a warning."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from elbowroom.cli.main import make_app
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.workloads._packages import import_package

ROOT = pathlib.Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
VARIES = ("captured in", "this machine", "offloaded", "reloaded", "recomputed", "stalls", "segments", "Plan ", "below")
"""Lines that depend on the machine: what its plans move, and how long things take."""


def list_commands() -> list[tuple[str, list[str]]]:
    """Commands of the tutorial, each with the lines that it prints."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", TUTORIAL, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def label(line: str) -> str:
    """What stands before the figures of a line."""
    return re.split(r"\d", line)[0].strip()


def check_output(command: str, told: list[str], printed: str) -> None:
    """Check that each told line was printed: losses and what a capture finds to the letter."""
    exact = [" ".join(line.split()) for line in printed.splitlines()]
    labels = [label(line) for line in printed.splitlines()]
    for line in told:
        if not line.strip() or line == "..." or any(each in line for each in VARIES) or line.startswith("    "):
            continue
        is_exact = re.match(r"step \d", line) is not None or command.startswith("elbowroom capture")
        plain = " ".join(line.split())
        assert (plain in exact) if is_exact else (label(line) in labels), f"{command}: {line!r} not in\n{printed}"


@pytest.mark.filterwarnings("ignore")
def test_tutorial(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    profile: HardwareProfile,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in ("transformers", "torch"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    import_package("transformers")
    shutil.copytree(ROOT / "examples" / "tutorial", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr("elbowroom.hardware.profile_store.probe", lambda *_, **__: profile)
    monkeypatch.setattr("elbowroom.hardware.profile_store.probe", lambda *_, **__: profile)
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)  # the whole process would keep the limit
    commands = list_commands()
    assert len(commands) >= 8
    for command, told in commands:
        first, *arguments = shlex.split(command)
        if first == "elbowroom":
            result = CliRunner().invoke(make_app(), arguments)
            assert result.exit_code == 0, result.output
            check_output(command, told, result.stdout + capsys.readouterr().out)
        elif command == "python train.py":
            assert "Cannot allocate memory" in told[-1]  # run by the test below
        elif first == "python":
            sys.modules.pop("train", None)  # a process of its own would import it, and seed, anew
            runpy.run_path(arguments[0], run_name="__main__")
            check_output(command, told, capsys.readouterr().out)
    for name in ("train", "fit"):
        sys.modules.pop(name, None)


def test_the_tutorials_job_dies_where_the_page_says_so(tmp_path: pathlib.Path) -> None:
    hidden = "import sys; sys.modules['torchvision'] = None\n"  # transformers imports it, and the build may not match
    (tmp_path / "sitecustomize.py").write_text(hidden)
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "tutorial" / "train.py"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    if "No module named 'transformers'" in done.stderr:
        pytest.skip("transformers is not installed")
    assert done.returncode == 1
    assert "DefaultCPUAllocator: can't allocate memory" in done.stderr and "step 1" not in done.stdout


@pytest.mark.filterwarnings("ignore")
def test_notebook(
    monkeypatch: pytest.MonkeyPatch, profile: HardwareProfile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells run one after another; no cell holds an output that could be out of date."""
    monkeypatch.setattr("elbowroom.hardware.profile_store.probe", lambda *_, **__: profile)
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    names: dict[str, object] = {}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        assert not cell["outputs"]
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert "Within budget in all 6 steps" in capsys.readouterr().out


def test_the_site_builds(tmp_path: pathlib.Path) -> None:
    for package in ("sphinx", "myst_parser", "furo"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    rule = re.search(r"-m (sphinx .*) docs build/docs\n", (ROOT / "Makefile").read_text())
    assert rule is not None and "--fail-on-warning" in rule[1]
    options = [sys.executable, "-m", *rule[1].split()]
    done = subprocess.run([*options, "docs", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Fit a training job into a memory budget" in (tmp_path / "api.html").read_text()

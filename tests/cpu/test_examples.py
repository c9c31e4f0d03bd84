"""Every example runs within its budget, and every piece of code in docs/integrations is part of one."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import runpy
import shlex
import sys
import textwrap

import pytest
from typer.testing import CliRunner

from elbowroom.cli.main import make_app
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.scripts.request import read_request
from elbowroom.workloads._packages import import_package

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = sorted((ROOT / "docs" / "integrations").glob("*.md"))
NEEDS = {
    "accelerate_loop": ("accelerate",),
    "lightning_trainer": ("lightning",),
    "lora_sft": ("peft", "trl", "datasets"),
    "transformers_trainer": ("transformers", "accelerate"),
}
"""Packages that an example needs beyond those of the package."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, profile: HardwareProfile) -> None:
    """Measure nothing, and plan by the strategy that takes least time."""
    monkeypatch.setattr("elbowroom.hardware.profile_store.probe", lambda *_, **__: profile)
    monkeypatch.setenv("ELBOWROOM_STRATEGY", "offload_all")


def check_packages(name: str) -> None:
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if name in NEEDS:
        import_package("transformers")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples(path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    if path.stem == "unchanged_script":
        pytest.skip("a command of its page runs it")
    check_packages(path.stem)
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    if path.stem in ("transformers_trainer", "resumed_loop"):
        assert printed.rstrip().endswith("['planned', 'planned']")  # the resumed run learns nothing
    if path.stem in NEEDS:
        peak, unit, budget = re.findall(r"within ([\d.]+) (\w+).*max peak ([\d.]+) \2", printed)[-1]
        assert 0 < float(budget) <= float(peak), unit


def list_blocks(language: str) -> list[str]:
    return [each for page in PAGES for each in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)]


def test_code_of_the_pages_is_run() -> None:
    examples = [path.read_text() for path in EXAMPLES]
    blocks = list_blocks("python")
    assert len(blocks) >= 5
    for block in blocks:
        lines = [line for line in block.splitlines() if line.strip()]
        for text in examples:
            dedented = [textwrap.dedent(text), *(textwrap.dedent(part) for part in text.split("\n\n"))]
            if any(is_within(lines, each) for each in dedented):
                break
        else:
            raise AssertionError(f"no example has these lines: {block}")


def is_within(lines: list[str], text: str) -> bool:
    """Tell whether a text has these lines in this order, at any depth, perhaps with others between them."""
    rest = iter([each.strip() for each in text.splitlines()])
    return all(line.strip() in rest for line in lines)


def test_commands_of_the_pages_run(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Those of launchers are only checked for their arguments."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    commands = [shlex.split(line) for block in list_blocks("sh") for line in block.splitlines()]
    assert len(commands) >= 4
    for command in commands:
        if command[0] == "elbowroom":
            arguments = [each if not each.endswith(".json") else str(tmp_path / each) for each in command[1:]]
            result = CliRunner().invoke(make_app(), arguments)
            assert result.exit_code == 0, result.output
        else:
            start = command.index("elbowroom.run") + 1
            assert read_request(command[start:], program="run").memory_budget

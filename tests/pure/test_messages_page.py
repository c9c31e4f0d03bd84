"""docs/messages.md quotes messages as the source has them, and leaves none out that a training job can meet."""

from __future__ import annotations

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "messages.md").read_text()
SOURCE = ROOT / "src" / "elbowroom"
GAP = "…"
REASONS_OF_OTHERS = {"cli", "cost", "importers", "ir", "layout", "planner", "report", "simulator", "workloads"}
"""Rooms whose errors concern the arguments of one command, and say all there is to say."""
SMALL_PRINT = {
    "sharing/job_list.py", "sharing/simulation.py", "sharing/transport/address.py", "sharing/transport/server.py",
    "sharing/transport/client.py", "sharing/broker.py", "hardware/probe.py", "tracing/fake.py", "hooks/input_guard.py",
}  # fmt: skip
RAISED = {"UsageError", "TransferFailed", "TierError", "BrokerLost", "ElbowroomError"}
UNLIKELY = (
    "the spill file is closed",
    "the interpreter is shutting down",
    "of which no sections are read",
    "cannot be moved by the transfers of",
    "a step of the arena inside another one",
    "could not be truncated",
    "could not unregister a range",
    "-m …",
    "--memory-budget: …",
    "is not a Python file",
    "least: …",
)
"""What follows from another error, needs two faults at once, or explains itself."""


def quoted() -> list[str]:
    """Messages in the first column of the tables."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    cells = [row.split(" | ")[0][2:].replace("`elbowroom jobs`", "elbowroom jobs") for row in rows]
    return [text for cell in cells for text in re.findall(r"`((?:[^`]|`(?=elbowroom\.probe)|(?<=probe)`)+)`", cell)]


def template(node: ast.expr) -> str:
    """Text of a string expression, with gaps for what is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[-.\d]*[a-z]", GAP, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return GAP


@functools.cache
def texts(path: pathlib.Path) -> str:
    """All strings of a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return "\n".join(template(node) for node in nodes if isinstance(node, (ast.JoinedStr, ast.Constant)))


def pieces(pattern: str) -> list[str]:
    return [piece.strip() for piece in pattern.replace("`", "").split(GAP) if len(piece.strip()) > 3]


def is_in(pattern: str, text: str) -> bool:
    text = text.replace("`", "")
    return all(piece in text for piece in pieces(pattern))


@pytest.mark.parametrize("pattern", [each for each in quoted() if pieces(each)])
def test_message_is_in_the_source(pattern: str) -> None:
    assert any(is_in(pattern, texts(path)) for path in SOURCE.rglob("*.py")), pieces(pattern)


def sites() -> list[tuple[str, str]]:
    """Place and message of each error that is raised, and of each warning."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        if place.split("/")[0] in REASONS_OF_OTHERS or place in SMALL_PRINT:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name = ast.unparse(call.func)
            if (isinstance(node, ast.Raise) and name in RAISED) or name == "logger.warning":
                text = template(call.args[0])
                if len(text.replace(GAP, "").strip()) > len(", not "):
                    found.append((f"{place}:{call.lineno}", text))
    return found


@pytest.mark.parametrize(("place", "text"), sites(), ids=lambda each: each[:60])
def test_message_is_on_the_page(place: str, text: str) -> None:
    if any(each in text for each in UNLIKELY):
        return
    assert any(is_in(pattern, text) for pattern in quoted() if pieces(pattern)), f"{place}: {text}"


def test_sites_are_found() -> None:
    assert len(sites()) > 50
    assert len(quoted()) > 70

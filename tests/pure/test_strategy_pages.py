"""The strategy pages match their source, and name every option and source."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

from elbowroom.planner.options import list_options
from elbowroom.planner.problem import list_strategies

DOCS = pathlib.Path(__file__).parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("strategy_pages", DOCS / "strategy_pages.py")
assert SPEC is not None and SPEC.loader is not None
MAKER = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(MAKER)
PAGES = MAKER.make_pages()
OURS = {"keep_all", "offload_all", "recompute_all"}


def test_pages_are_up_to_date() -> None:
    there = {path.name: path.read_text() for path in (DOCS / "strategies").glob("*.md")}
    assert there == PAGES, "run: python docs/strategy_pages.py"


@pytest.mark.parametrize("name", list_strategies())
def test_every_option_and_source_is_documented(name: str) -> None:
    page = PAGES[f"{name}.md"]
    for option in list_options(name):
        row = next(line for line in page.splitlines() if line.startswith(f"| `{option}` |"))
        assert row.split(" | ")[-1].rstrip("| "), f"{name}: {option} is not explained"
    assert name in OURS or "Source:" in page

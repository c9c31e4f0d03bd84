"""Generates a page for every strategy from its docstrings: method, source, options.

    python docs/strategy_pages.py

Writes docs/strategies/; a test fails when the pages are out of date.
"""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
from collections.abc import Iterator

from elbowroom._family import get
from elbowroom.planner import strategies
from elbowroom.planner.options import ENTRY_POINT, describe, list_options, moves_state
from elbowroom.planner.problem import list_strategies

FOLDER = pathlib.Path(__file__).parent / "strategies"


def make_pages() -> dict[str, str]:
    """Return the text of each page by file name, including the index."""
    pages = {f"{name}.md": make_page(name) for name in list_strategies()}
    return {"README.md": make_index(), **pages}


def make_index() -> str:
    """Return the index, with one row per strategy."""
    lines = [f"| [`{name}`]({name}.md) | {head_of(name)[0]} |" for name in list_strategies()]
    movers = " and ".join(f"`{name}`" for name in list_strategies() if moves_state(name))
    return "\n".join([
        "# Strategies", "",
        "A strategy decides which storages are kept, offloaded or recomputed: `elbowroom plan ... --strategy NAME`,",
        "or `NAME:option=value,option=value`. `python docs/strategy_pages.py` generates these pages from source.", "",
        f"With `--manages everything`, {movers} also move the model's state: parameters, gradients and",
        "optimizer state. The others keep it on the device.", "",
        "| strategy | |", "|---|---|", *lines, "",
    ])  # fmt: skip


def make_page(name: str) -> str:
    """Return the page of a strategy: its module's docstring, and its options."""
    headline, rest = head_of(name)
    state = "can move the model's state as well" if moves_state(name) else "keeps the model's state on the device"
    parts = [f"# `{name}`", headline, *([rest] if rest else []), f"It {state}."]
    options = list(list_rows(name))
    if options:
        parts.append("## Options\n\n| option | values | default | |\n|---|---|---|---|\n" + "\n".join(options))
    else:
        parts.append("It has no options.")
    return "\n\n".join(parts) + "\n"


def head_of(name: str) -> tuple[str, str]:
    """Return the first paragraph of a strategy's docstring, and the rest."""
    module = importlib.import_module(f"{strategies.__name__}.{name}")
    headline, _, rest = (inspect.getdoc(module) or "").partition("\n\n")
    return " ".join(headline.split()), rest


def list_rows(name: str) -> Iterator[str]:
    """Yield a table row for each option."""
    make_plan = get(strategies, name, ENTRY_POINT)
    parameters = inspect.signature(make_plan).parameters
    texts = read_arguments(inspect.getdoc(make_plan) or "")
    for option, kind in list_options(name).items():
        values = describe(kind).replace("|", "\\|")
        default = parameters[option].default
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        yield f"| `{option}` | {values} | {shown} | {texts.get(option, '')} |"


def read_arguments(text: str) -> dict[str, str]:
    """Return the text on each argument in the "Args:" section of a docstring."""
    found: dict[str, str] = {}
    names: list[str] = []
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    for line in (section.group(1) if section else "").splitlines():
        head = re.fullmatch(r" {4}(\w+(?:, \w+)*): (.*)", line)
        if head:
            names = head.group(1).split(", ")
            found |= dict.fromkeys(names, head.group(2))
        elif line.strip():
            found |= {each: f"{found[each]} {line.strip()}" for each in names}
    return found


def main() -> None:
    """Write all pages, and delete those of strategies that no longer exist."""
    FOLDER.mkdir(exist_ok=True)
    pages = make_pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()

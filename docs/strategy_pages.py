"""A page for every strategy, made from its docstrings: what it does, where it comes from, its options.

    python docs/strategy_pages.py

Writes docs/strategies/; a test says when they are out of date.
"""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
from collections.abc import Iterator

from elbowroom._family import get
from elbowroom.planner import strategies
from elbowroom.planner.options import ENTRY_POINT, describe, list_options
from elbowroom.planner.problem import list_strategies

FOLDER = pathlib.Path(__file__).parent / "strategies"


def make_pages() -> dict[str, str]:
    """The text of each page by its file's name, the index among them."""
    pages = {f"{name}.md": make_page(name) for name in list_strategies()}
    return {"README.md": make_index(), **pages}


def make_index() -> str:
    """One line a strategy."""
    lines = [f"| [`{name}`]({name}.md) | {head_of(name)[0]} |" for name in list_strategies()]
    return "\n".join([
        "# Strategies", "",
        "Who decides what is kept, offloaded or recomputed. `elbowroom plan ... --strategy NAME`, or with options",
        "`NAME:option=value,option=value`. Pages are made from the source by `python docs/strategy_pages.py`.", "",
        "| strategy | |", "|---|---|", *lines, "",
    ])  # fmt: skip


def make_page(name: str) -> str:
    """What the module says of itself, and its options."""
    headline, rest = head_of(name)
    parts = [f"# `{name}`", headline, *([rest] if rest else [])]
    options = list(list_rows(name))
    if options:
        parts.append("## Options\n\n| option | values | default | |\n|---|---|---|---|\n" + "\n".join(options))
    else:
        parts.append("It has no options.")
    return "\n\n".join(parts) + "\n"


def head_of(name: str) -> tuple[str, str]:
    """The first paragraph of a strategy's docstring, and the others."""
    module = importlib.import_module(f"{strategies.__name__}.{name}")
    headline, _, rest = (inspect.getdoc(module) or "").partition("\n\n")
    return " ".join(headline.split()), rest


def list_rows(name: str) -> Iterator[str]:
    """A table row for each option."""
    make_plan = get(strategies, name, ENTRY_POINT)
    parameters = inspect.signature(make_plan).parameters
    texts = read_arguments(inspect.getdoc(make_plan) or "")
    for option, kind in list_options(name).items():
        values = describe(kind).replace("|", "\\|")
        default = parameters[option].default
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        yield f"| `{option}` | {values} | {shown} | {texts.get(option, '')} |"


def read_arguments(text: str) -> dict[str, str]:
    """What a docstring says of each argument under "Args:"."""
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
    """Write all pages, and take away those of strategies that are gone."""
    FOLDER.mkdir(exist_ok=True)
    pages = make_pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()

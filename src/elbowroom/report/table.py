"""HTML table of figures for notebooks, without scripts or styles."""

from __future__ import annotations

import html
from collections.abc import Mapping

from elbowroom.units import format_bytes, format_seconds


def render_table(title: str, figures: Mapping[str, int | float | str]) -> str:
    """Return an HTML table with one row per figure; all text is escaped.

    Args:
        figures: by name; names ending in "_bytes" or "_seconds" get a unit.
    """
    lines = ["<table>", f"<caption>{html.escape(title)}</caption>", "<tbody>"]
    for name, figure in figures.items():
        label, text = _describe(name, figure)
        lines.append(f'<tr><th scope="row">{html.escape(label)}</th><td>{html.escape(text)}</td></tr>')
    return "\n".join([*lines, "</tbody>", "</table>"])


def _describe(name: str, figure: int | float | str) -> tuple[str, str]:
    words = name.replace("_", " ")
    if isinstance(figure, str):
        return words, figure
    if name.endswith("_bytes"):
        return words.removesuffix(" bytes"), format_bytes(figure)
    if name.endswith("_seconds"):
        return words.removesuffix("seconds") + "time", format_seconds(figure)
    return words, str(figure)

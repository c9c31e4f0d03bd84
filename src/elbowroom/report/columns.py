"""Lays out text in columns, within the width of a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

COLUMNS = 80
"""Default width of a terminal; no line is longer."""


def align(rows: Sequence[Sequence[str]], sides: str, indent: str = "") -> list[str]:
    """Return lines of at most `COLUMNS` characters; a last cell that does not fit goes on a line of its own.

    Args:
        sides: alignment, "<" or ">", of each column except the last, which is not padded.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(sides))]
    widths[0] = max(8, min(widths[0], COLUMNS - len(indent) - sum(width + 2 for width in widths[1:])))
    lines: list[str] = []
    for row in rows:
        *above, first = textwrap.wrap(row[0], widths[0]) or [""]
        cells = zip((first, *row[1:-1]), sides, widths, strict=True)
        line = indent + "  ".join(f"{cell:{side}{width}}" for cell, side, width in cells)
        lines += [indent + part for part in above]
        if len(line) + 2 + len(row[-1]) <= COLUMNS:
            lines.append(f"{line}  {row[-1]}".rstrip())
        else:
            lines += [line.rstrip(), *wrap(indent + "    " + row[-1], indent + "    ")]
    return lines


def wrap(text: str, indent: str = "") -> list[str]:
    """Wrap text to `COLUMNS`, with a hanging indent; break longer words."""
    return textwrap.wrap(text, COLUMNS, subsequent_indent=indent, break_on_hyphens=False)

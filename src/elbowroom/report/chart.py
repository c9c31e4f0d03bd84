"""Text chart of bytes over time.

1.62 GiB |            ..:::..
         |        ..::'     ':.
 830 MiB |------##########------  budget
         |   ############ ####
         +---------------------
"""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.units import format_bytes, format_seconds

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_MARGIN = 11


def draw_chart(
    live_bytes: Sequence[int],
    begins: Sequence[float],
    *,
    budget_bytes: int = 0,
    plain_bytes: Sequence[int] = (),
    width: int = 64,
    height: int = 10,
) -> list[str]:
    """Return the lines of a bar chart of bytes over time.

    Args:
        live_bytes: bytes during each entry of a step.
        begins: begin of each entry, and the end of the last one, in seconds; one item longer than live_bytes.
        budget_bytes: drawn as a horizontal line; 0 for none.
        plain_bytes: like live_bytes, for the step without a plan; drawn as dots where it is higher.
        width, height: of the plot area, in characters.
    """
    if not live_bytes or not begins:
        return []
    columns = _most_in_columns(live_bytes, begins, width)
    plain = _most_in_columns(plain_bytes, begins, width) if plain_bytes else [0] * width
    top = max(*columns, *plain, budget_bytes, 1)
    budget_row = min(height - 1, int(budget_bytes * height / top)) if budget_bytes else -1
    lines = []
    for row in range(height - 1, -1, -1):
        cells = [
            _cell(bar * height / top - row, dots * height / top - row, row == budget_row)
            for bar, dots in zip(columns, plain, strict=True)
        ]
        lines.append(f"{_margin(row, height, top, budget_row, budget_bytes)} │{''.join(cells)}")
    end = format_seconds(begins[-1])
    lines.append(f"{'0 B':>{_MARGIN}} └{'─' * width}")
    lines.append(f"{'':{_MARGIN}}  0 s{end:>{width - 3}}")
    return [line.rstrip() for line in lines]


def _margin(row: int, height: int, top: int, budget_row: int, budget_bytes: int) -> str:
    if row == budget_row:
        return f"{format_bytes(budget_bytes):>{_MARGIN}}"
    return f"{format_bytes(top) if row == height - 1 else '':>{_MARGIN}}"


def _cell(bar: float, dots: float, is_budget: bool) -> str:
    """Return one character; `bar` and `dots` are the heights of the two within its row, in rows."""
    if bar >= 1:
        return "█"
    eighths = round(max(bar, 0.0) * 8)
    if eighths:
        return _EIGHTHS[eighths]
    if 0 < dots <= 1:
        return "·"
    return "─" if is_budget else " "


def _most_in_columns(values: Sequence[int], begins: Sequence[float], width: int) -> list[int]:
    """Return the maximum of the entries that begin in, or last through, each column."""
    columns = [0] * width
    whole = begins[-1] or 1.0
    for index, value in enumerate(values):
        first = min(width - 1, int(begins[index] / whole * width))
        last = min(width - 1, int(begins[index + 1] / whole * width))
        for column in range(first, last + 1):
            if value > columns[column]:
                columns[column] = value
    return columns

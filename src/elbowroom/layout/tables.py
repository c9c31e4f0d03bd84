"""Buffers as CSV, in the format of published allocation benchmarks: `id,lower,upper,size[,offset]`.

The offsets in a file are a solution; the caller decides whether they also are constraints.
"""

from __future__ import annotations

import array
import csv
import itertools
import operator
import os
import pathlib
from collections.abc import Sequence

from elbowroom._folders import replacing
from elbowroom.errors import TraceError
from elbowroom.ir.buffers import Buffer, Layout
from elbowroom.ir.text_files import read_lines

COLUMNS = ("id", "lower", "upper", "size")
OPTIONAL = ("alignment", "offset")
MOST_DIGITS = 19

SHARED_BELOW = 1 << 14
"""Equal numbers below this share one object, which saves 32 bytes per cell."""


def read_buffers(path: str | os.PathLike[str], *, is_pinned: bool = False) -> tuple[Buffer, ...]:
    """Read the buffers in a file.

    Args:
        is_pinned: whether each buffer is pinned to its offset in the file; otherwise offsets are ignored.

    Raises:
        UsageError: the file cannot be read.
        TraceError: the file is not such a table; the message names the line.
    """
    path = pathlib.Path(path)
    rows = csv.reader(read_lines(path))
    place = f"{path}, line 1"
    found: list[Buffer] = []
    lines = array.array("I")
    shared: dict[int, int] = {}
    try:
        header = [name.strip() for name in next(rows, [])]
        _check_header(place, header)
        for row in rows:
            place = f"{path}, line {rows.line_num}"
            if any(cell.strip() for cell in row):
                found.append(_read_row(place, header, row, is_pinned, shared))
                lines.append(rows.line_num)
    except csv.Error as error:
        raise TraceError(f"{path}, line {rows.line_num}: not a line of a table: {error}") from error
    _check_ids(path, found, lines)
    return tuple(found)


def _check_ids(path: pathlib.Path, buffers: list[Buffer], lines: Sequence[int]) -> None:
    if all(first.id < second.id for first, second in itertools.pairwise(buffers)):
        return
    in_order = sorted(buffers, key=operator.attrgetter("id"))  # a set of ids would take as much memory as the buffers
    for first, second in itertools.pairwise(in_order):
        if first.id == second.id:
            before, here = (line for line, each in zip(lines, buffers, strict=True) if each is first or each is second)
            raise TraceError(f"{path}, line {here}: id {first.id} is also that of line {before}")


def _check_header(place: str, header: list[str]) -> None:
    if not set(COLUMNS) <= set(header) <= {*COLUMNS, *OPTIONAL} or len(set(header)) < len(header):
        raise TraceError(
            f"{place}: the columns are {','.join(header)[:200]!r}; expected {','.join(COLUMNS)}, optionally "
            f"with {' and '.join(OPTIONAL)}"
        )


def _read_row(place: str, header: list[str], row: list[str], is_pinned: bool, shared: dict[int, int]) -> Buffer:
    if len(row) != len(header):
        raise TraceError(f"{place}: {len(row)} values for {len(header)} columns")
    values: dict[str, int] = {}
    for name, cell in zip(header, row, strict=True):
        text = cell.strip()
        if name == "offset" and not text:
            continue
        if not text.removeprefix("-").isdecimal() or len(text) > MOST_DIGITS:
            found = repr(cell[:60])
            raise TraceError(f"{place}: {name} is {found}, not a whole number of at most {MOST_DIGITS} digits")
        number = int(text)
        values[name] = shared.setdefault(number, number) if 0 <= number < SHARED_BELOW else number
    alignment = values.get("alignment", 1)
    offset = values.get("offset") if is_pinned else None
    if values["size"] <= 0:
        raise TraceError(f"{place}: size is {values['size']}; it must be positive")
    if min(values["lower"], values["upper"]) < 0 or values["lower"] == values["upper"]:
        raise TraceError(f"{place}: nothing lives from {values['lower']} to {values['upper']}; times begin at 0")
    if alignment < 1 or (offset is not None and (offset < 0 or offset % alignment)):
        raise TraceError(f"{place}: offset {offset} is not a multiple of the alignment, {alignment}")
    return Buffer(
        id=values["id"], lower=values["lower"], upper=values["upper"], nbytes=values["size"], alignment=alignment,
        offset=offset,
    )  # fmt: skip


def write_layout(path: str | os.PathLike[str], buffers: Sequence[Buffer], layout: Layout) -> None:
    """Write buffers and their offsets as a table.

    Raises:
        UsageError: the file cannot be written.
    """
    has_alignment = any(buffer.alignment != 1 for buffer in buffers)
    with replacing(path) as part, open(part, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, *(["alignment"] if has_alignment else []), "offset"])
        for buffer, offset in zip(buffers, layout.offsets, strict=True):
            alignment = [buffer.alignment] if has_alignment else []
            writer.writerow([buffer.id, buffer.lower, buffer.upper, buffer.nbytes, *alignment, offset])

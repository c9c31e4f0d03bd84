"""Buffers as CSV, as published benchmarks of allocation have them: `id,lower,upper,size[,offset]`.

An offset in a file says where a buffer lies, as a solution does; whether it must lie there is for the caller to say.
"""

from __future__ import annotations

import csv
import os
import pathlib
from collections.abc import Sequence

from elbowroom.errors import TraceError, UsageError
from elbowroom.ir.buffers import Buffer, Layout

COLUMNS = ("id", "lower", "upper", "size")
OPTIONAL = ("alignment", "offset")
MOST_DIGITS = 19


def read_buffers(path: str | os.PathLike[str], *, is_pinned: bool = False) -> tuple[Buffer, ...]:
    """The buffers in a file.

    Args:
        is_pinned: whether each must be at the offset that the file gives it; otherwise offsets are not looked at.

    Raises:
        UsageError: it cannot be read.
        TraceError: it is not such a table; names the line.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {os.fspath(path)}: {error}") from error
    rows = csv.reader(text.splitlines())
    header = [name.strip() for name in next(rows, [])]
    if not set(COLUMNS) <= set(header) <= {*COLUMNS, *OPTIONAL} or len(set(header)) < len(header):
        raise TraceError(
            f"{os.fspath(path)}, line 1: the columns are {','.join(header)!r}; expected {','.join(COLUMNS)}, and "
            f"perhaps {' and '.join(OPTIONAL)}"
        )
    found: list[Buffer] = []
    seen: dict[int, int] = {}
    for row in rows:
        if not any(cell.strip() for cell in row):
            continue
        place = f"{os.fspath(path)}, line {rows.line_num}"
        buffer = _read_row(place, header, row, is_pinned)
        if buffer.id in seen:
            raise TraceError(f"{place}: id {buffer.id} is also that of line {seen[buffer.id]}")
        seen[buffer.id] = rows.line_num
        found.append(buffer)
    return tuple(found)


def _read_row(place: str, header: list[str], row: list[str], is_pinned: bool) -> Buffer:
    if len(row) != len(header):
        raise TraceError(f"{place}: {len(row)} values for {len(header)} columns")
    values: dict[str, int] = {}
    for name, cell in zip(header, row, strict=True):
        text = cell.strip()
        if name == "offset" and not text:
            continue
        if not text.removeprefix("-").isdecimal() or len(text) > MOST_DIGITS:
            raise TraceError(f"{place}: {name} is {cell!r}, which is no whole number of at most {MOST_DIGITS} digits")
        values[name] = int(text)
    alignment = values.get("alignment", 1)
    offset = values.get("offset") if is_pinned else None
    if values["size"] <= 0:
        raise TraceError(f"{place}: size is {values['size']}; what has no bytes needs no place")
    if min(values["lower"], values["upper"]) < 0 or values["lower"] == values["upper"]:
        raise TraceError(f"{place}: nothing lives from {values['lower']} to {values['upper']}; times begin at 0")
    if alignment < 1 or (offset is not None and (offset < 0 or offset % alignment)):
        raise TraceError(f"{place}: offset {offset} is no multiple of the alignment, {alignment}")
    return Buffer(
        id=values["id"], lower=values["lower"], upper=values["upper"], nbytes=values["size"], alignment=alignment,
        offset=offset,
    )  # fmt: skip


def write_layout(path: str | os.PathLike[str], buffers: Sequence[Buffer], layout: Layout) -> None:
    """Buffers and their offsets, as a table.

    Raises:
        UsageError: it cannot be written.
    """
    has_alignment = any(buffer.alignment != 1 for buffer in buffers)
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*COLUMNS, *(["alignment"] if has_alignment else []), "offset"])
            for buffer, offset in zip(buffers, layout.offsets, strict=True):
                alignment = [buffer.alignment] if has_alignment else []
                writer.writerow([buffer.id, buffer.lower, buffer.upper, buffer.nbytes, *alignment, offset])
    except OSError as error:
        raise UsageError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error

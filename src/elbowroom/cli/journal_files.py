"""Reads the file of a run: its journal and its budget."""

from __future__ import annotations

from pathlib import Path

from elbowroom.errors import TraceError
from elbowroom.ir import files
from elbowroom.ir.journal import Journal


def load_journal(path: Path) -> tuple[Journal, int]:
    """Load a journal and its budget (0 if the file has none), from either kind of file.

    Raises:
        UsageError: there is no such file.
        TraceError: it is neither, or damaged.
    """
    if '"command"' not in files.peek(path, 4096):
        return files.load(Journal, path), 0
    document = files.load_fields(
        {"command": str, "journal": Journal, "journal_version": int, "budget_bytes": int}, path
    )
    if document.get("command") != "run" or "journal" not in document:
        raise TraceError(f"{path} is not the result of `elbowroom run --json`")
    budget_bytes: int = document.get("budget_bytes", 0)
    if budget_bytes < 1:
        raise TraceError(f"{path}: budget_bytes is not a number of bytes")
    version = document.get("journal_version", 1)  # missing in the oldest files
    if not 1 <= version <= files.version_of(Journal):
        raise TraceError(f"{path}: its journal is of a version that this Elbowroom does not read")
    return files.upgrade(document["journal"], version), budget_bytes

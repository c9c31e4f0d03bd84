"""Writes the document that a command prints with `--json` to a file."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from elbowroom.errors import UsageError


def save_document(path: pathlib.Path | None, command: str, fields: dict[str, Any]) -> None:
    """Write a command's result to `path` atomically; do nothing if `path` is None.

    Raises:
        UsageError: the folder does not exist or is not writable.
    """
    if path is None:
        return
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps({"command": command, **fields}, indent=2, allow_nan=False) + "\n")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error

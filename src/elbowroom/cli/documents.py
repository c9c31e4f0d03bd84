"""Writes the document that a command prints with `--json` to a file."""

from __future__ import annotations

import gzip
import json
import pathlib
from typing import Any

from elbowroom._folders import replacing


def save_document(path: pathlib.Path | None, command: str, fields: dict[str, Any]) -> None:
    """Write a command's result to `path` atomically; do nothing if `path` is None.

    Raises:
        UsageError: the folder does not exist or is not writable.
    """
    if path is None:
        return
    data = (json.dumps({"command": command, **fields}, indent=2, allow_nan=False) + "\n").encode()
    with replacing(path) as part:
        part.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)

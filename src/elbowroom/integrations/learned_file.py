"""File in a checkpoint folder with what a room has learned. A run that has none, or cannot read it, learns anew."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

from elbowroom._folders import replacing
from elbowroom.errors import TraceError
from elbowroom.room import Room

logger = logging.getLogger(__name__)


def save_learned(room: Room, folder: pathlib.Path, rank: int) -> None:
    """Write the file of a rank. Warn if it cannot be written."""
    with _warning("is not saved"):
        content = gzip.compress(json.dumps(room.state_dict()).encode())
        with replacing(folder / _name_file(rank)) as part:
            part.write_bytes(content)


def read_learned(folder: pathlib.Path, rank: int) -> dict[str, Any]:
    """Return what the file of a rank holds, for `load_learned`; nothing if there is no file, or it is damaged."""
    found: dict[str, Any] = {}
    with _warning("is not used"), contextlib.suppress(FileNotFoundError):
        found = json.loads(gzip.decompress((folder / _name_file(rank)).read_bytes()))
    return found


def load_learned(room: Room, learned: dict[str, Any]) -> None:
    """Have a room take over what `read_learned` returned. Warn if that is corrupt."""
    if learned:
        with _warning("is not used"):
            room.load_state_dict(learned)


def _name_file(rank: int) -> str:
    return "elbowroom.json.gz" if rank == 0 else f"elbowroom.rank{rank}.json.gz"


@contextlib.contextmanager
def _warning(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, TraceError) as error:
        logger.warning("what Elbowroom has learned %s: %s", what, error)

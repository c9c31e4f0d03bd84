"""Computes storages again by the ops that made them in this very step, which the extension has recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elbowroom.hooks.exposed_memory import is_shared
from elbowroom.native import library
from elbowroom.runtime.saved_storage import SavedStorage

Recording = Any
"""The recorded ops that compute one storage again: an object of the extension. They start from `leaves`, which autograd
has saved, and from `sources`, which the program holds; they took `seconds` and allocate `nbytes` at most."""


def is_exposed(recording: Recording, target: SavedStorage) -> bool:
    """Tell whether NumPy or another process may write unseen to the storages that a replay reads or computes."""
    return any(each.is_exposed() for each in (target, *recording.leaves)) or any(map(is_shared, recording.kept))


def count_bytes(recordings: Sequence[Recording]) -> int:
    """Return the most bytes that a replay of all these recordings together allocates."""
    return int(library.load().count_replay(list(recordings)))


def replay(recordings: Sequence[Recording], outputs: Sequence[SavedStorage]) -> None:
    """Compute the targets of recordings again, together, and give each of `outputs` its new storage.

    Each op runs under the settings that it ran under before; autograd, saved-tensor hooks, autocast, dispatch modes and
    random generators are not involved.
    """
    leaves = {leaf.record: leaf.find_storage() for recording in recordings for leaf in recording.leaves}
    storages = library.load().replay(list(recordings), list(leaves.items()))
    for saved, storage in zip(outputs, storages, strict=True):
        saved.storage = storage

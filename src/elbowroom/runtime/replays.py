"""Recomputes storages by replaying the ops that the extension recorded in this step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elbowroom.errors import SavedTensorLost
from elbowroom.hooks.exposed_memory import is_shared
from elbowroom.native import library
from elbowroom.runtime.saved_storage import SavedStorage

Recording = Any
"""Recorded ops that recompute one storage: an object of the extension. They start from `leaves`, which autograd has
saved, and from `sources`, which the program holds. They took `seconds`, allocate at most `nbytes`, and
start from storages of `read_bytes`."""


def is_exposed(recording: Recording, target: SavedStorage) -> bool:
    """Tell whether NumPy or another process may write to the storages that a replay reads or computes."""
    return any(each.is_exposed() for each in (target, *recording.leaves)) or any(map(is_shared, recording.kept))


def count_bytes(recordings: Sequence[Recording]) -> int:
    """Return the peak bytes that replaying these recordings together allocates."""
    return int(library.load().count_replay(list(recordings)))


def list_reads(recordings: Sequence[Recording], outputs: Sequence[SavedStorage]) -> list[torch.UntypedStorage]:
    """Return the storages that `replay` starts from."""
    leaves = [leaf.find_storage() for recording in recordings for leaf in recording.leaves]
    kept = [each for recording in recordings for each in recording.kept]
    copies = [copied for saved in outputs for copied in saved.inputs.values()]
    return [each for each in (*leaves, *kept, *copies) if each is not None]


def replay(recordings: Sequence[Recording], outputs: Sequence[SavedStorage], table: Any) -> None:
    """Recompute the targets of several recordings together and assign the new storages to `outputs`.

    `table`: the records of the step's storages. Each op runs under the numeric settings of its first run, without
    autograd, saved-tensor hooks, autocast, dispatch modes and random generators.

    Raises:
        SavedTensorLost: weights that FSDP gathers are not there, or differ from those that the ops read; or another
            thread has written to a tensor that the ops read.
    """
    if not all(recording.is_back() for recording in recordings):
        raise SavedTensorLost(
            "a saved tensor was to be computed again from weights of fully_shard, which are not gathered now, or have "
            "changed since the forward pass. Update weights between steps, and begin backward passes at results of "
            "sharded modules; or give mode='dynamic', in which nothing is computed from such weights."
        )
    leaves = {leaf.record: leaf.find_storage() for recording in recordings for leaf in recording.leaves}
    copies = {read.record: copied for saved in outputs for read, copied in saved.inputs.items()}
    if not all(recording.is_intact(table, list(copies)) for recording in recordings):
        raise SavedTensorLost(
            "a saved tensor was to be computed again from a tensor that a thread of the program, or a callback in a "
            "thread of PyTorch, has written to since the forward pass. Write to it in the thread of the step, or "
            "between steps; or give strategy='offload_all', whose plans compute nothing again."
        )
    leaves |= copies
    storages = library.load().replay(list(recordings), list(leaves.items()))
    for saved, storage in zip(outputs, storages, strict=True):
        saved.storage = storage

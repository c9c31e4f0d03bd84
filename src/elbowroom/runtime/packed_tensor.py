"""Protocol of the objects that pack hooks return to autograd in place of saved tensors."""

from __future__ import annotations

from typing import Protocol

from elbowroom.runtime.saved_storage import SavedStorage


class PackedTensor(Protocol):
    """Placeholder of a saved tensor whose storage may move; made by the extension (`native/shielded_calls.cpp`).

    Attributes:
        index: index of the save within the step.
        residence: storage of the tensor; None if it does not move.
        version: version counter of the tensor when it was saved.
    """

    index: int
    residence: SavedStorage | None
    version: int

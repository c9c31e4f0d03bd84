"""Objects that pack hooks return to autograd in place of saved tensors."""

from __future__ import annotations

from collections.abc import Callable

from elbowroom.runtime.saved_storage import SavedStorage


class PackedTensor:
    """Placeholder of a saved tensor whose storage may move.

    Attributes:
        on_death: called with `index` and `residence` when autograd releases the tensor, at any moment in any thread.
        index: index of the save within the step.
        residence: storage of the tensor; None if it does not move. The extension reads this.
        version: version counter of the tensor when it was saved.
    """

    __slots__ = ("index", "on_death", "residence", "version")

    def __init__(
        self,
        on_death: Callable[[int, SavedStorage | None], None],
        index: int,
        residence: SavedStorage | None,
        version: int,
    ) -> None:
        self.on_death = on_death
        self.index = index
        self.residence = residence
        self.version = version

    def __del__(self) -> None:
        self.on_death(self.index, self.residence)

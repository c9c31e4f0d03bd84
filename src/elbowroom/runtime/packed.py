"""Objects that autograd holds in the place of saved tensors."""

from __future__ import annotations

from collections.abc import Callable

from elbowroom.runtime.saved_storage import SavedStorage


class PackedTensor:
    """Stands for a saved tensor whose storage may move.

    Attributes:
        on_death: called with `index` and `residence` when autograd gives the tensor up: at any moment, in any thread.
        index: position of the save among those of the step.
        residence: storage of the tensor; None if it stays where it is. The extension reads this.
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

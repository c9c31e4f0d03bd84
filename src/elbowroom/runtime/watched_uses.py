"""WatchedUses: ops note what they use in steps in which model state stays, so that their results can leave."""

from __future__ import annotations

from typing import Any

from elbowroom.hooks.compiled_regions import show_regions
from elbowroom.hooks.exposed_memory import Restorer, restore_before_access
from elbowroom.hooks.profilers import show_state_to_profilers
from elbowroom.native import library


def show_moves(restorer: Restorer) -> None:
    """Have what is away come back where it is used without an op."""
    show_regions()
    show_state_to_profilers()
    restore_before_access(restorer)


class WatchedUses:
    """Sets whether ops note what they use although no state may leave.

    Args:
        table: of the extension; has a record of each storage that has left.
        may_watch: False to leave ops alone.
    """

    def __init__(self, table: Any, *, may_watch: bool) -> None:
        self._table = table
        self._may_watch = may_watch
        self._are_watched = False

    def begin(self, restorer: Restorer) -> None:
        """Have ops note what they use, from the next one on."""
        if self._may_watch and not self._are_watched:
            self._are_watched = True
            show_moves(restorer)
            self._table.watch_uses(True)
            library.load().watch_all_threads()

    def end(self) -> None:
        """Have ops note it only if there is state that may leave."""
        if self._are_watched:
            self._are_watched = False
            self._table.watch_uses(False)
            library.load().watch_all_threads()

"""UnwrittenStorages: storages that ops in slices are still to write."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class UnwrittenStorages:
    """Storages whose contents ops compute that wait (`runtime/waiting_ops.py`).

    Attributes:
        records: of the storages; none if no op waits.
    """

    def __init__(self) -> None:
        self.records: set[Any] = set()
        self._run: weakref.WeakMethod[Callable[[], None]] | None = None

    def have_written(self, run: Callable[[], None]) -> None:
        """Set the method that runs the ops that wait. It is not kept alive."""
        self._run = weakref.WeakMethod(run)

    def run_waiting(self) -> None:
        """Run the ops that wait. Called by the extension, before what has to come after them."""
        run = None if self._run is None else self._run()
        if run is not None:
            run()

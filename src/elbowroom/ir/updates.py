"""Updates of parameters: parts of an optimizer's step that change some parameters, with their state, or fail before.

A mark at the beginning of an update and one at its end are ops that use everything that the update changes. In between
none of it leaves the device, so a transfer that fails leaves each of these parameters as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elbowroom.ir.trace import Op

BEGIN = "elbowroom.begin_update.default"
"""Name of the op that begins an update."""

END = "elbowroom.end_update.default"
"""Name of the op that ends it."""

MARKS = frozenset((BEGIN, END))


def find_updates(ops: Iterable[Op]) -> Mapping[int, tuple[tuple[int, int], ...]]:
    """Return the updates of each storage, as ticks of their marks, by storage id."""
    found: dict[int, list[tuple[int, int]]] = {}
    begun: Op | None = None
    for op in ops:
        if op.name == BEGIN:
            begun = op
        elif op.name == END and begun is not None:
            for storage in {view.storage for view in begun.reads} & {view.storage for view in op.reads}:
                found.setdefault(storage, []).append((begun.tick, op.tick))
            begun = None
    return {storage: tuple(spans) for storage, spans in found.items()}

"""Figures of the ops that ran in slices."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class SliceFigures:
    """Figures of the ops that ran in slices.

    Attributes:
        counts: how often each op did, by name.
        inexact: names of those whose slices change the order of a sum.
    """

    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    inexact: set[str] = dataclasses.field(default_factory=set)

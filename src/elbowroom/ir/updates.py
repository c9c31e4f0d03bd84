"""Updates of parameters: parts of an optimizer's step that change some parameters, with their state, or fail before.

A mark at the beginning of an update and one at its end are ops that use everything that the update changes. In between
none of it leaves the device, so a transfer that fails leaves each of these parameters as it was.
"""

from __future__ import annotations

from elbowroom.errors import UPDATE_MARKS

BEGIN, END = UPDATE_MARKS
"""Names of the op that begins an update, and of the one that ends it."""

MARKS = frozenset(UPDATE_MARKS)

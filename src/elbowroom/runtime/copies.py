"""Copies in the tier below, and the record of which block each of them has."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol


class Copy(Protocol):
    """The contents of a storage in the tier below, and the state of its last transfer."""

    nbytes: int


class Record(weakref.ref[Any]):
    """A copy, and its block in the tier below: an offset, or a block of host memory; None until one is reserved.

    Made before the block is reserved, and kept until it is free again. So a block is never taken without a record,
    wherever an exception strikes; and a copy that is dropped without being discarded is noticed by its death.

    Attributes:
        block: as above.
        nbytes: of the copy.
    """

    __slots__ = ("block", "nbytes")

    block: Any
    nbytes: int


def keep_living(records: Iterable[Record]) -> set[Record]:
    """The records of copies that somebody still holds."""
    return {record for record in list(records) if record() is not None}

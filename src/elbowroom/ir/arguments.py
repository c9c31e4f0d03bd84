"""Checks what the functions for planning without a device are given."""

from __future__ import annotations

import numbers

from elbowroom.errors import UsageError

LARGEST_BYTES = 1 << 62
"""Sums of bytes must stay below what 64 bits hold."""


def check_amount(name: str, nbytes: int) -> None:
    """Refuse what is no number of bytes.

    Raises:
        UsageError: it is negative, larger than any memory, or no integer.
    """
    is_integer = isinstance(nbytes, numbers.Integral) and not isinstance(nbytes, bool)
    if not is_integer or not 0 <= nbytes <= LARGEST_BYTES:
        raise UsageError(f"{name} is {nbytes!r}; it takes a number of bytes, from 0 to {LARGEST_BYTES}")


def check_amounts(**amounts: int | None) -> None:
    """Refuse what is no number of bytes; None passes.

    Raises:
        UsageError: as for `check_amount`.
    """
    for name, nbytes in amounts.items():
        if nbytes is not None:
            check_amount(name, nbytes)


def check_kinds(**arguments: tuple[object, type]) -> None:
    """Refuse arguments of other types.

    Args:
        arguments: each with its type, by name.

    Raises:
        UsageError: one is of another type; names it.
    """
    for name, (value, kind) in arguments.items():
        if not isinstance(value, kind):
            given = repr(value) if value is None or isinstance(value, str) else f"a {type(value).__name__}"
            raise UsageError(f"{name} takes a {kind.__name__} (of {kind.__module__}), not {given}")

"""Interrupts the main thread with calls of Python functions."""

from __future__ import annotations

from collections.abc import Callable

from elbowroom.native import library


def call_in_main_thread(function: Callable[[], None]) -> None:
    """Have the main thread call a function between two bytecode instructions, not inside an op.

    An exception of the function propagates from there.
    """
    library.load().call_soon(function)

"""Calls Python functions between two calls of the program."""

from __future__ import annotations

from collections.abc import Callable

from elbowroom.native import library


def call_in_main_thread(function: Callable[[], None]) -> None:
    """Have the main thread call a function between two instructions of Python, not inside an op.

    An error that the function raises is raised there.
    """
    library.load().call_soon(function)

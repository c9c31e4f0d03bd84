"""What watches a step, in Python or with the library in C++ under it: whichever a test runs by."""

from __future__ import annotations

from elbowroom.runtime.online_engine import OnlineEngine
from elbowroom.runtime.quickened import choose


def list_engines() -> set[type[OnlineEngine]]:
    """The classes that a room may run its steps by, for what a test has to put in the place of a method."""
    return {choose(is_quick=is_quick).engine for is_quick in (False, True)}

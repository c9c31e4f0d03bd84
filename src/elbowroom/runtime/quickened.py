"""The classes that a step is made of: in Python alone, or with those of the library in C++ under them.

A class of the library has the attributes that both touch, and methods for what comes most often; for the rest it calls
those of the class in Python. So what a step is made of has one meaning, and two speeds.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

from elbowroom.hooks import sightings
from elbowroom.hooks.estimates import Estimate, Estimates
from elbowroom.hooks.hidden import hide_from_compiler
from elbowroom.hooks.kinds import Kind, find_kind
from elbowroom.hooks.settings import read_settings
from elbowroom.hooks.stopwatch import Pace
from elbowroom.ir.events import StorageFreed, StorageNeeded, StorageSaved
from elbowroom.ir.trace import LASTING, Need, Save, Storage, Trace
from elbowroom.quick import library
from elbowroom.runtime import account, historian
from elbowroom.runtime.calls import Slot
from elbowroom.runtime.calm import Calm
from elbowroom.runtime.engine import Engine
from elbowroom.runtime.follower import Follower
from elbowroom.runtime.history import Run
from elbowroom.runtime.online_engine import OnlineEngine
from elbowroom.runtime.past import Past
from elbowroom.runtime.recorder import Recorder
from elbowroom.runtime.residence import NO_VIEWS, NOBODY, Guest, Keepsake, Residence
from elbowroom.runtime.watcher import NO_NAMES

Historian, Account = historian.Historian, account.Account


class Made(NamedTuple):
    """What steps are made of.

    Attributes:
        engine: runs one.
        sightings: has `Sighting` and `Order`.
    """

    engine: type[OnlineEngine]
    sightings: ModuleType


IN_PYTHON = Made(OnlineEngine, sightings)


def choose(*, is_quick: bool) -> Made:
    """What steps are to be made of. `is_quick`: whether the library is used, if it has been built."""
    quick = library.load() if is_quick else None
    return IN_PYTHON if quick is None else _quicken(quick)


@functools.cache
def _quicken(quick: ModuleType) -> Made:
    quick.learn(_list_known())
    for function in _CALLED:  # by machine code, which PyTorch's compiler does not see: so it would begin with these
        hide_from_compiler(function)

    def put_under(name: str, made: type[Any], **attributes: Any) -> type[Any]:
        return type(made.__name__, (getattr(quick, name), made), {"__module__": made.__module__, **attributes})

    engine = put_under(
        "Hooks", OnlineEngine,
        account_class=put_under("Book", Account), historian_class=put_under("Watch", Historian),
        calm_class=put_under("Lull", Calm), past_class=put_under("Log", Past),
        follower_class=put_under("Track", Follower),
    )  # fmt: skip
    return Made(engine, quick)


_CALLED = (
    *(Historian.run, Historian.watch, Historian._count, Historian._note, Historian._note_written),
    *(Historian._record, Historian._measure, Account.measure, Account.see, Estimates.find_of, Kind.list_written),
    *(OnlineEngine.about_to_write, OnlineEngine.written, Recorder.run, read_settings, find_kind),
)


def _list_known() -> dict[str, Any]:
    """What the library looks for attributes in, and constants that it compares with, by the names that it has for
    them."""
    named = {
        each.__name__: each
        for each in (Residence, Estimate, Pace, Keepsake, Guest, Trace, Save, Need, Storage, Slot, Run)
    }
    return named | {
        "Place": account._Place, "StayingPlace": account._StayingPlace, "Reads": historian._Reads,
        "NO_VIEWS": NO_VIEWS, "NOBODY": NOBODY, "NO_NAMES": NO_NAMES, "LASTING": tuple(LASTING),
        "events": (StorageSaved, StorageNeeded, StorageFreed), "find_kind": find_kind, "read_settings": read_settings,
        "pack": Engine.pack, "unpack": Engine.unpack,
    }  # fmt: skip

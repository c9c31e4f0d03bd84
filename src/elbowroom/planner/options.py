"""Parses a strategy with its options: "autoswap", or "autoswap:score=doa,mode=zero_overhead".

The options of a strategy are the keyword parameters of its `make_plan`. Their annotations and defaults define the valid
values, so a strategy declares them nowhere else.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import math
import typing
from collections.abc import Callable
from typing import Any

from elbowroom._family import get
from elbowroom.errors import UnknownMember, UsageError
from elbowroom.ir.plan import Plan
from elbowroom.planner import strategies

ENTRY_POINT = "make_plan"

JOINT_ENTRY_POINT = "make_joint_plan"
"""Function, with the options of `make_plan`, of strategies that also move the model's state. The others keep it on the
device."""


class Manages(enum.StrEnum):
    """Storages that a plan may move."""

    ACTIVATIONS = "activations"
    """Storages that autograd saves."""
    EVERYTHING = "everything"
    """These, and the model's state: parameters, gradients, optimizer state and buffers."""


def moves_state(name: str) -> bool:
    """Return True if a strategy also moves the model's state.

    Raises:
        UnknownMember: there is no such strategy.
    """
    return get(strategies, name, JOINT_ENTRY_POINT, None) is not None


def find_managed(strategy: str, manages: str) -> Manages:
    """Return what a strategy, with or without options, moves if it is asked to manage activations or everything.

    Raises:
        UnknownMember: there is no such strategy, or `manages` is neither.
    """
    if manages not in list(Manages):
        raise UnknownMember("kind of storages to manage", str(manages), tuple(Manages))
    return Manages(manages) if moves_state(strategy.partition(":")[0]) else Manages.ACTIVATIONS


def find_strategy(text: str, manages: Manages = Manages.ACTIVATIONS) -> Callable[[Any], Plan]:
    """Return the function that plans as `text` says.

    Args:
        manages: as `find_managed` returns it.

    Raises:
        UnknownMember: there is no such strategy.
        UsageError: it has no such option, or the value is not valid; lists the valid ones.
    """
    name, _, rest = text.partition(":")
    make_plan = get(strategies, name, ENTRY_POINT)
    known = list_options(name)
    given: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        option, equals, value = item.partition("=")
        if option not in known or not equals or option in given:
            known_options = ", ".join(f"{each}={describe(kind)}" for each, kind in known.items()) or "none"
            raise UsageError(f"strategy {name}: {item!r} is not an option, or is repeated; options: {known_options}")
        given[option] = _read(known[option], value, f"strategy {name}: {option}")
    if manages is Manages.EVERYTHING:
        make_plan = get(strategies, name, JOINT_ENTRY_POINT)
    return lambda problem: make_plan(problem, **given)


def list_options(name: str) -> dict[str, Any]:
    """Return the options of a strategy and the type of each.

    Raises:
        UnknownMember: there is no such strategy.
    """
    make_plan = get(strategies, name, ENTRY_POINT)
    hints = typing.get_type_hints(make_plan)
    parameters = inspect.signature(make_plan).parameters.values()
    return {each.name: hints[each.name] for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}


def describe(kind: Any) -> str:
    """Return the valid values of an option as text."""
    choices = typing.get_args(kind)
    if choices:
        return "|".join(map(str, choices))
    return "true|false" if kind is bool else str(kind.__name__)


def _read(kind: Any, text: str, what: str) -> Any:
    choices = typing.get_args(kind) or ({"true": True, "false": False} if kind is bool else None)
    if choices is None:
        with contextlib.suppress(ValueError):
            if 0 <= (value := kind(text)) < math.inf:
                return value
        raise UsageError(f"{what} takes {describe(kind)} from 0 on, not {text!r}")
    if text not in choices:
        raise UsageError(f"{what} must be one of {describe(kind)}, not {text!r}")
    return choices[text] if isinstance(choices, dict) else text

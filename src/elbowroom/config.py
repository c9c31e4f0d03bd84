"""The options of a room, read once from keyword arguments and environment variables."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Mapping

from elbowroom.errors import UsageError
from elbowroom.units import parse_bytes

PREFIX = "ELBOWROOM_"
BUDGET_VARIABLE = PREFIX + "MEMORY_BUDGET"
FORMER_BUDGET_VARIABLE = PREFIX + "BUDGET"

CHOICES = {
    "mode": ("auto", "dynamic"),
    "manages": ("everything", "activations"),
    "without_broker": ("continue", "stop"),
    "if_ranks_differ": ("alone", "dynamic", "stop"),
}
"""Values of the options that take one of a few."""

SWITCHES = {"0": False, "1": True, "false": False, "true": True}
"""Values of the options that are on or off, as text."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Options of a room, apart from its budget.

    Attributes:
        mode: "auto" plans steps that repeat; "dynamic" makes no plans and lets the policy decide in every step.
        strategy: the planner's strategy.
        policy: chooses evictions in steps without a plan.
        spill_folder: folder of the spill file; None for the system's temporary folder.
        host_bytes: limit on the tier below the device: pinned host memory on CUDA (by default half of the free memory,
            or of what a container's limit leaves of it), the spill file on a CPU (by default unlimited). On CUDA the
            excess goes on to the spill file, at disk speed; on a CPU plans stay within the limit.
        min_offload_bytes: smaller storages never move.
        settling_steps: number of steps to capture before planning a step that still changes.
        always_watch: whether to watch steps that fit without moves, too, at about two microseconds an op. For steps
            that may grow while the shapes of the model's inputs stay the same: otherwise only shapes (on a CPU, bytes,
            too) tell that a step may be larger than those before it.
        exact: whether an op that has no room as a whole may run in slices only where these give the same bits on this
            machine. If not, slices may change the order of a sum: the result is that of gradient accumulation.
        op_time_store: whether to read and write the op times that this machine measured in earlier steps. They are kept
            in the user's cache, and improve plans of steps that have not run yet.
        profile_store: whether to use a profile of this machine that was measured within a day, and to keep one that is
            measured, in the user's cache. It saves the seconds that measuring takes.
        least_bytes: with memory_budget="shared", the least bytes within which the first steps run; None to guess from
            the size of the model. Later steps run within their measured floor.
        weight: with memory_budget="shared", the worth of this job's time, relative to other jobs.
        priority: with memory_budget="shared", jobs of higher priority come first, under the broker's policy `priority`.
        without_broker: "continue" within the last lease if the broker is gone, or "stop" before the next step.
        manages: "everything", or "activations": then parameters, gradients, buffers and optimizer state do not move,
            except for ops that run in slices.
        if_ranks_differ: what the ranks of a distributed job do if their steps differ, so that no plan is that of all:
            "alone", each makes plans of its own; "dynamic", the policy decides on all ranks; or "stop" on all ranks.
        rank_timeout_seconds: how long a rank of a distributed job waits for a sign of life of another one.
    """

    mode: str = "auto"
    strategy: str = "auto"
    policy: str = "predictive"
    spill_folder: str | None = None
    host_bytes: int | None = None
    min_offload_bytes: int = 1 << 14
    settling_steps: int = 3
    always_watch: bool = False
    op_time_store: bool = True
    profile_store: bool = True
    manages: str = "everything"
    exact: bool = True
    least_bytes: int | None = None
    weight: float = 1.0
    priority: int = 0
    without_broker: str = "continue"
    if_ranks_differ: str = "alone"
    rank_timeout_seconds: float = 45.0


def read_config(environment: Mapping[str, str] | None = None, **given: object) -> Config:
    """Build a Config from keyword arguments, then ELBOWROOM_STRATEGY, ELBOWROOM_SPILL_FOLDER, ..., then defaults.

    An empty variable counts as not set.

    Raises:
        UsageError: an option is unknown or its value is invalid.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, object] = {}
    for field in dataclasses.fields(Config):
        variable = PREFIX + field.name.upper()
        value = given.pop(field.name, None)
        if value is not None:
            values[field.name] = _read_value(field.name, value, field.name)
        elif text := environment.get(variable):
            values[field.name] = _read_value(field.name, text, variable)
    if given:
        known = ", ".join(field.name for field in dataclasses.fields(Config))
        raise UsageError(f"unknown options {sorted(given)}; the options are: {known}")
    return Config(**values)  # type: ignore[arg-type]


def read_budget_variable(environment: Mapping[str, str] | None = None) -> str | None:
    """Return $ELBOWROOM_MEMORY_BUDGET: an amount, or "shared". None if it is not set or empty.

    The former variable, ELBOWROOM_BUDGET, still works, with a `FutureWarning`.

    Raises:
        UsageError: it is malformed.
    """
    environment = os.environ if environment is None else environment
    variable = BUDGET_VARIABLE
    if not environment.get(variable) and environment.get(FORMER_BUDGET_VARIABLE):
        variable = FORMER_BUDGET_VARIABLE
        warnings.warn(f"the variable {FORMER_BUDGET_VARIABLE} is now {BUDGET_VARIABLE}", FutureWarning, stacklevel=2)
    budget = environment.get(variable)
    if budget and budget != "shared":
        try:
            parse_bytes(budget, device_bytes=1 << 40)  # of whatever device
        except ValueError as error:
            raise UsageError(f"{variable}: {error}") from error
    return budget or None


def _read_value(name: str, value: object, given_as: str) -> object:
    """Return the value of an option. `given_as`: its name, or that of the variable that sets it."""
    try:
        if name.endswith("_bytes"):
            # `parse_bytes` rejects 0, but a limit may be 0.
            is_zero = value in (0, "0") and value is not False
            return 0 if is_zero else parse_bytes(value)  # type: ignore[arg-type]
        if name == "settling_steps":
            steps = int(str(value))
            if steps < 1:
                raise ValueError("it takes a number of steps, at least 1")
            return steps
        if name == "priority":
            try:
                return int(str(value))
            except ValueError:
                raise ValueError("it takes a whole number") from None
        if name in ("weight", "rank_timeout_seconds"):
            number = float(str(value))
            if not 0 < number < math.inf:
                raise ValueError("it takes a number above 0")
            return number
        if name in ("always_watch", "exact", "op_time_store", "profile_store"):
            if str(value).lower() not in SWITCHES:
                raise ValueError("it takes True or False (in a variable 1 or 0)")
            return SWITCHES[str(value).lower()]
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(text, str) or not text:
            raise ValueError("it takes some text")
        if text not in CHOICES.get(name, (text,)):
            raise ValueError(f"there are: {', '.join(CHOICES[name])}")
        return os.path.abspath(text) if name == "spill_folder" else text  # the program may change its folder
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"invalid {given_as}={value!r}: {error}") from error

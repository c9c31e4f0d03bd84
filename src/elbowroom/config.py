"""One frozen Config, read from what the user passes and from the environment, at the edge only."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from elbowroom.errors import UsageError
from elbowroom.units import parse_bytes

PREFIX = "ELBOWROOM_"

CHOICES = {"mode": ("auto", "dynamic"), "manages": ("everything", "activations")}
"""Values of the options that take one of a few."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Options of a room, apart from its budget.

    Attributes:
        mode: "auto" plans steps that repeat; "dynamic" decides in every step as it goes on.
        strategy: makes the plans.
        policy: decides where there is no plan.
        spill_folder: where the spill file lies; the system's temporary folder if None.
        host_bytes: the most that may lie below the device: pinned host memory on CUDA, the spill file on a CPU. None
            for as much as there is. What is more goes from pinned memory to the spill file, at the price of the disk;
            where there is nothing behind, plans stay within it.
        min_offload_bytes: smaller storages never move.
        settling_steps: how many steps are captured before a step that still changes is planned as it is.
        always_watch: whether room is watched in steps, too, that fit as they are. It takes some microseconds an op, and
            is for steps that grow by themselves: where nothing is moved, only the shapes that the model is called with
            tell that a step may be larger than those before it.
        manages: "everything", or "activations": then parameters, gradients, buffers and optimizer state never move.
    """

    mode: str = "auto"
    strategy: str = "auto"
    policy: str = "predictive"
    spill_folder: str | None = None
    host_bytes: int | None = None
    min_offload_bytes: int = 1 << 14
    settling_steps: int = 3
    always_watch: bool = False
    manages: str = "everything"


def read_config(environment: Mapping[str, str] | None = None, **given: object) -> Config:
    """A Config of what was given, else of ELBOWROOM_STRATEGY, ELBOWROOM_SPILL_FOLDER, ..., else of the defaults.

    A variable that is empty counts as not set.

    Raises:
        UsageError: an option is not known, or its value means nothing.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, object] = {}
    for field in dataclasses.fields(Config):
        text = environment.get(PREFIX + field.name.upper())
        value = given.pop(field.name, None)
        if value is None and text:
            value = text
        if value is not None:
            values[field.name] = _read_value(field.name, value)
    if given:
        known = ", ".join(field.name for field in dataclasses.fields(Config))
        raise UsageError(f"unknown options {sorted(given)}; there are: {known}")
    return Config(**values)  # type: ignore[arg-type]


def _read_value(name: str, value: object) -> object:
    try:
        if name.endswith("_bytes"):
            # No amount of memory is 0, but a limit may be.
            is_zero = value in (0, "0") and value is not False
            return 0 if is_zero else parse_bytes(value)  # type: ignore[arg-type]
        if name == "settling_steps":
            number = int(str(value))
            if number < 1:
                raise ValueError(f"{name} is {number}")
            return number
        if name == "always_watch":
            return value if isinstance(value, bool) else {"0": False, "1": True}[str(value)]
        text = os.fspath(value)  # type: ignore[call-overload]
        if not isinstance(text, str) or not text:
            raise ValueError("it takes some text")
        if text not in CHOICES.get(name, (text,)):
            raise ValueError(f"there are: {', '.join(CHOICES[name])}")
        return text
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{name}={value!r} means nothing: {error}") from error

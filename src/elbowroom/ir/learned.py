"""Steps that a room has learned, as plain data for a checkpoint."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from elbowroom.errors import TraceError
from elbowroom.ir.check import check, check_noun
from elbowroom.ir.codec import from_json, to_json
from elbowroom.ir.costs import Costs
from elbowroom.ir.digest import digest
from elbowroom.ir.files import version_of
from elbowroom.ir.op_times import OpTimes
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Role, Trace

logger = logging.getLogger(__name__)

VERSION = 1


@dataclasses.dataclass(frozen=True)
class LearnedStep:
    """One kind of step with its plan. `is_measured`: whether the costs were measured."""

    trace: Trace
    costs: Costs
    plan: Plan
    is_measured: bool

    def count_parameters(self) -> Counter[int]:
        """Return how many parameters have how many bytes; without those that FSDP gathers, which have none."""
        return Counter(each.nbytes for each in self.trace.storages if each.role is Role.PARAMETER and each.nbytes)


@dataclasses.dataclass(frozen=True)
class PlanningOptions:
    """Limits and options that plans are made with, as in `Lease` and `Config`."""

    device_bytes: int
    host_bytes: int | None
    strategy: str
    manages: str
    min_offload_bytes: int


@dataclasses.dataclass(frozen=True)
class LearnedSteps:
    """Steps that a room has learned, with its op times.

    Attributes:
        options: what the plans were made with.
        steps: the most recently used kind first.
        op_times: of the machine that the costs belong to.
    """

    options: PlanningOptions
    steps: tuple[LearnedStep, ...]
    op_times: OpTimes


def to_state(learned: LearnedSteps) -> dict[str, Any]:
    """Return numbers, strings, lists and dicts."""
    return {"formats": _list_formats(), **to_json(learned)}


def from_state(state: Mapping[str, Any]) -> LearnedSteps | None:
    """Read the result of `to_state`; None, with a warning, if it is of another version.

    Raises:
        TraceError: it is corrupt; names the place.
    """
    if not isinstance(state, Mapping) or "formats" not in state:
        raise TraceError("this is not what Room.state_dict() returns: it has no formats")
    fields = dict(state)
    if (formats := fields.pop("formats")) != _list_formats():
        logger.warning("what was learned has other formats (%s) than this version's, and is not used", formats)
        return None
    learned = from_json(LearnedSteps, fields)
    for index, step in enumerate(learned.steps):
        try:
            _check_step(step)
        except TraceError as error:
            raise TraceError(f"$.steps[{index}]: {error}") from None
    return learned


def _check_step(step: LearnedStep) -> None:
    check_noun(step.trace)
    check_noun(step.costs)
    if step.costs.trace_digest != digest(step.trace):
        raise TraceError("the costs belong to another trace")
    check(step.trace, step.plan)


def _list_formats() -> dict[str, int]:
    formats = {kind.__name__: version_of(kind) for kind in (Trace, Costs, Plan)}
    return {"LearnedSteps": VERSION, **formats}

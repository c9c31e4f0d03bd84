"""Job list: jobs that arrive at a shared device, read from a JSON file.

    {"device_bytes": 17179869184, "link_bytes_per_second": 12e9,
     "jobs": [{"name": "resnet50", "arrival_seconds": 0, "steps": 500, "state_bytes": 300000000,
               "front": [[2000000000, 0.61, 0.5], [4000000000, 0.45, 0.4]]}]}

A point of a front is [bytes, seconds per step, seconds in which the device computes]. Optional: weight, priority,
shape: the most bytes in each of some equal parts of a step, as shares of its peak; and evaluation: [steps between two
evaluations, seconds of one, bytes on the device meanwhile].
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from elbowroom.errors import UsageError
from elbowroom.sharing.demand import FrontPoint, make_front

LINK_BYTES_PER_SECOND = 12e9
"""Rate at which the state of a paused job leaves and comes back, unless the file says otherwise (PCIe 3.0)."""

LARGEST_FILE_BYTES = 1 << 26

MOST_PARTS = 1024
"""Limit on the parts of a step's shape."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Evaluations of a job, which makes no step meanwhile.

    Attributes:
        steps: between two evaluations, and before the first one.
        seconds: of one.
        nbytes: on the device meanwhile.
    """

    steps: int
    seconds: float
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ListedJob:
    """One job of a workload.

    Attributes:
        arrival_seconds: since the beginning.
        steps: until it ends.
        front: as in `Demand`.
        state_bytes: moved out when the job is paused, and back when it goes on.
        shape: the most bytes in each of some equal parts of a step, as shares of the peak; empty if unknown.
        evaluation: None if it only trains.
    """

    name: str
    arrival_seconds: float
    steps: int
    front: tuple[FrontPoint, ...]
    state_bytes: int = 0
    shape: tuple[float, ...] = ()
    evaluation: Evaluation | None = None
    weight: float = 1.0
    priority: int = 0

    @property
    def plain_seconds(self) -> float:
        """Seconds of all steps at the fastest, and of all evaluations."""
        seconds = self.steps * self.front[-1].step_seconds
        if self.evaluation is not None:
            seconds += (self.steps - 1) // self.evaluation.steps * self.evaluation.seconds
        return seconds


JOB_NAMES = tuple(field.name for field in dataclasses.fields(ListedJob))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobList:
    """Jobs and the device that they share."""

    device_bytes: int
    jobs: tuple[ListedJob, ...]
    link_bytes_per_second: float = LINK_BYTES_PER_SECOND


def load_job_list(path: pathlib.Path) -> JobList:
    """Read a workload from a JSON file.

    Raises:
        UsageError: the file is missing or malformed; names the place.
    """
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise UsageError(f"{path} has more than {LARGEST_FILE_BYTES} bytes")
        found = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    return read_job_list(found)


def read_job_list(found: Any) -> JobList:
    """Read a workload from parsed JSON.

    Raises:
        UsageError: it is malformed; names the place.
    """
    if not isinstance(found, dict) or not isinstance(found.get("jobs"), list):
        raise UsageError("a job list is an object with device_bytes and a list of jobs")
    _check_names("the job list", found, ("device_bytes", "link_bytes_per_second", "jobs"))
    jobs = tuple(_read_job(f"jobs[{place}]", each) for place, each in enumerate(found["jobs"]))
    rate = found.get("link_bytes_per_second", LINK_BYTES_PER_SECOND)
    return JobList(
        device_bytes=_read_count("device_bytes", found.get("device_bytes"), least=1),
        link_bytes_per_second=_read_number("link_bytes_per_second", rate, least=1),
        jobs=jobs,
    )


def _read_job(place: str, found: Any) -> ListedJob:
    if not isinstance(found, dict):
        raise UsageError(f"{place} is not an object")
    _check_names(place, found, JOB_NAMES)
    points = found.get("front")
    if not isinstance(points, list) or not points:
        raise UsageError(f"{place}.front is a list of [bytes, seconds per step, seconds of compute]")
    front = []
    for number, point in enumerate(points):
        if not isinstance(point, list) or len(point) not in (2, 3):
            raise UsageError(f"{place}.front[{number}] is [bytes, seconds per step, seconds of compute]")
        nbytes, seconds, *busy = [_read_number(f"{place}.front[{number}]", each, least=0) for each in point]
        if nbytes < 1 or not seconds:
            raise UsageError(f"{place}.front[{number}] needs bytes and seconds above 0")
        front.append(FrontPoint(nbytes=int(nbytes), step_seconds=seconds, busy_seconds=busy[0] if busy else seconds))
    return ListedJob(
        name=str(found.get("name", place))[:100],
        arrival_seconds=_read_number(f"{place}.arrival_seconds", found.get("arrival_seconds", 0), least=0),
        steps=_read_count(f"{place}.steps", found.get("steps"), least=1),
        front=make_front(front),
        state_bytes=_read_count(f"{place}.state_bytes", found.get("state_bytes", 0), least=0),
        shape=_read_shape(f"{place}.shape", found.get("shape", [])),
        evaluation=_read_evaluation(f"{place}.evaluation", found.get("evaluation")),
        weight=_read_number(f"{place}.weight", found.get("weight", 1), least=1e-6),
        priority=_read_count(f"{place}.priority", found.get("priority", 0), least=-(1 << 62)),
    )


def _read_shape(place: str, found: Any) -> tuple[float, ...]:
    shares = tuple(_read_number(place, each, least=0) for each in found) if isinstance(found, list) else (-1.0,)
    if not all(0 <= each <= 1 for each in shares) or len(shares) > MOST_PARTS:
        raise UsageError(f"{place} is a list of up to {MOST_PARTS} shares from 0 to 1")
    return shares


def _read_evaluation(place: str, found: Any) -> Evaluation | None:
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 3:
        raise UsageError(f"{place} is [steps between two, seconds of one, bytes]")
    steps, seconds, nbytes = [_read_number(place, each, least=0) for each in found]
    if steps < 1:
        raise UsageError(f"{place} needs at least a step between two evaluations")
    return Evaluation(steps=int(steps), seconds=seconds, nbytes=int(nbytes))


def _check_names(place: str, found: dict[str, Any], known: Sequence[str]) -> None:
    if unknown := sorted(set(found) - set(known)):
        raise UsageError(f"{place} has unknown names {unknown}; there are: {', '.join(known)}")


def _read_count(place: str, value: Any, *, least: int) -> int:
    number = _read_number(place, value, least=least)
    if number != int(number):
        raise UsageError(f"{place} is a whole number, not {value}")
    return int(number)


def _read_number(place: str, value: Any, *, least: float) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None:
        raise UsageError(f"{place} is missing")
    if not is_number or not math.isfinite(value) or not least <= value <= 1 << 62:
        raise UsageError(f"{place} cannot be {str(value)[:40]!r}")
    return float(value)

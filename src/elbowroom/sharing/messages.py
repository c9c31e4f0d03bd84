"""Messages between a job and the broker, and their form on the wire: one JSON object a line.

    job      JoinRequest  FrontUpdate  Heartbeat  LeaseConfirmed  RestNotice  LeaveNotice    anybody: StatusRequest
    broker   LeaseGrant   WaitNotice   RefusalNotice                                                  StatusReply

Each message carries the version of this protocol and a number that rises by 1 with each message of its connection, from
0. `decode_message` accepts nothing else: no other fields, no other types, no values out of range.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any

PROTOCOL_VERSION = 2

LONGEST_MESSAGE_BYTES = 1 << 16
"""Limit on a message of a job, newline included."""

MOST_POINTS = 64
"""Limit on the points of a front."""

LONGEST_NAME_CHARS = 200
MOST_BYTES = 1 << 62

WEIGHTS = (1e-6, 1e6)
"""Range of a weight."""

STEP_SECONDS = (1e-9, 1e9)
"""Range of the seconds of a step in a front. Ratios of such numbers are finite."""

Triples = tuple[tuple[int, float, float], ...]
"""Points of a front: bytes, seconds per step, seconds in which the device computes."""


class BadMessage(ValueError):
    """A line is no message; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """First message of a job.

    Attributes:
        name: shown to others; printable.
        job: tells it from other jobs of its process, and stays the same when it joins again.
        floor_bytes: the least bytes within which it runs.
        points: its front; empty if no step is known yet.
        weight, priority: as in `Demand`; the weight within `WEIGHTS`.
        held_bytes: on the device now.
        lease_bytes: the lease under which it goes on, if an earlier broker granted one; otherwise 0.
        steps_left: None if unknown.
        rests: as in `RestNotice`.
    """

    sequence: int
    name: str
    job: str
    floor_bytes: int
    points: Triples = ()
    weight: float = 1.0
    priority: int = 0
    held_bytes: int = 0
    lease_bytes: int = 0
    steps_left: int | None = None
    rests: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrontUpdate:
    """A new front: the first measured one, or that of a job whose steps have changed."""

    sequence: int
    floor_bytes: int
    points: Triples
    steps_left: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign of life.

    Attributes:
        steps: completed so far.
        step_seconds: of the last step; 0 if there was none.
        used_bytes: peak of the last step on the device.
    """

    sequence: int
    steps: int
    step_seconds: float = 0.0
    used_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfirmed:
    """The job keeps within the lease of this epoch from now on.

    Attributes:
        held_bytes: its limit from now on. More than the lease if it cannot shrink that far.
    """

    sequence: int
    epoch: int
    held_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestNotice:
    """The job needs no lease for now (`rests`): the broker pauses it. Or it needs one again."""

    sequence: int
    rests: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaveNotice:
    """Last message of a job: it holds nothing any more."""

    sequence: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest:
    """Question for a `StatusReply`, also from a connection without a job."""

    sequence: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGrant:
    """Lease from the next step on. 0 bytes: move everything out, confirm, and wait."""

    sequence: int
    epoch: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WaitNotice:
    """Explanation for a job without a lease."""

    sequence: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RefusalNotice:
    """The broker drops the connection, for this reason."""

    sequence: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One job in a `StatusReply`.

    Attributes:
        state: "running", "waiting", "resting", "silent", or "disconnected" for a process that may still hold bytes.
        lease_bytes, held_bytes: its lease, and the bytes that count as taken by it, confirmed or not.
        wanted_bytes: bytes beyond which it becomes no faster.
        lost_share: time a step takes beyond that at its fastest, as a share of the latter.
        waiting_seconds: since it joined or was paused.
    """

    name: str
    pid: int
    state: str
    lease_bytes: int
    held_bytes: int
    floor_bytes: int
    wanted_bytes: int
    steps: int
    step_seconds: float
    lost_share: float
    waiting_seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StatusReply:
    """State of the broker."""

    sequence: int
    policy: str
    device_bytes: int
    outside_bytes: int
    free_bytes: int
    jobs: tuple[JobStatus, ...]


FromJob = JoinRequest | FrontUpdate | Heartbeat | LeaseConfirmed | RestNotice | LeaveNotice | StatusRequest
FromBroker = LeaseGrant | WaitNotice | RefusalNotice | StatusReply

_KINDS: dict[str, Any] = {each.__name__: each for each in (*typing.get_args(FromJob), *typing.get_args(FromBroker))}
_HINTS: dict[type, dict[str, Any]] = {
    each: typing.get_type_hints(each) for each in (*_KINDS.values(), JobStatus)
}  # fmt: skip


def encode_message(message: FromJob | FromBroker) -> bytes:
    """Return the line of a message, newline included."""
    fields = {"type": type(message).__name__, "version": PROTOCOL_VERSION, **dataclasses.asdict(message)}
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode_message(line: bytes, *, limit_bytes: int = LONGEST_MESSAGE_BYTES) -> FromJob | FromBroker:
    """Read a line.

    Raises:
        BadMessage: it is too long, no JSON, of another version, or not exactly one of the messages.
    """
    if len(line) > limit_bytes:
        raise BadMessage(f"the message has more than {limit_bytes} bytes")
    try:
        found = json.loads(line.decode("utf-8"), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise BadMessage("the message is not JSON") from error
    if not isinstance(found, dict):
        raise BadMessage("the message is not an object")
    version = found.pop("version", None)
    if version != PROTOCOL_VERSION or isinstance(version, bool):
        raise BadMessage(
            f"the message is of version {str(version)[:20]!r} of the protocol, and this is version {PROTOCOL_VERSION}: "
            "use one version of Elbowroom for the broker and its jobs"
        )
    kind = found.pop("type", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadMessage(f"there is no message of type {str(kind)[:40]!r}")
    message: FromJob | FromBroker = _read_fields(_KINDS[kind], found)
    return message


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is no number in JSON")


def _read_fields(kind: Any, found: dict[str, Any]) -> Any:
    hints = _HINTS[kind]
    if found.keys() != hints.keys():
        raise BadMessage(f"{kind.__name__} has exactly the fields {', '.join(hints)}")
    return kind(**{name: _read_value(f"{kind.__name__}.{name}", hints[name], found[name]) for name in hints})


def _read_value(place: str, hint: Any, value: Any) -> Any:
    if isinstance(hint, types.UnionType):
        return None if value is None else _read_value(place, typing.get_args(hint)[0], value)
    if hint is bool:
        if type(value) is bool:
            return value
    elif hint is int:
        lowest = -MOST_BYTES if place.endswith(".priority") else 0
        if type(value) is int and lowest <= value <= MOST_BYTES:
            return value
    elif hint is float:
        least, most = WEIGHTS if place.endswith(".weight") else (0, MOST_BYTES)
        if type(value) in (int, float) and least <= value <= most:
            return float(value)
    elif hint is str:
        if isinstance(value, str) and (not place.endswith((".name", ".job")) or _is_name(value)):
            return value
    elif isinstance(value, list) and typing.get_args(hint):
        return _read_list(place, typing.get_args(hint), value)
    elif dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _read_fields(hint, value)
    raise BadMessage(f"{place} cannot be {str(value)[:40]!r}")


def _is_name(text: str) -> bool:
    return len(text) <= LONGEST_NAME_CHARS and text.isprintable()


def _read_list(place: str, hints: tuple[Any, ...], value: list[Any]) -> tuple[Any, ...]:
    if hints[-1] is Ellipsis:
        if place.endswith(".points") and len(value) > MOST_POINTS:
            raise BadMessage(f"{place} has more than {MOST_POINTS} points")
        found = tuple(_read_value(place, hints[0], each) for each in value)
        if place.endswith(".points") and any(not STEP_SECONDS[0] <= each[1] <= STEP_SECONDS[1] for each in found):
            raise BadMessage(
                f"{place} cannot have steps of less than {STEP_SECONDS[0]} or more than {STEP_SECONDS[1]} s"
            )
        return found
    if len(value) != len(hints):
        raise BadMessage(f"{place} cannot be {str(value)[:40]!r}")
    return tuple(_read_value(place, hint, each) for hint, each in zip(hints, value, strict=True))

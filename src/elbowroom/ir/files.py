"""Saves IR values as JSON files with `format` and `version`, gzipped if the name ends in .gz.

Readers validate everything, name the place of an error, refuse newer versions, and never execute anything. Their memory
is bounded by the length of the text, which is limited (`text_files.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from elbowroom._folders import check_regular
from elbowroom.errors import TraceError, UsageError
from elbowroom.ir.check import check_noun
from elbowroom.ir.codec import build, describe, read_fields, read_noun
from elbowroom.ir.codec import from_json as from_json
from elbowroom.ir.codec import to_json as to_json
from elbowroom.ir.costs import Costs, Measurements
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Journal, StepRecord
from elbowroom.ir.json_text import ABSENT, JsonText
from elbowroom.ir.measured_profile import MeasuredProfile
from elbowroom.ir.network import Network
from elbowroom.ir.op_times import OpTimes
from elbowroom.ir.plan import Plan
from elbowroom.ir.text_files import read_text
from elbowroom.ir.trace import Op, Storage, Trace

_FORMATS: dict[type, str] = {
    Trace: "elbowroom.trace",
    HardwareProfile: "elbowroom.profile",
    Costs: "elbowroom.costs",
    Measurements: "elbowroom.measurements",
    Plan: "elbowroom.plan",
    Forecast: "elbowroom.forecast",
    Journal: "elbowroom.journal",
    OpTimes: "elbowroom.op_times",
    Network: "elbowroom.network",
    MeasuredProfile: "elbowroom.measured_profile",
}

_READERS = {
    "elbowroom.trace": "`elbowroom plan`, `compare`, `simulate` and `view` read it",
    "elbowroom.profile": "--hardware reads it",
    "elbowroom.costs": "--costs reads it",
    "elbowroom.plan": "`elbowroom simulate TRACE PLAN` and `elbowroom view TRACE --plan PLAN` read it",
    "elbowroom.journal": "`elbowroom report` and `elbowroom view` read it",
    "elbowroom.network": "--network reads it",
}

_ORIGIN = {"module": None, "line": ""}

_ADDED: dict[type, tuple[dict[type, dict[str, Any]], ...]] = {
    Trace: ({Op: _ORIGIN, Storage: _ORIGIN}, {Trace: {"slicing": []}}, {Trace: {"presences": []}}),
    Costs: ({Costs: {"further_links": []}},),
    HardwareProfile: ({HardwareProfile: {"isa": ""}},),
    Forecast: (
        {Forecast: {"disk_bytes": 0, "reserved_bytes": 0, "fragmented_bytes": 0}},
        {Forecast: {"arena_bytes": 0, "lower_arena_bytes": 0, "disk_arena_bytes": 0}},
        {Forecast: {"begin_seconds": []}},
        {Forecast: {"evictions": 0, "replays": 0}},
        {Forecast: {"state_offloaded_bytes": 0, "state_reloaded_bytes": 0}},
    ),
    Plan: ({Plan: {"host_bytes": None}}, {Plan: {"state": []}}, {Plan: {"cuts": []}}),
    Journal: ({}, {StepRecord: {"budget_bytes": 0}}),  # `upgrade` converts version 1
}
"""Fields added in version 2, 3, ... of a format, nested ones included, with their defaults for older files."""

Noun = TypeVar("Noun")


def version_of(kind: type) -> int:
    """Return the version that `save` writes, which is the newest that `load` reads."""
    return 1 + len(_ADDED.get(kind, ()))


def upgrade(value: Noun, version: int) -> Noun:
    """Convert a value loaded from a file of an older version to today's meaning."""
    if isinstance(value, Journal) and version == 1:  # 0 bytes of a step stood for "not metered"
        steps = (
            dataclasses.replace(step, peak_bytes=step.peak_bytes or None, resident_bytes=step.resident_bytes or None)
            for step in value.steps
        )
        return dataclasses.replace(value, steps=tuple(steps))
    return value


def save(value: Any, path: str | os.PathLike[str], beside: Mapping[str, Any] | None = None) -> None:
    """Write a value to a file atomically: to a temporary file, which is then renamed.

    Args:
        beside: further fields of the document, as JSON values; `load` skips them, and `load_fields` reads them.

    Raises:
        UsageError: values of this type have no file format, or the file cannot be written: its folder does not exist,
            for example. A file that is there stays as it is.
        TraceError: the value holds a number that is not finite.
    """
    path = pathlib.Path(path)
    check_regular(path)
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: {path.parent} is not a folder")
    document = {"format": _format_of(type(value)), "version": version_of(type(value)), "value": to_json(value)}
    document |= beside or {}
    try:
        data = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise TraceError(
            f"{path} is not written: the {type(value).__name__} holds a number that is not finite"
        ) from error
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6, mtime=0)
    try:
        _write(path, data)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def _write(path: pathlib.Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.umask(mask := os.umask(0))  # the umask cannot be read without setting it
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load(kind: type[Noun], path: str | os.PathLike[str]) -> Noun:
    """Read a value from a file.

    Args:
        kind: class of the value, such as `elbowroom.ir.trace.Trace`.

    Raises:
        UsageError: there is no such file, it cannot be read, or values of this class have no file format.
        TraceError: it is corrupt, truncated, too large, of another format or a newer version; names the place.
    """
    path = pathlib.Path(path)
    _format_of(kind)  # raises for a type without a file format
    with _open_json(path) as text:
        fields, version = _read_document(kind, path, text)
    try:
        value = upgrade(build(kind, fields, _find_missing(kind, version)), version)
        check_noun(value)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    return value


def load_fields(kinds: Mapping[str, type], path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read some fields of the JSON object in a file; skip the others.

    Args:
        kinds: type of each field to read.

    Raises:
        UsageError: there is no such file, or it cannot be read.
        TraceError: it is not a JSON object or is too large, or a field has another type; names the place.
    """
    path = pathlib.Path(path)
    with _open_json(path) as text:
        found: dict[str, Any] = {}
        if text.peek() != "{":
            raise TraceError(f"{path} does not hold a JSON object" if text.peek() else f"{path} is empty")
        for name in text.keys():  # noqa: SIM118  # no dict: the text is read by it
            if name in kinds:
                found[name] = read_noun(kinds[name], text, f"{path}: $.{name}")
            else:
                text.skip()
        text.finish()
    return found


def peek(path: str | os.PathLike[str], most_chars: int) -> str:
    """Return the first characters of a text file.

    Raises:
        UsageError: there is no such file, or it cannot be read.
        TraceError: it is not text, or too large.
    """
    found = ""
    with contextlib.closing(read_text(pathlib.Path(path))) as pieces:
        while len(found) < most_chars and (piece := next(pieces, None)) is not None:
            found += piece
    return found[:most_chars]


@contextlib.contextmanager
def _open_json(path: pathlib.Path) -> Iterator[JsonText]:
    """Open a JSON text; raise TraceError for invalid JSON read in the body."""
    with contextlib.closing(read_text(path)) as pieces:
        try:
            yield JsonText(pieces)
        except (TraceError, UsageError):
            raise
        except ValueError as error:
            raise TraceError(f"{path} is not a JSON file, or is cut off: {error}") from error


def _read_document(kind: type, path: pathlib.Path, text: JsonText) -> tuple[dict[str, Any], int]:
    """Read the fields of the value in a document, and its version."""
    marks: dict[str, Any] = {}
    fields: dict[str, Any] | None = None
    if text.peek() != "{":
        raise TraceError(f"{path} is not an {_format_of(kind)} file: it does not hold a JSON object")
    for name in text.keys():  # noqa: SIM118  # no dict: the text is read by it
        if name in ("format", "version"):
            found = text.whole()
            marks[name] = text.scalar() if found is ABSENT else found
        elif name == "value":
            _check_marks(kind, path, marks)
            # A version that follows the value is taken as 1 here: nested fields of newer versions may be missing, too.
            fields = read_fields(kind, text, f"{path}: $", _find_missing(kind, marks.get("version", 1)))
        else:
            text.skip()
    text.finish()
    _check_marks(kind, path, {"format": None, "version": None, **marks})
    if fields is None:
        raise TraceError(f"{path}: $: expected an object, found none")
    return fields, marks["version"]


def _find_missing(kind: type, version: int) -> dict[type, dict[str, Any]]:
    """Return the default values of fields that a file of this version lacks, by class."""
    missing: dict[type, dict[str, Any]] = {}
    for added in _ADDED.get(kind, ())[version - 1 :]:
        for part, fields in added.items():
            missing.setdefault(part, {}).update(fields)
    return missing


def _check_marks(kind: type, path: pathlib.Path, marks: Mapping[str, Any]) -> None:
    """Check those of `format` and `version` that were read: `save` writes them first, but other writers need not."""
    expected = _format_of(kind)
    if marks.get("format", expected) != expected:
        found = marks["format"]
        reader = f". {_READERS[found]}" if isinstance(found, str) and found in _READERS else ""
        raise TraceError(f"{path} is not an {expected} file: its format is {describe(found)}{reader}")
    version = marks.get("version", 1)
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= version_of(kind):
        raise TraceError(f"{path} has version {describe(version)}; this Elbowroom reads up to {version_of(kind)}")


def _format_of(kind: type) -> str:
    if kind not in _FORMATS:
        name = getattr(kind, "__name__", repr(kind))
        raise UsageError(f"a {name} is not a file; these are: {', '.join(noun.__name__ for noun in _FORMATS)}")
    return _FORMATS[kind]

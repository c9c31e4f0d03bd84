"""Nouns as files: JSON with `format` and `version`, gzipped where the name ends in .gz.

One codec reads and writes every noun from its annotations alone, so a field cannot be forgotten in one direction.
Readers check everything, name the place of what is wrong, refuse what is newer, and never execute anything.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import gzip
import json
import os
import pathlib
import sys
import tempfile
import types
import typing
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from elbowroom.errors import TraceError, UsageError
from elbowroom.ir.check import check_noun
from elbowroom.ir.costs import Costs, Measurements
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Journal
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace

LARGEST_FILE_BYTES = 1 << 29
"""A larger file, or one that unpacks to more, is refused unread."""

_FORMATS: dict[type, str] = {
    Trace: "elbowroom.trace",
    HardwareProfile: "elbowroom.profile",
    Costs: "elbowroom.costs",
    Measurements: "elbowroom.measurements",
    Plan: "elbowroom.plan",
    Forecast: "elbowroom.forecast",
    Journal: "elbowroom.journal",
}

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]


def _add(**fields: Any) -> Upgrade:
    """Add fields that older files do not have, with what their absence means."""
    return lambda data: {**fields, **data}


def _clear_unmetered(data: dict[str, Any]) -> dict[str, Any]:
    """Read 0 bytes of a step as what it meant: not metered."""
    steps = data.get("steps")
    if not isinstance(steps, list):
        return data
    names = ("peak_bytes", "resident_bytes")
    return data | {
        "steps": [
            step | {name: None for name in names if step.get(name) == 0} if isinstance(step, dict) else step
            for step in steps
        ]
    }


_UPGRADES: dict[type, tuple[Upgrade, ...]] = {
    Costs: (_add(further_links=[]),),
    HardwareProfile: (_add(isa=""),),
    Forecast: (
        _add(disk_bytes=0, reserved_bytes=0, fragmented_bytes=0),
        _add(arena_bytes=0, lower_arena_bytes=0, disk_arena_bytes=0),
        _add(begin_seconds=[]),
    ),
    Journal: (_clear_unmetered,),
}
"""What turns version 1 of a noun into version 2, version 2 into version 3, ..."""

Noun = TypeVar("Noun")


def version_of(kind: type) -> int:
    """The version that is written, and the newest that is read."""
    return 1 + len(_UPGRADES.get(kind, ()))


def to_json(value: Any) -> Any:
    """Plain data (dicts, lists, numbers, text) of a noun or of a part of one."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field: to_json(getattr(value, field)) for field in _hints(type(value))}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value


def upgrade(kind: type, data: Any, version: int) -> Any:
    """Turn plain data of an older version of a noun into that of the newest; what is not an object stays as it is."""
    for change in _UPGRADES.get(kind, ())[version - 1 :]:
        if isinstance(data, dict):
            data = change(data)
    return data


def from_json(kind: type[Noun], data: Any, place: str = "$") -> Noun:
    """A noun from plain data.

    Raises:
        TraceError: a field is missing, unknown, of the wrong type, or not finite; names its place.
    """
    return typing.cast(Noun, _decode(kind, data, place))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode(kind: Any, data: Any, place: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, dict):
            raise TraceError(f"{place}: expected an object, found {_describe(data)}")
        hints = _hints(typing.cast(type, kind))
        if data.keys() != hints.keys():
            missing, unknown = sorted(hints.keys() - data.keys()), sorted(map(str, data.keys() - hints.keys()))
            listed = ", ".join(_describe(name) for name in unknown[:5])
            raise TraceError(f"{place}: missing fields {missing}, unknown fields [{listed}]")
        fields = {name: _decode(hint, data[name], f"{place}.{name}") for name, hint in hints.items()}
        return typing.cast(type, kind)(**fields)
    if typing.get_origin(kind) is tuple:
        if not isinstance(data, list):
            raise TraceError(f"{place}: expected a list, found {_describe(data)}")
        item = typing.get_args(kind)[0]
        return tuple(_decode(item, value, f"{place}[{index}]") for index, value in enumerate(data))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(data)
        except ValueError:
            raise TraceError(
                f"{place}: {_describe(data)} is not one of {', '.join(member.value for member in kind)}"
            ) from None
    if typing.get_origin(kind) is types.UnionType:
        return None if data is None else _decode(typing.get_args(kind)[0], data, place)
    return _decode_scalar(kind, data, place)


def _decode_scalar(kind: Any, data: Any, place: str) -> Any:
    if kind is float:
        # An integer too large for a float is not finite as a float either.
        if isinstance(data, bool) or not isinstance(data, (int, float)) or not 0 <= data <= sys.float_info.max:
            raise TraceError(f"{place}: expected a finite number of at least 0, found {_describe(data)}")
        return float(data)
    if kind is int:
        if isinstance(data, bool) or not isinstance(data, int) or not -1 <= data < 2**63:
            raise TraceError(f"{place}: expected an integer from -1 to 2**63 - 1, found {_describe(data)}")
        return data
    if kind in (bool, str):
        if type(data) is not kind:
            raise TraceError(f"{place}: expected {kind.__name__}, found {_describe(data)}")
        if kind is str and not data.isascii() and not _is_unicode(data):
            raise TraceError(f"{place}: {_describe(data)} is not Unicode text")
        return data
    raise TypeError(f"{place}: the codec has no rule for {kind}")


def _is_unicode(text: str) -> bool:
    """JSON can spell half a surrogate pair, which nothing can print."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _describe(data: Any) -> str:
    """A short, printable word on data of any kind and size."""
    if isinstance(data, int) and data.bit_length() > 64:
        return f"an integer of {data.bit_length()} bits"
    if isinstance(data, str):
        data = data[:60]
    text = ascii(data) if isinstance(data, (int, float, str, bool, types.NoneType)) else type(data).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def save(value: Any, path: str | os.PathLike[str]) -> None:
    """Write a noun to a file. The file is complete or not there: it is written beside itself and renamed.

    Raises:
        UsageError: the value is not a noun.
        TraceError: it holds a number that is not finite.
        OSError: the folder is not there or not writable.
    """
    path = pathlib.Path(path)
    document = {"format": _format_of(type(value)), "version": version_of(type(value)), "value": to_json(value)}
    try:
        data = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise TraceError(
            f"{path} is not written: the {type(value).__name__} holds a number that is not finite"
        ) from error
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6, mtime=0)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.umask(mask := os.umask(0))  # there is no asking without setting
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load(kind: type[Noun], path: str | os.PathLike[str]) -> Noun:
    """Read a noun from a file.

    Raises:
        UsageError: there is no such file, or it cannot be read.
        TraceError: it is corrupt, truncated, oversized, of another format or a newer version; names the place.
    """
    path = pathlib.Path(path)
    expected = _format_of(kind)
    try:
        document = json.loads(_read(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (TraceError, UsageError):
        raise
    except (ValueError, RecursionError) as error:  # a ValueError is also how Python refuses numbers of many digits
        raise TraceError(f"{path} is not a JSON file, or is cut off: {error}") from error
    if not isinstance(document, dict) or document.get("format") != expected:
        found = document.get("format") if isinstance(document, dict) else document
        raise TraceError(f"{path} is not a {expected} file: its format is {_describe(found)}")
    version = document.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= version_of(kind):
        raise TraceError(f"{path} has version {_describe(version)}; this Elbowroom reads up to {version_of(kind)}")
    data = upgrade(kind, document.get("value"), version)
    try:
        value = from_json(kind, data)
        check_noun(value)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    return value


def _format_of(kind: type) -> str:
    if kind not in _FORMATS:
        raise UsageError(f"a {kind.__name__} is not a file; these are: {', '.join(noun.__name__ for noun in _FORMATS)}")
    return _FORMATS[kind]


def _read(path: pathlib.Path) -> bytes:
    """The contents of a file, unpacked. Never reads further than the limit, whatever the file says of itself."""
    try:
        with open(path, "rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"{path} is not a gzip file, or is cut off: {error}") from error
    except ValueError as error:  # a NUL in the name
        raise UsageError(f"cannot read {str(path)!r}: {error}") from error
    if len(data) > LARGEST_FILE_BYTES:
        raise TraceError(f"{path} holds more than {LARGEST_FILE_BYTES} bytes, the most that is read")
    return data

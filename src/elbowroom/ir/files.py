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
import math
import os
import pathlib
import tempfile
import types
import typing
import zlib
from typing import Any, TypeVar

from elbowroom.errors import TraceError, UsageError
from elbowroom.ir.costs import Costs, Measurements
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Journal
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace

VERSION = 1
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

Noun = TypeVar("Noun")


def to_json(value: Any) -> Any:
    """Plain data (dicts, lists, numbers, text) of a noun or of a part of one."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field: to_json(getattr(value, field)) for field in _hints(type(value))}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value


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
            raise TraceError(f"{place}: missing fields {missing}, unknown fields {unknown[:5]}")
        return kind(**{name: _decode(hint, data[name], f"{place}.{name}") for name, hint in hints.items()})
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
    return _decode_scalar(kind, data, place)


def _decode_scalar(kind: Any, data: Any, place: str) -> Any:
    if kind is float:
        if isinstance(data, bool) or not isinstance(data, (int, float)) or not math.isfinite(data) or data < 0:
            raise TraceError(f"{place}: expected a finite number of at least 0, found {_describe(data)}")
        return float(data)
    if kind is int:
        if isinstance(data, bool) or not isinstance(data, int) or not -1 <= data < 2**63:
            raise TraceError(f"{place}: expected an integer from -1 to 2**63 - 1, found {_describe(data)}")
        return data
    if kind in (bool, str):
        if type(data) is not kind:
            raise TraceError(f"{place}: expected {kind.__name__}, found {_describe(data)}")
        return data
    raise TypeError(f"{place}: the codec has no rule for {kind}")


def _describe(data: Any) -> str:
    text = repr(data) if isinstance(data, (int, float, str, bool, types.NoneType)) else type(data).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def save(value: Any, path: str | os.PathLike[str]) -> None:
    """Write a noun to a file. The file is complete or not there: it is written beside itself and renamed.

    Raises:
        OSError: the folder is not there or not writable.
    """
    path = pathlib.Path(path)
    document = {"format": _FORMATS[type(value)], "version": VERSION, "value": to_json(value)}
    data = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6, mtime=0)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
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
    try:
        document = json.loads(_read(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise TraceError(f"{path} is not a JSON file, or is cut off: {error}") from error
    if not isinstance(document, dict) or document.get("format") != _FORMATS[kind]:
        found = document.get("format") if isinstance(document, dict) else document
        raise TraceError(f"{path} is not a {_FORMATS[kind]} file: its format is {_describe(found)}")
    version = document.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= VERSION:
        raise TraceError(f"{path} has version {_describe(version)}; this Elbowroom reads up to {VERSION}")
    try:
        return from_json(kind, document.get("value"))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def _read(path: pathlib.Path) -> bytes:
    size = path.stat().st_size
    if size > LARGEST_FILE_BYTES:
        raise TraceError(f"{path} has {size} bytes; the largest file read is {LARGEST_FILE_BYTES}")
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"{path} is not a gzip file, or is cut off: {error}") from error
    if len(data) > LARGEST_FILE_BYTES:
        raise TraceError(f"{path} unpacks to more than {LARGEST_FILE_BYTES} bytes")
    return data

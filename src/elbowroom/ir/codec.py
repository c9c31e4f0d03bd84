"""Codec between the IR's dataclasses and JSON, derived from their annotations, so that both directions agree.

Decoding is streaming (`json_text.py`): lists and objects are read item by item, and only small items go through
Python's own parser.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from elbowroom.errors import TraceError
from elbowroom.ir.json_text import ABSENT, JsonText

MOST_SHARED = 1 << 14
"""Number of distinct values per list that are interned: "0," is 2 bytes of text, but 32 as an object."""

Missing = Mapping[type, Mapping[str, Any]]
"""Defaults of missing fields, by class and field name, as plain data."""

NOTHING: Missing = {}

Noun = TypeVar("Noun")


class _Misfit(Exception):
    """Data does not match the annotation. `place` is the JSON path, which grows while the exception propagates."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.place = ""


def to_json(value: Any) -> Any:
    """Convert a value to plain data: dicts, lists, numbers, strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field: to_json(getattr(value, field)) for field in _hints(type(value))}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value


def from_json(kind: type[Noun], data: Any, place: str = "$") -> Noun:
    """Build a value from plain data.

    Raises:
        TraceError: a field is missing, unknown, of the wrong type, or not finite; names its place.
    """
    with _naming(place):
        return typing.cast(Noun, _STRICT.decode(kind, data))


def read_noun(kind: type[Noun], text: JsonText, place: str = "$") -> Noun:
    """Read a value at the current position of the text.

    Raises:
        TraceError: as `from_json`.
        ValueError: the text is not JSON.
    """
    with _naming(place):
        return typing.cast(Noun, _STRICT.read(kind, text))


def read_fields(kind: type, text: JsonText, place: str = "$", missing: Missing = NOTHING) -> dict[str, Any]:
    """Read the fields of an object at the current position of the text; some may be missing.

    Args:
        missing: defaults of fields missing in nested objects.

    Raises:
        TraceError: as `from_json`.
        ValueError: the text is not JSON.
    """
    with _naming(place):
        return _Decoder(missing).read_fields(kind, text)


def build(kind: type[Noun], fields: dict[str, Any], missing: Missing, place: str = "$") -> Noun:
    """Build a value from its fields.

    Args:
        missing: defaults of missing fields.

    Raises:
        TraceError: another field is missing.
    """
    with _naming(place):
        return typing.cast(Noun, _Decoder(missing).build(kind, {**fields}))


@contextlib.contextmanager
def _naming(place: str) -> Iterator[None]:
    try:
        yield
    except _Misfit as misfit:
        raise TraceError(f"{place}{misfit.place}: {misfit}") from None


def describe(data: Any) -> str:
    """Describe any data in at most 60 printable characters."""
    if isinstance(data, int) and data.bit_length() > 64:
        return f"an integer of {data.bit_length()} bits"
    if isinstance(data, str):
        data = data[:60]
    text = ascii(data) if isinstance(data, (int, float, str, bool, types.NoneType)) else type(data).__name__
    return text if len(text) <= 60 else text[:57] + "..."


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


class _Decoder:
    """Decodes values from JSON text or plain data.

    Args:
        missing: defaults of missing fields.
    """

    def __init__(self, missing: Missing = NOTHING) -> None:
        self._missing = missing
        self._decoders: dict[Any, Callable[[Any], Any]] = {}

    # -- from text ----------------------------------------------------------------------------------------------------

    def read(self, kind: Any, text: JsonText) -> Any:
        """Read a dataclass, tuple or scalar at the current position."""
        if dataclasses.is_dataclass(kind):
            data = text.whole()
            return self.build(kind, self.read_fields(kind, text)) if data is ABSENT else self.decode(kind, data)
        if typing.get_origin(kind) is tuple:
            return tuple(self._read_items(typing.get_args(kind)[0], text))
        return _decode_scalar(kind, _read_scalar(text))

    def read_fields(self, kind: Any, text: JsonText) -> dict[str, Any]:
        """Read the fields of the object at the current position that are present."""
        if text.peek() != "{":
            raise _Misfit(f"expected an object, found {describe(_read_scalar(text))}")
        hints = _hints(kind)
        fields: dict[str, Any] = {}
        for name in text.keys():  # noqa: SIM118  # no dict: the text is read by it
            if name not in hints or name in fields:
                known = "the field is given twice" if name in hints else "unknown fields"
                raise _Misfit(f"{known}: [{describe(name)}]")
            try:
                fields[name] = self.read(hints[name], text)
            except _Misfit as misfit:
                misfit.place = f".{name}{misfit.place}"
                raise
        return fields

    def build(self, kind: Any, fields: dict[str, Any]) -> Any:
        """Build a value from its fields."""
        hints = _hints(kind)
        for name, data in self._missing.get(kind, {}).items():
            if name not in fields:
                fields[name] = self.decode(hints[name], data)
        if missing := sorted(hints.keys() - fields.keys()):
            raise _Misfit(f"missing fields {missing}, unknown fields []")
        return kind(**fields)

    def _read_items(self, kind: Any, text: JsonText) -> list[Any]:
        if text.peek() != "[":
            raise _Misfit(f"expected a list, found {describe(_read_scalar(text))}")
        found: list[Any] = []
        shared: dict[Any, Any] = {}
        try:
            for _ in text.items():
                if kind in (int, float):
                    for some in text.numbers():
                        for data in some:
                            found.append(_share(_decode_scalar(kind, data), shared))
                found.append(self.read(kind, text))
        except _Misfit as misfit:
            misfit.place = f"[{len(found)}]{misfit.place}"
            raise
        return found

    # -- from plain data ----------------------------------------------------------------------------------------------

    def decode(self, kind: Any, data: Any) -> Any:
        """Decode a dataclass, tuple or scalar from plain data."""
        return self._find(kind)(data)

    def _find(self, kind: Any) -> Callable[[Any], Any]:
        """Return the decoder of a type; built once per type, so that annotations are not inspected per value."""
        found = self._decoders.get(kind)
        if found is None:
            found = self._decoders[kind] = self._make(kind)
        return found

    def _make(self, kind: Any) -> Callable[[Any], Any]:
        if dataclasses.is_dataclass(kind):
            decoders = {name: self._find(hint) for name, hint in _hints(typing.cast(type, kind)).items()}
            missing = self._missing.get(typing.cast(type, kind), {})
            return functools.partial(_decode_object, kind, decoders, missing)
        if typing.get_origin(kind) is tuple:
            return functools.partial(_decode_list, self._find(typing.get_args(kind)[0]))
        return functools.partial(_decode_scalar, kind)


_STRICT = _Decoder()


def _share(value: Any, shared: dict[Any, Any]) -> Any:
    key = value or str(value)  # -0.0 is equal to 0.0
    return shared.setdefault(key, value) if len(shared) < MOST_SHARED else shared.get(key, value)


def _read_scalar(text: JsonText) -> Any:
    """Read the scalar at the current position; for a list or object return an empty one, which no field accepts."""
    return {"[": [], "{": {}}[text.peek()] if text.peek() in ("[", "{") else text.scalar()


def _decode_object(kind: Any, decoders: dict[str, Callable[[Any], Any]], defaults: Mapping[str, Any], data: Any) -> Any:
    if not isinstance(data, dict):
        raise _Misfit(f"expected an object, found {describe(data)}")
    if data.keys() != decoders.keys():
        data = {**defaults, **data}
    if data.keys() != decoders.keys():
        missing, unknown = sorted(decoders.keys() - data.keys()), sorted(map(str, data.keys() - decoders.keys()))
        listed = ", ".join(describe(name) for name in unknown[:5])
        raise _Misfit(f"missing fields {missing}, unknown fields [{listed}]")
    fields = {}
    try:
        for name, value in data.items():
            fields[name] = decoders[name](value)
    except _Misfit as misfit:
        misfit.place = f".{name}{misfit.place}"
        raise
    return kind(**fields)


def _decode_list(decoder: Callable[[Any], Any], data: Any) -> Any:
    if not isinstance(data, list):
        raise _Misfit(f"expected a list, found {describe(data)}")
    found: list[Any] = []
    try:
        for value in data:
            found.append(decoder(value))
    except _Misfit as misfit:
        misfit.place = f"[{len(found)}]{misfit.place}"
        raise
    return tuple(found)


def _decode_scalar(kind: Any, data: Any) -> Any:
    if typing.get_origin(kind) is types.UnionType:  # a scalar or None
        return None if data is None else _decode_scalar(typing.get_args(kind)[0], data)
    if kind is float:
        # An integer beyond the range of floats would overflow.
        if isinstance(data, bool) or not isinstance(data, (int, float)) or not 0 <= data <= sys.float_info.max:
            raise _Misfit(f"expected a finite number of at least 0, found {describe(data)}")
        return float(data)
    if kind is int:
        if isinstance(data, bool) or not isinstance(data, int) or not -1 <= data < 2**63:
            raise _Misfit(f"expected an integer from -1 to 2**63 - 1, found {describe(data)}")
        return data
    if kind in (bool, str):
        if type(data) is not kind:
            raise _Misfit(f"expected {kind.__name__}, found {describe(data)}")
        if kind is str and not data.isascii() and not _is_unicode(data):
            raise _Misfit(f"{describe(data)} is not Unicode text")
        return data
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(data)
        except ValueError:
            raise _Misfit(f"{describe(data)} is not one of {', '.join(member.value for member in kind)}") from None
    raise TypeError(f"the codec has no rule for {kind}")


def _is_unicode(text: str) -> bool:
    """Return False for lone surrogates, which JSON can express but no text file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

"""Nouns as plain data, and from JSON text: one codec for all of them, from their annotations alone.

So a field cannot be forgotten in one direction. Text is read as it comes (`json_text.py`): the lists and objects that a
noun has are entered one item after the other, and only items that are small are made by Python's own parser.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from elbowroom.errors import TraceError
from elbowroom.ir.json_text import ABSENT, JsonText

MOST_SHARED = 1 << 14
"""Equal numbers of one list are one object, for so many numbers: "0," is 2 bytes of text, and 32 as an object."""

Noun = TypeVar("Noun")


class _Misfit(Exception):
    """Data is not what a noun has there. `place` says where, and grows on the way out."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.place = ""


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
    try:
        return typing.cast(Noun, _decode(kind, data))
    except _Misfit as misfit:
        raise TraceError(f"{place}{misfit.place}: {misfit}") from None


def read_noun(kind: type[Noun], text: JsonText, place: str = "$") -> Noun:
    """A noun, or a part of one, from the text that comes now.

    Raises:
        TraceError: as `from_json`.
        ValueError: the text is not JSON.
    """
    try:
        return typing.cast(Noun, _read(kind, text))
    except _Misfit as misfit:
        raise TraceError(f"{place}{misfit.place}: {misfit}") from None


def read_fields(kind: type, text: JsonText, place: str = "$") -> dict[str, Any]:
    """The fields of a noun from the text that comes now, some of which may be missing.

    Raises:
        TraceError: as `from_json`.
        ValueError: the text is not JSON.
    """
    try:
        return _read_fields(kind, text)
    except _Misfit as misfit:
        raise TraceError(f"{place}{misfit.place}: {misfit}") from None


def build(kind: type[Noun], fields: dict[str, Any], missing: Mapping[str, Any], place: str = "$") -> Noun:
    """A noun of its fields.

    Args:
        missing: what missing fields stand for, as plain data.

    Raises:
        TraceError: another field is missing.
    """
    try:
        hints = _hints(typing.cast(type, kind))
        added = {name: _decode(hints[name], data) for name, data in missing.items() if name not in fields}
        return typing.cast(Noun, _build(kind, {**fields, **added}))
    except _Misfit as misfit:
        raise TraceError(f"{place}{misfit.place}: {misfit}") from None


def describe(data: Any) -> str:
    """A short, printable word on data of any kind and size."""
    if isinstance(data, int) and data.bit_length() > 64:
        return f"an integer of {data.bit_length()} bits"
    if isinstance(data, str):
        data = data[:60]
    text = ascii(data) if isinstance(data, (int, float, str, bool, types.NoneType)) else type(data).__name__
    return text if len(text) <= 60 else text[:57] + "..."


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


# -- from text --------------------------------------------------------------------------------------------------------


def _read(kind: Any, text: JsonText) -> Any:
    if dataclasses.is_dataclass(kind):
        data = text.whole()
        return _build(kind, _read_fields(kind, text)) if data is ABSENT else _decode(kind, data)
    if typing.get_origin(kind) is tuple:
        return tuple(_read_items(typing.get_args(kind)[0], text))
    return _decode_scalar(kind, _read_scalar(text))


def _read_fields(kind: Any, text: JsonText) -> dict[str, Any]:
    if text.peek() != "{":
        raise _Misfit(f"expected an object, found {describe(_read_scalar(text))}")
    hints = _hints(kind)
    fields: dict[str, Any] = {}
    for name in text.keys():  # noqa: SIM118  # no dict: the text is read by it
        if name not in hints or name in fields:
            known = "the field is given twice" if name in hints else "unknown fields"
            raise _Misfit(f"{known}: [{describe(name)}]")
        try:
            fields[name] = _read(hints[name], text)
        except _Misfit as misfit:
            misfit.place = f".{name}{misfit.place}"
            raise
    return fields


def _build(kind: Any, fields: dict[str, Any]) -> Any:
    if missing := sorted(_hints(kind).keys() - fields.keys()):
        raise _Misfit(f"missing fields {missing}, unknown fields []")
    return kind(**fields)


def _read_items(kind: Any, text: JsonText) -> list[Any]:
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
            found.append(_read(kind, text))
    except _Misfit as misfit:
        misfit.place = f"[{len(found)}]{misfit.place}"
        raise
    return found


def _share(value: Any, shared: dict[Any, Any]) -> Any:
    key = value or str(value)  # -0.0 is equal to 0.0
    return shared.setdefault(key, value) if len(shared) < MOST_SHARED else shared.get(key, value)


def _read_scalar(text: JsonText) -> Any:
    """The scalar that comes now; of a list or an object an empty one, which no scalar of a noun is."""
    return {"[": [], "{": {}}[text.peek()] if text.peek() in ("[", "{") else text.scalar()


# -- from plain data --------------------------------------------------------------------------------------------------


def _decode(kind: Any, data: Any) -> Any:
    return _find_decoder(kind)(data)


@functools.cache
def _find_decoder(kind: Any) -> Callable[[Any], Any]:
    """What decodes data of a kind: annotations are looked at once, and not for every value."""
    if dataclasses.is_dataclass(kind):
        decoders = {name: _find_decoder(hint) for name, hint in _hints(typing.cast(type, kind)).items()}
        return functools.partial(_decode_object, kind, decoders)
    if typing.get_origin(kind) is tuple:
        return functools.partial(_decode_list, _find_decoder(typing.get_args(kind)[0]))
    return functools.partial(_decode_scalar, kind)


def _decode_object(kind: Any, decoders: dict[str, Callable[[Any], Any]], data: Any) -> Any:
    if not isinstance(data, dict):
        raise _Misfit(f"expected an object, found {describe(data)}")
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
        # An integer too large for a float is not finite as a float either.
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
    """JSON can spell half a surrogate pair, which nothing can print."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

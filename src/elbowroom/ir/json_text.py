"""Streaming pull parser for JSON: builds only the values that the reader asks for.

Python's own parser takes up to 30 bytes of memory per byte of text ("[],[],[],") before any check can run. Here the
reader asks for one value after another, and Python's parser only sees values within a window of the text.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any

from elbowroom.ir.text_files import LONGEST_LINE_CHARS

WINDOW_CHARS = 1 << 15
"""Size of the window: a value that fits is parsed by Python at once."""

ABSENT = object()
"""Returned by `JsonText.whole` if the window holds no complete value."""

_SPACE = re.compile(r"[ \t\n\r]*")
_FLAT = re.compile(r'[^"\[\]{}]*')
_NUMBER = re.compile(r"[-+.0-9eE]*")
_NUMBERS = re.compile(r"[-+.0-9eE, \t\n\r]*")
_scan: Callable[[str, int], tuple[Any, int]] = typing.cast(Any, json.JSONDecoder()).scan_once


class JsonText:
    """Reads a JSON text once, from beginning to end.

    Every method raises ValueError if the text is not JSON, or not of the requested type.

    Args:
        pieces: consecutive parts of the text.
    """

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces = pieces
        self._text = ""
        self._at = 0  # position in the window
        self._before = 0  # number of characters before the window
        self._has_ended = False

    def peek(self) -> str:
        """Return the next character that is not whitespace; "" at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches anywhere
            if self._at < len(self._text) or not self._grow():
                return self._text[self._at : self._at + 1]

    def finish(self) -> None:
        """Check that only whitespace is left."""
        if self.peek():
            raise self._error("something comes after the end")

    def keys(self) -> Iterator[str]:
        """Iterate over the keys of the next object. The caller reads or skips the value after each."""
        return self._each("{", "}")

    def items(self) -> Iterator[None]:
        """Iterate once per item of the next list. The caller reads or skips each item."""
        return (None for _ in self._each("[", "]"))

    def scalar(self) -> Any:
        """Read the next string, number, true, false or null."""
        if self.peek() in ("", "[", "{"):
            raise self._error("a value is missing here")
        while True:
            try:
                value, end = _scan(self._text, self._at)
            except json.JSONDecodeError as error:
                problem = error.msg
            except StopIteration:
                problem = "a value is missing here"
            except ValueError as error:  # integers of too many digits
                raise self._error("a number has too many digits") from error
            else:
                if self._is_whole(end):
                    self._at = end
                    return value
                problem = ""
            if len(self._text) - self._at > LONGEST_LINE_CHARS:
                raise self._error(f"a text or number of more than {LONGEST_LINE_CHARS} characters")
            if not self._grow() and problem:
                raise self._error(problem)

    def whole(self) -> Any:
        """Read the next value of any type; return ABSENT if it is not JSON or exceeds the window."""
        self.peek()
        self._fill()
        try:
            value, end = _scan(self._text, self._at)
        except (StopIteration, ValueError, RecursionError):
            return ABSENT
        if not self._is_whole(end):
            return ABSENT
        self._at = end
        return value

    def numbers(self) -> Iterator[list[Any]]:
        """Read runs of numbers within `items`, many at a time.

        Stops before the first item that is not a number, or before the last item of the list.
        """
        while True:
            self.peek()
            self._fill()
            run = _NUMBERS.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches anywhere
            end = self._text.rfind(",", self._at, run)
            if end < 0:
                return
            try:
                found, _ = _scan(f"[{self._text[self._at : end]}]", 0)
            except (StopIteration, ValueError):
                return  # `scalar` raises the error
            self._at = end + 1
            yield found

    def skip(self) -> None:
        """Skip the next value, scanning only its strings and brackets."""
        if self.peek() not in ("[", "{"):
            self.scalar()
            return
        depth = 0
        while True:
            self._at = _FLAT.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches anywhere
            found = self._text[self._at : self._at + 1]
            if found == '"':
                self.scalar()
            elif found:
                depth += 1 if found in "[{" else -1
                self._at += 1
                if not depth:
                    return
            elif not self._grow():
                raise self._error("")

    def _each(self, opening: str, closing: str) -> Iterator[Any]:
        self._take(opening)
        if self.peek() == closing:
            self._at += 1
            return
        while True:
            key = None
            if opening == "{":
                if self.peek() != '"':
                    raise self._error("the name of a field is missing here")
                key = self.scalar()
                self._take(":")
            yield key
            if self.peek() == closing:
                self._at += 1
                return
            self._take(",")

    def _is_whole(self, end: int) -> bool:
        """Return False if a number might continue beyond `end`: after the window, or because "1." was parsed as 1."""
        return self._has_ended or _NUMBER.match(self._text, end).end() < len(self._text)  # type: ignore[union-attr]

    def _take(self, character: str) -> None:
        if self.peek() != character:
            raise self._error(f"{character!r} is missing here")
        self._at += 1

    def _fill(self) -> None:
        while len(self._text) - self._at < WINDOW_CHARS and self._grow():
            pass

    def _grow(self) -> bool:
        """Append the next piece to the window. Return False if there is none."""
        if self._has_ended:
            return False
        piece = next(self._pieces, None)
        self._has_ended = piece is None
        self._before += self._at
        self._text = self._text[self._at :] + (piece or "")
        self._at = 0
        return piece is not None

    def _error(self, problem: str) -> ValueError:
        place = self._before + self._at
        return ValueError(f"the text ends at character {place}" if not self.peek() else f"character {place}: {problem}")

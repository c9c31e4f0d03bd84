"""Operator logs in the style of the DTR prototype: JSON lines, one instruction each.

    CONSTANT  NAME                        a parameter or input; its bytes are in the MEMORY line after it
    CALL      NAME ARGS RESULT TIME       an op; after it a MEMORY and an ALIAS line for each result (-1: not a view)
    MUTATE    NAME ARGS MUTATE TIME       an op that changes some of its arguments (by position)
    COPY      DST SRC                     a new name for a tensor
    COPY_FROM DST SRC                     rebinds an existing name to a tensor
    RELEASE   NAME                        removes a name
    ANNOTATE  ANNOTATION                  instructions before START belong to another step

Sizes are in bytes and times in nanoseconds. As in that system's simulator, constants never leave; an op that changes a
tensor creates a new storage of the same size for the changed name; tensors with names at the end are results, which
must be on the device when the step ends. Any op may be replayed.

Source: M. Kirisame, S. Lyubomirsky, A. Haan, J. Brennan, M. He, J. Roesch, T. Chen, Z. Tatlock, "Dynamic Tensor
Rematerialization", ICLR 2021, appendix C; the prototype's public repository has eight such logs of a Titan V.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from elbowroom.errors import TraceError
from elbowroom.importers import Imported, LoggedRelease
from elbowroom.importers._log import LARGEST_LOG_BYTES, Log
from elbowroom.ir.codec import describe
from elbowroom.ir.hardware import Link
from elbowroom.ir.text_files import read_lines
from elbowroom.ir.trace import Role

TITAN_V_LINK = Link(
    upper="device",
    lower="host",
    out_latency_seconds=1e-5,
    out_bytes_per_second=12e9,
    back_latency_seconds=1e-5,
    back_bytes_per_second=12e9,
    half_duplex=False,
    drag_seconds_per_byte=0.0,
    source="PCI Express 3.0 x16, 12 GB/s each way and 10 us assumed; the logged system moves nothing",
)


def read(
    path: str | os.PathLike[str], *, release: LoggedRelease = LoggedRelease.PROGRAM, link: Link | None = None
) -> Imported:
    """Read the step in a log.

    Raises:
        UsageError: the file does not exist.
        TraceError: a line is malformed or inconsistent; the message names the line and the op.
    """
    path = pathlib.Path(path)
    reader = _Reader(path)
    reader.run()
    return reader.log.finish(
        name=path.stem, profile_name="as logged", link=TITAN_V_LINK if link is None else link, release=release
    )


class _Reader:
    """Reads the lines of a log, after a first pass that finds the step's beginning."""

    def __init__(self, path: pathlib.Path) -> None:
        self.log = Log()
        self._path = path
        self._lines = enumerate(read_lines(path, LARGEST_LOG_BYTES), 1)
        self._at_line = 0  # number of the line read last
        self._storage_of: dict[str, int] = {}
        self._released: set[str] = set()
        self._earlier: set[str] = set()  # names of the step before START
        self._references: dict[int, int] = {}
        self._has_begun = False

    def run(self) -> None:
        """Read all instructions after the first START, or all if there is none."""
        handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "CONSTANT": self._constant,
            "CALL": self._call,
            "MUTATE": self._mutate,
            "COPY": self._copy,
            "COPY_FROM": self._copy_from,
            "RELEASE": self._release,
            "ANNOTATE": lambda _: None,
        }
        self._skip_to_start()
        for number, text in self._lines:
            line = self._parse(number, text)
            kind = line.get("INSTRUCTION")
            if not isinstance(kind, str) or kind not in handlers:
                raise self._error(
                    f"unknown instruction {describe(kind)}; there are: {', '.join(handlers)}, MEMORY, ALIAS"
                )
            handlers[kind](line)
        if not self._has_begun:
            raise TraceError(f"{self._path} has no CALL or MUTATE: no step was logged")

    def _skip_to_start(self) -> None:
        starts = (
            n
            for n, text in enumerate(read_lines(self._path, LARGEST_LOG_BYTES), 1)
            if '"START"' in text and '"ANNOTATE"' in text
        )
        start = next(starts, 0)
        for number, text in itertools.islice(self._lines, start):
            if number == start:
                return
            line = self._parse(number, text)
            results = line.get("RESULT")
            names = [line.get("NAME"), line.get("DST"), *(results if isinstance(results, list) else [])]
            self._earlier.update(name for name in names if isinstance(name, str))

    # -- instructions ---------------------------------------------------------------------------------------------

    def _constant(self, line: dict[str, Any]) -> None:
        name = self._text(line, "NAME")
        nbytes = self._follow("MEMORY", name)
        if self._has_begun:
            storage = self.log.add_input(nbytes, name, Role.INPUT)
        else:
            storage = self.log.add_resident(nbytes, name, Role.PARAMETER)
        self._define(name, storage)

    def _call(self, line: dict[str, Any]) -> None:
        op, place = self._text(line, "NAME"), self._place()
        arguments = [self._find(name, op) for name in self._texts(line, "ARGS")]
        seconds = self._number(line, "TIME") / 1e9
        results = self._texts(line, "RESULT")
        made: list[tuple[int, str]] = []
        views: dict[str, int] = {}
        for name in results:
            nbytes, alias = self._follow("MEMORY", name), self._follow("ALIAS", name, least=-1)
            if alias >= len(arguments):
                raise self._error(f"{op}: {name} is a view of argument {alias} of {len(arguments)}")
            if alias < 0:
                made.append((nbytes, name))
            else:
                views[name] = arguments[alias]
        self.log.place = place
        self._has_begun = True
        new = iter(self.log.call(op, seconds, tuple(arguments), made=tuple(made)))
        for name in results:
            self._define(name, views[name] if name in views else next(new))

    def _mutate(self, line: dict[str, Any]) -> None:
        op = self._text(line, "NAME")
        names = self._texts(line, "ARGS")
        arguments = [self._find(name, op) for name in names]
        positions = line.get("MUTATE")
        if not isinstance(positions, list) or any(type(each) is not int for each in positions):
            raise self._error(f"{op}: MUTATE must be a list of positions, not {positions!r}")
        if len(set(positions)) != len(positions) or not all(0 <= each < len(names) for each in positions):
            raise self._error(f"{op} changes arguments {positions} of {len(names)}")
        changed = [names[each] for each in positions]
        made = tuple((self.log.size_of(arguments[each]), names[each]) for each in positions)
        self._has_begun = True
        new = self.log.call(op, self._number(line, "TIME") / 1e9, tuple(arguments), made=made)
        for name, storage in zip(changed, new, strict=True):
            self._drop(self._storage_of[name])
            self._storage_of[name] = storage
            self._references[storage] = self._references.get(storage, 0) + 1

    def _copy(self, line: dict[str, Any]) -> None:
        self._define(self._text(line, "DST"), self._find(self._text(line, "SRC"), "COPY"))

    def _copy_from(self, line: dict[str, Any]) -> None:
        source, name = self._find(self._text(line, "SRC"), "COPY_FROM"), self._text(line, "DST")
        before = self._find(name, "COPY_FROM")
        self._references[source] += 1
        self._storage_of[name] = source
        self._drop(before)

    def _release(self, line: dict[str, Any]) -> None:
        name = self._text(line, "NAME")
        if name in self._earlier and name not in self._storage_of:
            return  # a name of the previous step
        self._drop(self._find(name, "RELEASE"))
        self._released.add(name)

    # -- names ----------------------------------------------------------------------------------------------------

    def _define(self, name: str, storage: int) -> None:
        if name in self._storage_of:
            raise self._error(f"{name} is defined a second time")
        self._storage_of[name] = storage
        self._references[storage] = self._references.get(storage, 0) + 1

    def _find(self, name: str, op: str) -> int:
        if name not in self._storage_of:
            raise self._error(f"{op} uses {name}, which is not defined before")
        if name in self._released:
            raise self._error(f"{op} uses {name}, which was released before")
        return self._storage_of[name]

    def _drop(self, storage: int) -> None:
        self._references[storage] -= 1
        if not self._references[storage]:
            self.log.release(storage)

    # -- lines ----------------------------------------------------------------------------------------------------

    def _parse(self, number: int, text: str) -> dict[str, Any]:
        self._at_line = number
        self.log.place = self._place()
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._error(f"not a line of JSON, or truncated: {error}") from error
        if not isinstance(line, dict):
            raise self._error(f"expected an instruction, found {text[:60]!r}")
        return line

    def _follow(self, kind: str, name: str, *, least: int = 0) -> int:
        """Return the number in the MEMORY or ALIAS line that must come next."""
        number, text = next(self._lines, (0, ""))
        if not number:
            raise self._error("the log is truncated here")
        line = self._parse(number, text)
        if line.get("INSTRUCTION") != kind or line.get("NAME") != name:
            found = f"{describe(line.get('INSTRUCTION'))} of {describe(line.get('NAME'))}"
            raise self._error(f"expected the {kind} of {name}, found {found}")
        return self._number(line, kind, least=least)

    def _number(self, line: dict[str, Any], field: str, *, least: int = 0) -> int:
        """Return a field as an integer, which may be written as text."""
        value = line.get(field)
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if type(number) is not int or not least <= number < 2**63:
            found = repr(value)[:60]
            raise self._error(f"{line.get('NAME')}: {field} is {found}, not a whole number from {least} to 2**63 - 1")
        return number

    def _text(self, line: dict[str, Any], field: str) -> str:
        return self._texts({**line, field: [line.get(field)]}, field)[0]

    def _texts(self, line: dict[str, Any], field: str) -> list[str]:
        values = line.get(field)
        if not isinstance(values, list) or not all(isinstance(each, str) and each.isprintable() for each in values):
            raise self._error(f"{line.get('INSTRUCTION')}: {field} is {ascii(values)[:60]}, not a list of names")
        return values

    def _place(self) -> str:
        return f"{self._path}, line {self._at_line}"

    def _error(self, what: str) -> TraceError:
        return TraceError(f"{self._place()}: {what}")

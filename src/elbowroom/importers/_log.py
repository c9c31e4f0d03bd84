"""Builds a Trace and its Costs from the ops and blocks of a foreign log.

A log has no autograd, so saves and needs are added such that a block may be off the device whenever it is not in use.
Consecutive uses form a run. The block is saved after the first run and needed before each further one; in between only
the saves hold it:

    calls        0    1    2    3    4    5    6         of a block made by call 0, used by 1, 4 and 5, and a result
    program      |====|                                  of the step
    claim             |==========================|
    node                        |=======|        |=|
    entries           save      need             need

A block does not move before the last write to it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from elbowroom.errors import TraceError
from elbowroom.importers import Imported, LoggedRelease
from elbowroom.ir.check import check_trace
from elbowroom.ir.costs import Costs
from elbowroom.ir.digest import digest
from elbowroom.ir.hardware import Link
from elbowroom.ir.trace import PERSISTENT_ROLES, Need, Op, Role, Save, Storage, Trace, View

MOST_BYTES = 2**62
"""Limit on live bytes, so that later sums fit into 64 bits."""

UNKNOWN_ORIGIN = "the log does not say how it is made"
"""Barrier of the op that represents an input from outside the log."""


@dataclasses.dataclass(slots=True)
class _Block:
    nbytes: int
    role: Role
    label: str
    created: int  # a call, or -1
    released: int | None = None  # released before this call; None if it outlives the step
    last_write: int = -1
    versions: int = 0
    uses: list[int] = dataclasses.field(default_factory=list)

    def runs(self, count: int) -> list[tuple[int, int]]:
        """Return the first and last call of each run of uses since the last write; `count` is the step's end."""
        points = [use for use in self.uses if use >= self.last_write]
        if self.released is None:
            points.append(count)
        found: list[tuple[int, int]] = []
        for point in points:
            if found and point <= found[-1][1] + 1:
                found[-1] = (found[-1][0], point)
            else:
                found.append((point, point))
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    name: str
    seconds: float
    reads: tuple[tuple[int, int], ...]  # blocks and their versions
    writes: tuple[tuple[int, int], ...]
    barrier: str


LARGEST_LOG_BYTES = 1 << 26
"""Limit on the text of a log. A line of 50 bytes can define an op and a block: a crafted log takes up to 40 times its
text in memory, so that this limit equals that of our own files. A real log has at least 300 bytes per op, so the limit
allows some 200,000 ops."""


class Log:
    """Collects and checks the contents of a log, in order.

    Attributes:
        place: current position in the file, for error messages.
    """

    def __init__(self) -> None:
        self.place = "the log"
        self._blocks: list[_Block] = []
        self._calls: list[_Call] = []

    def add_resident(self, nbytes: int, label: str, role: Role) -> int:
        """Add a block that exists throughout the step, such as a parameter. Returns its number."""
        return self._add_block(nbytes, label, role, -1)

    def add_input(self, nbytes: int, label: str, role: Role) -> int:
        """Add a block that comes from outside in the middle of the step, at no cost. Returns its number."""
        return self.call("input", 0.0, (), made=((nbytes, label),), barrier=UNKNOWN_ORIGIN, role=role)[0]

    def call(
        self,
        name: str,
        seconds: float,
        reads: tuple[int, ...],
        *,
        made: tuple[tuple[int, str], ...] = (),
        changed: tuple[int, ...] = (),
        barrier: str = "",
        role: Role = Role.ACTIVATION,
    ) -> tuple[int, ...]:
        """Add an op.

        Args:
            reads, changed: numbers of the blocks that it reads and overwrites.
            made: bytes and label of each block that it creates.

        Returns:
            The numbers of the created blocks.

        Raises:
            TraceError: a time or size is impossible, or a block was released before.
        """
        if not (math.isfinite(seconds) and seconds >= 0):
            raise TraceError(f"{self.place}: {name} takes {seconds} seconds")
        index = len(self._calls)
        read = tuple((each, self._use(each, name)) for each in dict.fromkeys(reads))
        writes = []
        for each in dict.fromkeys(changed):
            self._use(each, name)
            block = self._blocks[each]
            block.versions, block.last_write = block.versions + 1, index
            writes.append((each, block.versions))
        new = tuple(self._add_block(nbytes, label, role, index) for nbytes, label in made)
        writes += [(each, 0) for each in new]
        self._calls.append(_Call(name, seconds, read, tuple(writes), barrier))
        return new

    def size_of(self, block: int) -> int:
        """Return the bytes of a block."""
        return self._blocks[block].nbytes

    def release(self, block: int) -> None:
        """Release a block before the next call, unless it outlives the step."""
        if self._blocks[block].role not in PERSISTENT_ROLES:
            self._blocks[block].released = len(self._calls)

    def finish(self, *, name: str, profile_name: str, link: Link, release: LoggedRelease) -> Imported:
        """Return the trace and its costs.

        Raises:
            TraceError: the live bytes exceed the limit.

        Cost: linear in the uses, plus the digest.
        """
        if release is LoggedRelease.LAST_USE:
            for block in self._blocks:
                if block.released is not None:
                    block.released = block.uses[-1] + 1
        self._check_bytes()
        trace = _Weaver(self._blocks, self._calls).weave(name)
        check_trace(trace)
        costs = Costs(
            trace_digest=digest(trace),
            profile_name=profile_name,
            op_seconds=tuple(call.seconds for call in self._calls),
            workspace_bytes=(0,) * len(self._calls),
            link=link,
            alignment_bytes=1,
            hook_seconds=0.0,
            overhead_seconds=0.0,
            measured=True,
        )
        return Imported(trace=trace, costs=costs)

    def _add_block(self, nbytes: int, label: str, role: Role, created: int) -> int:
        if not 0 <= nbytes <= MOST_BYTES:
            raise TraceError(f"{self.place}: {label} has {nbytes} bytes")
        uses = [] if created < 0 else [created]
        self._blocks.append(_Block(nbytes, role, label, created, last_write=created, uses=uses))
        return len(self._blocks) - 1

    def _use(self, number: int, name: str) -> int:
        block = self._blocks[number]
        if block.released is not None:
            raise TraceError(f"{self.place}: {name} uses {block.label}, which was released before")
        if not block.uses or block.uses[-1] != len(self._calls):
            block.uses.append(len(self._calls))
        return block.versions

    def _check_bytes(self) -> None:
        change = [0] * (len(self._calls) + 1)
        for block in self._blocks:
            change[max(block.created, 0)] += block.nbytes
            if block.released is not None:
                change[block.released] -= block.nbytes
        for index, live in enumerate(itertools.accumulate(change)):
            if live > MOST_BYTES:
                name = self._calls[index].name if index < len(self._calls) else "the end"
                raise TraceError(f"at op {index} ({name}) {live} bytes are live; the limit is {MOST_BYTES}")


class _Weaver:
    """Assigns ticks to calls, saves and needs."""

    def __init__(self, blocks: list[_Block], calls: list[_Call]) -> None:
        self._blocks, self._calls = blocks, calls
        needed: dict[int, list[tuple[int, int]]] = {}
        saved: dict[int, list[int]] = {}
        for number, block in enumerate(blocks):
            runs = [] if block.role in PERSISTENT_ROLES else block.runs(len(calls))
            if len(runs) > 1:
                saved.setdefault(runs[0][1], []).append(number)
                for first, last in runs[1:]:
                    needed.setdefault(first, []).append((number, last))
        self._begins: list[int] = []  # tick of each call's first entry
        self._op_ticks: list[int] = []
        self._needs: list[tuple[int, int, int]] = []  # tick, block, last call of the run
        self._save_ticks: dict[int, int] = {}
        tick = itertools.count()
        self._end = 0
        for index in range(len(calls) + 1):
            self._begins.append(self._end)
            self._needs += ((next(tick), number, last) for number, last in needed.get(index, ()))
            if index < len(calls):
                self._op_ticks.append(next(tick))
            for number in saved.get(index, ()):
                self._save_ticks[number] = next(tick)
            self._end = len(self._needs) + len(self._op_ticks) + len(self._save_ticks)

    def weave(self, name: str) -> Trace:
        """Return the trace."""
        order = {number: index for index, number in enumerate(self._save_ticks)}
        return Trace(
            name=name,
            device="cuda",
            ops=tuple(self._ops()),
            storages=tuple(self._storages()),
            saves=tuple(
                Save(tick=tick, storage=number, released=self._gone(self._blocks[number]))
                for number, tick in self._save_ticks.items()
            ),
            needs=tuple(
                Need(tick=tick, save=order[number], released=self._run_end(last)) for tick, number, last in self._needs
            ),
            end=self._end,
        )

    def _gone(self, block: _Block) -> int:
        return self._end if block.released is None else self._begins[block.released]

    def _run_end(self, last: int) -> int:
        return self._end if last == len(self._calls) else self._op_ticks[last] + 1

    def _storages(self) -> Iterator[Storage]:
        for number, block in enumerate(self._blocks):
            yield Storage(
                id=number,
                nbytes=block.nbytes,
                role=block.role if block.role in PERSISTENT_ROLES or number in self._save_ticks else Role.TEMPORARY,
                created=-1 if block.created < 0 else self._op_ticks[block.created],
                released=self._save_ticks.get(number, self._gone(block)),
                label=block.label,
            )

    def _ops(self) -> Iterator[Op]:
        for call, tick in zip(self._calls, self._op_ticks, strict=True):
            yield Op(
                tick=tick,
                name=call.name,
                reads=tuple(map(self._view, call.reads)),
                writes=tuple(map(self._view, call.writes)),
                flops=0,
                barrier=call.barrier,
            )

    def _view(self, used: tuple[int, int]) -> View:
        number, version = used
        return View(storage=number, version=version, dtype="uint8", shape=(self._blocks[number].nbytes,))

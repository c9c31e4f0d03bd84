"""Enumerates the blocks on the device under a plan, for a model of the caching allocator or for a layout.

Blocks that end at a tick are freed before its entry, those that begin there are allocated with it, as in `planned`.
Replays allocate op by op; the workspace of an op is one block, freed as soon as the op is done.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Protocol

from elbowroom.ir.buffers import Buffer
from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Segment
from elbowroom.ir.trace import Trace
from elbowroom.layout.caching import CachingAllocator
from elbowroom.layout.lifetimes import ALIGNMENT_BYTES
from elbowroom.replays.footprint import list_last_uses


class Allocator(enum.StrEnum):
    """Model by which bytes on the device are counted."""

    EXACT = "exact"
    """Block by block, as if addresses did not matter."""
    CACHING = "caching"
    """And as segments of a caching allocator besides."""
    PLANNED = "planned"
    """And laid out in one arena besides both."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """A storage is on the device from entry `begin` to before entry `end`."""

    storage: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """A segment is replayed at a tick; its `outputs` stay."""

    tick: int
    segment: Segment
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Memory that a caching allocator takes for one step.

    Attributes:
        reserved_bytes: peak bytes reserved from the device.
        fragmented_bytes: part of `reserved_bytes` lost to fragmentation.
        allocated_bytes: peak bytes in blocks, each rounded up as by the allocator.
    """

    reserved_bytes: int
    fragmented_bytes: int
    allocated_bytes: int


def reserve(
    trace: Trace, costs: Costs, stays: Sequence[Stay], reruns: Sequence[Rerun], capacity_bytes: int | None = None
) -> Reservation:
    """Allocate every block of a step.

    Args:
        stays: of all storages; a storage that returns while its old block is still held has a stay of its own.
        capacity_bytes: limit on reserved bytes; None for unlimited.

    Raises:
        TierFull: the capacity is exhausted.

    Cost: number of blocks times number of free blocks.
    """
    pool = _Watched(capacity_bytes)
    _Requests(trace, costs, pool).make(stays, reruns)
    return Reservation(
        reserved_bytes=pool.most_reserved,
        fragmented_bytes=pool.most_reserved - pool.most_allocated,
        allocated_bytes=pool.most_allocated,
    )


def list_blocks(trace: Trace, costs: Costs, stays: Sequence[Stay], reruns: Sequence[Rerun]) -> tuple[Buffer, ...]:
    """Return every block of a step as a buffer; time counts requests."""
    pool = _Noted()
    _Requests(trace, costs, pool).make(stays, reruns)
    return pool.finish()


class _Pool(Protocol):
    def take(self, nbytes: int) -> int: ...
    def give(self, address: int) -> None: ...


class _Watched(CachingAllocator):
    """Pool that tracks its peak."""

    def __init__(self, capacity_bytes: int | None) -> None:
        super().__init__(capacity_bytes)
        self.most_reserved = self.most_allocated = 0

    def take(self, nbytes: int) -> int:
        address = super().take(nbytes)
        self.most_reserved = max(self.most_reserved, self.reserved_bytes)
        self.most_allocated = max(self.most_allocated, self.allocated_bytes)
        return address


class _Noted:
    """Pool that numbers its blocks and records their lifetimes."""

    def __init__(self) -> None:
        self._clock = 0
        self._lives: list[tuple[int, int, int | None]] = []  # lower, bytes, upper

    def take(self, nbytes: int) -> int:
        self._lives.append((self._clock, nbytes, None))
        self._clock += 1
        return len(self._lives) - 1

    def give(self, address: int) -> None:
        lower, nbytes, _ = self._lives[address]
        self._lives[address] = (lower, nbytes, self._clock)
        self._clock += 1

    def finish(self) -> tuple[Buffer, ...]:
        return tuple(
            Buffer(
                id=index,
                lower=lower,
                upper=self._clock if upper is None else upper,
                nbytes=nbytes,
                alignment=ALIGNMENT_BYTES,
            )
            for index, (lower, nbytes, upper) in enumerate(self._lives)
        )


class _Requests:
    def __init__(self, trace: Trace, costs: Costs, pool: _Pool) -> None:
        self._trace = trace
        self._costs = costs
        self._pool = pool
        self._index = {op.tick: index for index, op in enumerate(trace.ops)}
        self._ends: dict[int, list[int]] = {}  # addresses, by the tick before which they are freed

    def make(self, stays: Sequence[Stay], reruns: Sequence[Rerun]) -> None:
        """Allocate every block of a step in order, and free those that end with it."""
        begins: dict[int, list[Stay]] = {}
        for stay in sorted(stays, key=lambda stay: (stay.begin, stay.storage, stay.end)):
            if stay.begin < stay.end:
                begins.setdefault(max(stay.begin, 0), []).append(
                    stay
                )  # storages that existed before the step come first
        runs: dict[int, list[Rerun]] = {}
        for rerun in reruns:
            runs.setdefault(rerun.tick, []).append(rerun)
        for tick in range(self._trace.end):
            for address in self._ends.pop(tick, ()):
                self._pool.give(address)
            self._come(begins.get(tick, []), runs.get(tick, []))
            if tick in self._index:
                self._run_inside(self._index[tick])

    def _come(self, stays: list[Stay], reruns: list[Rerun]) -> None:
        """Allocate the blocks that begin at one tick; outputs of replays are allocated by their replay."""
        made = {storage for rerun in reruns for storage in rerun.outputs}
        remade: dict[int, Stay] = {}
        for stay in stays:
            if stay.begin >= 0 and stay.storage in made and stay.storage not in remade:
                remade[stay.storage] = stay
            else:
                self._settle(stay, self._take(self._trace.storages[stay.storage].nbytes))
        for rerun in reruns:
            for storage, address in self._walk(rerun).items():
                if storage in remade:
                    self._settle(remade[storage], address)
                else:  # its old block is still held: the stay that holds it takes it over
                    self._give(address)

    def _walk(self, rerun: Rerun) -> dict[int, int | None]:
        """Replay op by op. Return the addresses of the outputs."""
        ops = [self._trace.ops[self._index[tick]] for tick in rerun.segment.ops]
        leaves = set(rerun.segment.leaves)
        there: dict[int, int | None] = {}
        for op, freed in zip(ops, list_last_uses(ops, set(rerun.outputs)), strict=True):
            for view in op.writes:
                if view.storage not in leaves and view.storage not in there:
                    there[view.storage] = self._take(self._trace.storages[view.storage].nbytes)
            self._run_inside(self._index[op.tick])
            for storage in freed:
                if storage in there:
                    self._give(there.pop(storage))
        return there

    def _run_inside(self, op: int) -> None:
        self._give(self._take(self._costs.workspace_bytes[op]))

    def _settle(self, stay: Stay, address: int | None) -> None:
        if address is not None:
            self._ends.setdefault(stay.end, []).append(address)

    def _take(self, nbytes: int) -> int | None:
        """Allocate a block; None for 0 bytes."""
        return None if nbytes <= 0 else self._pool.take(nbytes)

    def _give(self, address: int | None) -> None:
        if address is not None:
            self._pool.give(address)

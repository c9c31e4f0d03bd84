"""A stretch: ops in slices that run together, each slice through all of them.

    op by op    read a, write b    read b, write c        one result of the first op exists as a whole, away
    stretch     read a, (b), write c                      only a slice of it exists

An op joins a stretch if each of its slices reads exactly the bytes that the same slice of an earlier op has made. A
result that nobody else holds by the time the stretch runs is not written at all.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from elbowroom.hooks.dispatch_keys import Hidden
from elbowroom.ir.slicing import Bounds, SlicePass, iterate_slices
from elbowroom.runtime.sections import Section, Sections
from elbowroom.runtime.slice_pass import finish
from elbowroom.slicing.bounds import find_packed_strides, narrow_read, narrow_result, pack
from elbowroom.slicing.calls import combine_slices, run_slice
from elbowroom.slicing.op_call import OpCall, find_targets


class Piece(NamedTuple):
    """Bytes of a storage that a slice reads or makes, in order.

    Attributes:
        begin: offset in the storage, in elements.
        dimensions: stride and size of each, the innermost first; those that lie together in memory are one.
    """

    storage: int
    dtype: torch.dtype
    begin: int
    dimensions: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Product of all sizes, in bytes."""
        return math.prod((size for _, size in self.dimensions), start=self.dtype.itemsize)


Reads = tuple[tuple[Piece, ...], ...]
"""Pieces that an op reads: for each slice, one for each of `SlicePass.reads`."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StretchOp:
    """An op of a stretch.

    Attributes:
        call: the op, with aliases of its arguments: what the program does with its own tensors changes nothing.
        slice_pass: the only pass over its slices, which has one loop.
        results: aliases of its results.
        reads, writes: pieces of each slice, as in `slice_pass.reads` and `slice_pass.results`. A partial pass has none
            of the latter.
    """

    call: OpCall
    slice_pass: SlicePass
    results: tuple[torch.Tensor, ...]
    reads: Reads
    writes: tuple[tuple[Piece, ...], ...]


class SlicedStretch:
    """Ops in slices that run together.

    Args:
        sections: reads and writes parts of storages.
        count: number of slices, of each op.
        ops: to begin with, cut into as many slices.

    Attributes:
        count: number of slices.
        ops: in order.
    """

    def __init__(self, sections: Sections, count: int, ops: Sequence[StretchOp] = ()) -> None:
        self._sections = sections
        self.count = count
        self.ops = list(ops)

    def find_reads(self, call: OpCall, slice_pass: SlicePass) -> Reads | None:
        """Return the pieces that an op would read at the end of the stretch, by slice.

        Returns:
            None if its slices do not read what the same slices of earlier ops make, or it writes to anything else.
        """
        all_bounds = self._list_bounds(slice_pass)
        if all_bounds is None:
            return None
        made = [{piece for op in self.ops for piece in op.writes[place]} for place in range(self.count)]
        storages = {piece.storage for piece in made[0]}
        found = []
        for place, bounds in enumerate(all_bounds):
            pieces = []
            for index in slice_pass.reads:
                view = narrow_read(call.reads[index], index, slice_pass, bounds)
                if view.shape == call.reads[index].shape and view.stride() != find_packed_strides(view):
                    return None  # the whole op reads it with its gaps
                piece = _find_piece(view)
                if piece is None or (piece.storage in storages and piece not in made[place]):
                    return None
                pieces.append(piece)
            found.append(tuple(pieces))
        if self.ops and not storages.intersection(piece.storage for piece in found[0]):
            return None
        for target in find_targets(call):
            read = dict(zip(slice_pass.reads, found[0], strict=True)).get(target)
            if read is None or read.storage not in storages:
                return None
        return tuple(found)

    def count_bytes(self, slice_pass: SlicePass, reads: Reads, results: Sequence[torch.Tensor]) -> int:
        """Return the bytes that a slice would take with another op at the end, or more.

        The next slice is read meanwhile, and the former one is written.

        Args:
            reads: of the op, as `find_reads` returns them.
            results: that it will have, on any device.
        """
        slices = [{piece for op in self.ops for piece in (*op.reads[place], *op.writes[place])}.union(reads[place])
                  for place in range(self.count)]  # fmt: skip
        whole = set.intersection(*slices)
        most = 0
        for bounds, pieces in zip(self._list_bounds(slice_pass) or (), slices, strict=True):
            made = [narrow_result(results[index], index, slice_pass, bounds) for index in slice_pass.results]
            nbytes = sum(each.numel() * each.element_size() for each in made)
            most = max(most, nbytes + sum(piece.nbytes for piece in pieces - whole))
        return 2 * most + sum(piece.nbytes for piece in whole)

    def add(self, call: OpCall, slice_pass: SlicePass, reads: Reads, results: Sequence[torch.Tensor]) -> None:
        """Add an op at the end.

        Args:
            results: of the op; what it returns, or for an in-place op, its argument.
        """
        aliases = [_make_alias(each) for each in call.reads]
        call = dataclasses.replace(call, values=call.replace_reads(aliases, {}), reads=tuple(aliases))
        results = tuple(_make_alias(each) for each in results)
        writes = []
        for bounds in self._list_bounds(slice_pass) or ():
            views = [narrow_result(results[index], index, slice_pass, bounds) for index in slice_pass.results]
            pieces = () if slice_pass.is_partial else tuple(map(_find_piece, views))
            writes.append(tuple(piece for piece in pieces if piece is not None))
        self.ops.append(StretchOp(call, slice_pass, results, reads, tuple(writes)))

    def list_made(self) -> list[torch.Tensor]:
        """Return the results of all ops."""
        return [each for op in self.ops for each in op.results]

    def list_read(self) -> list[torch.Tensor]:
        """Return the arguments of all ops."""
        return [each for op in self.ops for each in op.call.reads]

    def find_needed(self) -> set[int]:
        """Return the storages of results that others hold, too."""
        tensors = {id(each): each for each in (*self.list_read(), *self.list_made())}
        held = collections.Counter(each.untyped_storage()._cdata for each in tensors.values())
        made = {each.untyped_storage()._cdata: each for each in self.list_made()}
        without = _count_holders(torch.empty(1, device="cpu")) - 1  # of a storage that one tensor holds
        return {key for key, each in made.items() if _count_holders(each) > without + held[key]}

    def run(self) -> None:
        """Run all ops.

        Raises:
            Infeasible, MemoryRefused: there is no room for a slice. What was written is incomplete.
            TierError: a section could not be read or written.
        """
        running = _Run(self._sections, self.ops, [self._list_bounds(op.slice_pass) or [] for op in self.ops])
        try:
            running.run(self.count, self.find_needed())
        finally:
            running.settle()

    def _list_bounds(self, slice_pass: SlicePass) -> list[Bounds] | None:
        """Return the slices of a pass; None if there cannot be as many as the stretch has."""
        found = list(iterate_slices(slice_pass, (self.count,)))
        return found if len(found) == self.count else None


class _Run:
    def __init__(self, sections: Sections, ops: Sequence[StretchOp], bounds: Sequence[Sequence[Bounds]]) -> None:
        self._sections = sections
        self._ops = ops
        self._bounds = bounds  # by op and slice
        self._reading: dict[Piece, torch.Tensor | Section] = {}
        self._writing: list[Section] = []
        self._partial: list[tuple[torch.Tensor, ...]] = []

    def run(self, count: int, needed: set[int]) -> None:
        """Compute the slices, and read each one ahead."""
        self._fetch(0)
        for place in range(count):
            pieces = self._arrive()
            if place + 1 < count:
                self._fetch(place + 1)
            former, self._writing = self._writing, []
            for position in range(len(self._ops)):
                self._compute(place, position, pieces, needed)
            finish(former)
        if self._partial:
            last = self._ops[-1]
            args, kwargs = last.call.order(last.call.values)
            found = combine_slices(last.call.op, args, kwargs, self._partial)
            for index, tensor in zip(last.slice_pass.results, found, strict=True):
                last.results[index].copy_(tensor)

    def settle(self) -> None:
        """Finish all transfers, and drop what was read ahead."""
        reading = [each for each in self._reading.values() if isinstance(each, Section)]
        self._reading = {}
        writing, self._writing = self._writing, []
        finish([*reading, *writing])

    def _fetch(self, place: int) -> None:
        """Begin to read what a slice reads and does not make."""
        made: set[Piece] = set()
        for op, bounds in zip(self._ops, self._bounds, strict=True):
            for index, piece in zip(op.slice_pass.reads, op.reads[place], strict=True):
                if piece in made or piece in self._reading:
                    continue
                view = narrow_read(op.call.reads[index], index, op.slice_pass, bounds[place])
                section = None if self._sections.find_away(view) is None else self._sections.read(view)
                self._reading[piece] = section or (view if self._sections.is_packed(view) else pack(view))
            made.update(op.writes[place])

    def _arrive(self) -> dict[Piece, torch.Tensor]:
        reading, self._reading = self._reading, {}
        finish([each for each in reading.values() if isinstance(each, Section)])
        return {piece: each.tensor if isinstance(each, Section) else each for piece, each in reading.items()}

    def _compute(self, place: int, position: int, pieces: dict[Piece, torch.Tensor], needed: set[int]) -> None:
        """Compute a slice of one op.

        Args:
            pieces: that were read or made so far. What no later op reads is dropped.
            needed: storages of results that are written.
        """
        op, later = self._ops[position], self._ops[position + 1 :]
        bounds = self._bounds[position][place]
        reads = []
        for index, piece in zip(op.slice_pass.reads, op.reads[place], strict=True):
            view = narrow_read(op.call.reads[index], index, op.slice_pass, bounds)
            reads.append(torch.as_strided(pieces[piece], view.shape, find_packed_strides(view)))
        found = run_slice(op.call.op, *op.call.order(op.call.values), op.slice_pass, bounds, reads)
        del reads
        read_later = {piece for each in later for piece in each.reads[place]}
        if op.slice_pass.is_partial:
            self._partial.append(found)
        for index, piece, tensor in zip(op.slice_pass.results, op.writes[place], found, strict=not self._partial):
            view = narrow_result(op.results[index], index, op.slice_pass, bounds)
            packed = _pack_as(view, tensor, [each for other, each in pieces.items() if other != piece])
            if self._sections.find_away(view) is None:
                view.copy_(packed)
            elif piece.storage in needed and not any(piece in each.writes[place] for each in later):
                section = self._sections.write(view, packed)
                assert section is not None
                self._writing.append(section)
            if piece in read_later:
                pieces[piece] = packed
        for piece in pieces.keys() - read_later:
            del pieces[piece]


def _make_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor with the same memory: what the program does with its own one does not change it."""
    with Hidden():
        alias: torch.Tensor = torch.ops.aten.alias.default(tensor)
        return alias


def _find_piece(view: torch.Tensor) -> Piece | None:
    """Return the bytes of a view; None if its elements overlap, or a copy without gaps would have another order."""
    packed = zip(view.stride(), view.shape, find_packed_strides(view), strict=True)
    merged: list[tuple[int, int]] = []
    made = 1
    for stride, size, packed_stride in sorted(each for each in packed if each[1] != 1):
        past = merged[-1][0] * merged[-1][1] if merged else 1
        if packed_stride != made or (stride < past and size > 0):
            return None
        made *= size
        if merged and stride == past:
            merged[-1] = merged[-1][0], merged[-1][1] * size
        else:
            merged.append((stride, size))
    return Piece(view.untyped_storage()._cdata, view.dtype, int(view.storage_offset()), tuple(merged))


def _count_holders(tensor: torch.Tensor) -> int:
    """Return the tensors that hold a tensor's storage, and the references to its Python object; more by a constant."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)


def _pack_as(view: torch.Tensor, tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a slice of a result without gaps, its dimensions in the order of the whole one's.

    It has memory of its own: some ops return an argument.
    """
    strides = find_packed_strides(view)
    storage = tensor.untyped_storage()._cdata
    if tensor.stride() == strides and all(each.untyped_storage()._cdata != storage for each in others):
        return tensor
    return torch.empty_strided(view.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

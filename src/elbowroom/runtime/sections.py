"""Sections: reads and writes parts of storages whose bytes are away, in their copies in the tier below."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from elbowroom.errors import TierFull
from elbowroom.hooks.dispatch_keys import Hidden
from elbowroom.hooks.storage_ids import get_address
from elbowroom.native import library
from elbowroom.runtime.copies import Copy, Extents
from elbowroom.runtime.paged_storages import PagedStorages
from elbowroom.runtime.transfers import Finish, Transfers
from elbowroom.slicing.bounds import find_packed_strides

ALIGNMENT_BYTES = 64
"""As PyTorch aligns memory on a CPU. On CUDA it aligns more; kernels read 16 bytes at a time."""


class Section(NamedTuple):
    """A section on the device, whose transfer may still run."""

    tensor: torch.Tensor
    finish: Finish


def find_extents(view: torch.Tensor, packed: torch.Tensor) -> Extents | None:
    """Return the runs of a view that are contiguous both in its storage and in a packed copy of it.

    Args:
        packed: of the view's shape, without gaps, its dimensions in the same order in memory.

    Returns:
        None if the view's elements overlap.
    """
    if not view.numel():
        return Extents(0, 0, 0)
    dimensions = sorted((stride, size, packed.stride(index)) for index, (size, stride) in
                        enumerate(zip(view.shape, view.stride(), strict=True)) if size > 1)  # fmt: skip
    run, count = 1, 0
    for stride, size, packed_stride in dimensions:
        if stride != run or packed_stride != run:
            break
        run *= size
        count += 1
    outer = dimensions[count:]
    if any(stride < run for stride, _, _ in outer):
        return None
    itemsize = view.element_size()
    begin, memory_begin = int(view.storage_offset()), int(packed.storage_offset())
    distances = ((size, int(stride) * itemsize, int(within) * itemsize) for stride, size, within in reversed(outer))
    return Extents(begin * itemsize, memory_begin * itemsize, int(run) * itemsize, tuple(distances))


class Sections:
    """Moves sections of storages that are away.

    Args:
        storages: that may be away; those that `make` and `page_out` add are among them.
        transfers: moves bytes to the tier below and back.
    """

    def __init__(self, storages: PagedStorages, transfers: Transfers) -> None:
        self._storages = storages
        self._transfers = transfers
        self._native = library.load()
        self._made = set[Any]()

    @property
    def slicing(self) -> contextlib.AbstractContextManager[object]:
        """Context in which no other thread brings storages back."""
        lock: contextlib.AbstractContextManager[object] = self._storages.slicing
        return lock

    def list_made(self) -> list[torch.UntypedStorage]:
        """Return the storages other than state that may be away, as far as they are in use."""
        find = self._storages.table.find
        storages = {record: record.storage for record in self._made}
        known = {record: each for record, each in storages.items() if each is not None and find(each) is record}
        self._made = set(known)
        return list(known.values())

    def find_away(self, tensor: torch.Tensor) -> Any:
        """Return the record of a tensor's storage if its bytes are away, else None."""
        record = self._storages.table.find(tensor.untyped_storage())
        if record is None or not record.is_away:
            return None
        self._storages.cancel_reload(record)  # sections are read from the copy, and written to it
        return record

    def find_misalignment(self, tensor: torch.Tensor) -> int:
        """Return the bytes by which a tensor's memory is not aligned, or will not be when it is back."""
        storage = tensor.untyped_storage()
        record = self._native.find_state(storage)  # which may be another room's
        begin = get_address(storage) if record is None else record.misalignment
        return int((begin + tensor.storage_offset() * tensor.element_size()) % ALIGNMENT_BYTES)

    def is_packed(self, view: torch.Tensor) -> bool:
        """Tell whether a view has no gaps in memory, and is aligned."""
        return view.stride() == find_packed_strides(view) and not self.find_misalignment(view)

    def is_in_use(self, tensor: torch.Tensor) -> bool:
        """Tell whether an op, or code that runs beside the program, uses a tensor's memory just now."""
        record = self._storages.table.find(tensor.untyped_storage())
        return record is not None and not record.is_idle

    def note_waiting(self, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        """Have `run_waiting` called before what has to come after ops that wait, and read and write these tensors."""
        table = self._storages.table
        self._storages.unwritten.records = {table.find(each.untyped_storage()) for each in written} - {None}
        table.note_waiting(list(read), list(written))

    @property
    def lost_waiting(self) -> str:
        """Why ops that wait can never run, as their arguments were overwritten; empty if they can."""
        why: str = self._storages.table.lost_waiting
        return why

    def make(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor whose bytes are away, and not written yet.

        Args:
            like: on the device "meta": has the tensor's shape, strides and dtype.

        Raises:
            TierFull, TransferFailed: there is no room for a copy.
        """
        self._storages.sweep()
        model = torch.empty(0, dtype=like.dtype, device=device)
        copy = self._transfers.make_copy(nbytes := like.untyped_storage().nbytes())
        tensor: torch.Tensor
        tensor, record = self._storages.table.make_away(list(like.shape), list(like.stride()), model, nbytes)
        with self._storages.lock:
            self._storages.copies.by_record[record] = copy
            self._made.add(record)
        self._native.watch_all_threads()
        return tensor

    def begin_again(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give tensors that are to be written from the beginning new copies: the former may have failed for good.

        Raises:
            TierFull, TransferFailed: there is no room for a copy. The rest have their former ones.
        """
        for tensor in tensors:
            if (record := self.find_away(tensor)) is not None:
                copy = self._transfers.make_copy(record.nbytes)
                with self._storages.lock:
                    former, self._storages.copies.by_record[record] = self._storages.copies.by_record[record], copy
                self._transfers.discard(former)

    def forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give up the copies of new tensors that were not written to their end. Nobody has them."""
        for tensor in tensors:
            record = self._storages.table.find(tensor.untyped_storage())
            if record is None or record not in self._made:
                continue
            with self._storages.lock:
                copy = self._storages.copies.by_record.pop(record, None)
                self._made.discard(record)
            if copy is not None:
                self._transfers.discard(copy)

    def page_out(self, storage: torch.UntypedStorage, copy: Copy | None) -> int:
        """Move out a storage that is not state, for as long as no op uses it. Return the bytes freed.

        Args:
            copy: another copy of the storage, which may still be written.
        """
        if copy is not None:
            self._transfers.finish(copy)  # until then it reads the storage's memory
        with self._storages.lock:
            record = self._storages.table.add(storage, is_movable=True)
            if record is None:
                return 0
            self._made.add(record)
        self._native.watch_all_threads()
        with self._storages.lock:
            return self._storages.evict([record])

    def read(self, view: torch.Tensor) -> Section | None:
        """Begin to read a view of a tensor that is away. Return None if its elements overlap.

        Raises:
            TierError, Infeasible: as for `Transfers.move_section`, or there is no room on the device.
        """
        section = torch.empty_strided(view.shape, find_packed_strides(view), dtype=view.dtype, device=view.device)
        extents = find_extents(view, section)
        copy = self._find_copy(view)
        if extents is None or copy is None:
            return None
        with Hidden():
            finish = self._transfers.move_section(copy, section.untyped_storage(), extents, is_out=False)
        return Section(section, finish)

    def write(self, view: torch.Tensor, contents: torch.Tensor, copy: Copy | None = None) -> Section | None:
        """Begin to write a view of a tensor that is away.

        Args:
            copy: to write to; by default the tensor's.
        """
        strides = find_packed_strides(view)
        if contents.stride() != strides:
            packed = torch.empty_strided(view.shape, strides, dtype=contents.dtype, device=contents.device)
            contents = packed.copy_(contents)
        extents = find_extents(view, contents)
        copy = copy or self._find_copy(view)
        if extents is None or copy is None:
            return None
        with Hidden():
            finish = self._transfers.move_section(copy, contents.untyped_storage(), extents, is_out=True)
        return Section(contents, finish)

    def begin_rewriting(self, tensor: torch.Tensor) -> Copy | None:
        """Return an empty copy that takes the place of a tensor's present one when all of it is written.

        So an error in between leaves the old contents. None if the tensor is only a part of its storage, or there is no
        room for another copy: then the present one is written to.
        """
        storage = tensor.untyped_storage()
        if tensor.numel() * tensor.element_size() != storage.nbytes():
            return None
        try:
            return self._transfers.make_copy(storage.nbytes())
        except TierFull:
            return None

    def end_rewriting(self, rewritten: Sequence[tuple[torch.Tensor, Copy]], *, are_whole: bool) -> None:
        """Put copies in the place of tensors' present ones, or give them up if they are not `are_whole`.

        Raises:
            TransferFailed: one of them could not be written. All are given up then.
        """
        given_up = [copy for _, copy in rewritten]
        try:
            if are_whole:
                for copy in given_up:
                    self._transfers.finish(copy)
                with self._storages.lock:
                    records = [self._storages.table.find(tensor.untyped_storage()) for tensor, _ in rewritten]
                    given_up = [self._storages.copies.by_record[record] for record in records]
                    self._storages.copies.by_record.update(zip(records, (copy for _, copy in rewritten), strict=True))
        finally:
            for copy in given_up:
                self._transfers.discard(copy)

    def _find_copy(self, tensor: torch.Tensor) -> Copy | None:
        record = self._storages.table.find(tensor.untyped_storage())
        return None if record is None or not record.is_away else self._storages.copies.by_record.get(record)

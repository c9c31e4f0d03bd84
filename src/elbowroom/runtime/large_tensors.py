"""LargeTensors: arguments and results of ops in slices that are too large to be on the device as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elbowroom.hooks.exposed_memory import is_shared
from elbowroom.hooks.storage_ids import get_plain_storage
from elbowroom.runtime.state_pager import StatePager
from elbowroom.runtime.watched_uses import show_moves

LARGE = 8
"""Arguments and results above this share of the budget are away while their op runs in slices."""

LEAST_BYTES = 4096
"""Smaller ones stay, even if most of the budget is taken by what cannot leave."""


class LargeTensors:
    """Large tensors of one room, which are read and written in sections.

    Args:
        pager: moves storages, and parts of them.
    """

    def __init__(self, pager: StatePager) -> None:
        self._pager = pager
        self._sections = pager.sections
        self._table: Any = None
        self._budget_bytes = 0
        self._limit_bytes = 0

    def begin_step(self, budget_bytes: int, table: Any) -> None:
        """Begin a step.

        Args:
            table: of the step's storages.
        """
        if budget_bytes != self._budget_bytes:
            self._budget_bytes = budget_bytes
            self._limit_bytes = budget_bytes // LARGE
        self._table = table

    def is_large(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor's storage is too large."""
        return tensor.untyped_storage().nbytes() > self._limit_bytes

    def include_next(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Have the largest tensors among an op's arguments and results that are not large count as large, until the
        budget changes. Return False if there are none.

        If much of the budget is taken by what cannot leave, such as a data set, smaller ones are too large, too.
        """
        sizes = [each.untyped_storage().nbytes() for each in tensors]
        found = max((each for each in sizes if LEAST_BYTES <= each <= self._limit_bytes), default=0)
        if found:
            self._limit_bytes = found - 1
        return found > 0

    def make(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor whose bytes are away, and not written yet.

        Args:
            like: on the device "meta": has the tensor's shape, strides and dtype.
        """
        self._begin()
        tensor = self._sections.make(like, device)
        self._table.mark_staying([tensor], str(device))
        return tensor

    def page_out(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Move out the large ones among an op's arguments. Return True if any has left."""
        freed_bytes = 0
        for tensor in tensors:
            storage = get_plain_storage(tensor)
            if storage is None or storage.nbytes() <= self._limit_bytes or self._sections.find_away(tensor):
                continue
            if is_shared(storage):
                continue
            saved = self._table.find(storage)
            if saved is None or saved.record.id < 0:
                self._table.mark_staying([tensor], str(tensor.device))
            self._begin()
            freed_bytes += self._sections.page_out(storage, None if saved is None else saved.copy)
        return freed_bytes > 0

    def watch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
        """Return a function that moves out the large ones among an op's arguments, after a slice had no room.

        It returns True if more of them are away than before: those that a slice reads may be evicted for it, and then
        it reads sections of them the next time, and needs less.
        """
        away = self._count_away(tensors)

        def page_out() -> bool:
            nonlocal away
            self.page_out(tensors)
            former, away = away, self._count_away(tensors)
            return away > former

        return page_out

    def _count_away(self, tensors: Sequence[torch.Tensor]) -> int:
        return sum(self._sections.find_away(each) is not None for each in tensors)

    def _begin(self) -> None:
        """Have what is away come back before it is used."""
        show_moves(self._pager)

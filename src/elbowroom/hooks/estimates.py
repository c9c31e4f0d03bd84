"""What an op is about to allocate, before it runs.

An op is tried on fake tensors the first time its kind, shapes and dtypes are seen; after that it is looked up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from elbowroom.cost.workspace import estimate_workspace
from elbowroom.hooks.replayable import is_view, iterate_tensors
from elbowroom.ir.trace import Op, View

MOST_KEPT = 1 << 16
"""Kinds of op that are remembered; beyond, all are forgotten and found again."""


BLOCK_BYTES = 512
"""No allocator rounds up to more, where blocks are small."""


class Estimate(NamedTuple):
    """Bytes of an op's results, and of what it allocates inside itself beyond them, at most."""

    result_bytes: int
    inner_bytes: int


NOTHING = Estimate(0, 0)


class Estimates:
    """Remembers what ops allocate."""

    def __init__(self) -> None:
        self._known: dict[Any, Estimate] = {}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def find(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Estimate:
        """What an op with these arguments allocates. Cost: some microseconds; the first time, some hundred."""
        if is_view(func):
            return NOTHING
        key: tuple[Any, ...] = (id(func), *map(_describe, args))
        if kwargs:
            key += tuple(map(_describe, kwargs.values()))
        try:
            found = self._known.get(key)
        except TypeError:
            return self._try(func, args, kwargs)  # it has an argument that cannot be remembered
        if found is None:
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            found = self._known[key] = self._try(func, args, kwargs)
        return found

    def _try(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Estimate:
        given: list[torch.Tensor] = []

        def fake(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if value.layout is not torch.strided:
                    return value
                made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                given.append(made)
                return made
            if isinstance(value, (list, tuple)):
                return type(value)(map(fake, value))
            return value

        tensors = list(iterate_tensors((*args, *kwargs.values())))
        try:
            with self._fake:
                result = func(*map(fake, args), **{name: fake(value) for name, value in kwargs.items()})
        except Exception:
            return self._bound(tensors)  # its results depend on values, or it knows no fake tensors
        if any(each.layout is not torch.strided for each in (*tensors, *iterate_tensors(result))):
            return self._bound(tensors)
        known = {id(tensor.untyped_storage()) for tensor in given}
        made = [each for each in iterate_tensors(result) if id(each.untyped_storage()) not in known]
        blocks = {id(each.untyped_storage()): int(each.untyped_storage().nbytes()) for each in made}
        views = [_view(tensor, place) for place, tensor in enumerate((*tensors, *made))]
        reads, writes = tuple(views[: len(tensors)]), tuple(views[len(tensors) :])
        op = Op(tick=0, name=str(func), reads=reads, writes=writes, flops=0, barrier="")
        return Estimate(sum(map(_round_up, blocks.values())), _round_up(estimate_workspace(op)))

    def _bound(self, tensors: list[torch.Tensor]) -> Estimate:
        """Positions of all elements, which is the most that selecting among them gives."""
        most = sum(tensor.numel() * max(8, tensor.element_size()) * max(1, tensor.dim()) for tensor in tensors)
        return Estimate(_round_up(most), 0)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_describe, value))
    return value


def _view(tensor: torch.Tensor, storage: int) -> View:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return View(storage=storage, version=0, dtype=dtype, shape=tuple(map(int, tensor.shape)))

"""What an op is about to allocate, before it runs, and how long it took before.

An op is tried on fake tensors the first time its kind, shapes and dtypes are seen; after that it is looked up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from elbowroom.cost.workspace import estimate_workspace
from elbowroom.hooks.identity import PLAIN_TENSORS, make_test
from elbowroom.hooks.kinds import Kind, find_kind
from elbowroom.hooks.replayable import iterate_tensors
from elbowroom.hooks.stopwatch import Pace, Stopwatch, make_stopwatch
from elbowroom.ir.trace import Op, View

logger = logging.getLogger(__name__)

MOST_KEPT = 1 << 16
"""Kinds of op that are remembered; beyond, all are forgotten and found again."""

UNSEEN_BYTES = 1 << 14
"""Counted in every step for what it allocates without an op that a dispatch mode sees: states of random generators, the
scalars of a loop. It was some hundred bytes at most in all that was measured."""

_KNOWN_SPACES = ("aten", "prim", "prims")

BLOCK_BYTES = {"cpu": 64, "cuda": 512}
"""What PyTorch's allocators round small blocks up to."""


_COUNTS: dict[str, Callable[[torch.Tensor], int]] = {
    "repeat_interleave": lambda repeats: int(repeats.sum()),
    "bincount": lambda values: int(values.max()) + 1 if values.numel() else 0,
}
"""Elements of results that only the values of the first argument tell."""

_OUTPUTS = {"_unique2": 4, "unique_dim": 4, "unique_consecutive": 4, "allclose": 0}
"""Results, of which each may have as many elements as the argument, and one more for sorting."""


_DENSE = {"_sparse_addmm", "addmm"}
"""Their result is dense, though one of their matrices is sparse."""

_REMEMBERED = (str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_SCALARS = frozenset((bool, int, float, complex))
_STRIDED = torch.strided
_get_default_dtype = torch.get_default_dtype


class Estimate:
    """What an op takes.

    Attributes:
        result_bytes: of its results, at most.
        inner_bytes: it allocates so much inside itself beyond them, at most.
        nbytes: both.
        pace: how long it took.
    """

    __slots__ = ("inner_bytes", "nbytes", "pace", "result_bytes")

    def __init__(self, result_bytes: int, inner_bytes: int) -> None:
        self.result_bytes, self.inner_bytes = result_bytes, inner_bytes
        self.nbytes = result_bytes + inner_bytes
        self.pace = Pace()


class Estimates:
    """Remembers what ops take on one kind of device."""

    def __init__(self, device_type: str) -> None:
        self._device_type, self._is_here = device_type, make_test(device_type)
        self._block_bytes = BLOCK_BYTES[device_type]
        self._known: dict[Any, Estimate] = {}
        self._told: set[Any] = set()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._stopwatches: dict[torch.device, Stopwatch] = {}

    def find(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Estimate:
        """What an op with these arguments takes. Cost: one or two microseconds; the first time, some hundred."""
        return self.find_of(find_kind(func), args, kwargs)

    def find_of(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Estimate:
        """The same, where the kind of op is known."""
        if kind.makes_nothing:
            return Estimate(0, 0)
        try:
            # A new learning rate changes nothing of what an op in place allocates.
            key: list[Any] = [kind.identity, _get_default_dtype(), *kwargs]
            _describe((*args, *kwargs.values()) if kwargs else args, key, kind.may_write, self._is_here)
            if kind.is_convolution:
                key.append(_count_expanded(args))
            known = tuple(key)
            found = self._known.get(known)
        except (TypeError, RuntimeError):
            return self._try(kind.func, args, kwargs)  # it has an argument that cannot be remembered
        if found is None:
            found = self._try(kind.func, args, kwargs)
            if kind.func._opname not in _COUNTS:  # there the values tell, and they may be others the next time
                if len(self._known) >= MOST_KEPT:
                    self._known.clear()
                self._known[known] = found
        return found

    def find_stopwatch(self, device: torch.device) -> Stopwatch:
        """What the ops on a device are timed with."""
        if device not in self._stopwatches:
            self._stopwatches[device] = make_stopwatch(device)
        return self._stopwatches[device]

    def _try(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Estimate:
        given: list[tuple[torch.Tensor, int]] = []

        def fake(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if value.layout is not torch.strided:
                    made = torch.empty(value.shape, dtype=value.dtype, device=value.device)
                else:
                    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                given.append((made, made.untyped_storage().nbytes()))
                return made
            if isinstance(value, (list, tuple)):
                return type(value)(map(fake, value))
            return value

        tensors = list(iterate_tensors((*args, *kwargs.values())))
        if not all(map(_is_strided, tensors)) and func._opname not in _DENSE:
            return self._bound(func, tensors)
        try:
            # Modes that are there would see the op on trial.
            with _disable_current_modes(), self._fake:
                result = func(*map(fake, args), **{name: fake(value) for name, value in kwargs.items()})
        except Exception:
            self._tell(func)
            return self._bound(func, tensors)  # its results depend on values, or it knows no fake tensors
        if not all(map(_is_strided, iterate_tensors(result))):
            return self._bound(func, tensors)
        known = {id(tensor.untyped_storage()) for tensor, _ in given}
        made = [
            each
            for each in iterate_tensors(result)
            if each.device.type == self._device_type and id(each.untyped_storage()) not in known
        ]
        grown = sum(max(0, tensor.untyped_storage().nbytes() - before) for tensor, before in given)
        blocks = {id(each.untyped_storage()): int(each.untyped_storage().nbytes()) for each in made}
        return Estimate(sum(map(self._round_up, blocks.values())) + grown, self._find_workspace(func, tensors, made))

    def _tell(self, func: Any) -> None:
        """Say once of an op from outside of PyTorch that it is guessed at."""
        if func.namespace not in _KNOWN_SPACES and func not in self._told:
            self._told.add(func)
            logger.warning(
                "%s does not run on fake tensors, so what it allocates is a guess from what it is given; "
                "torch.library.register_fake tells",
                func,
            )

    def _bound(self, func: Any, tensors: list[torch.Tensor]) -> Estimate:
        """Positions of all elements, which is the most that selecting among them gives."""
        count = _COUNTS.get(func._opname)
        if count is not None and _is_strided(tensors[0]):
            return Estimate(self._round_up(8 * count(tensors[0])), 0)
        most = _OUTPUTS.get(func._opname, 1) * sum(
            tensor.numel() * max(8, tensor.element_size()) * max(1, tensor.dim()) for tensor in tensors
        )
        strided = [each for each in tensors if _is_strided(each)]
        return Estimate(0, self._round_up(most) + self._find_workspace(func, strided, []))

    def _find_workspace(self, func: Any, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> int:
        views = [_view(tensor, place) for place, tensor in enumerate((*given, *made))]
        reads, writes = tuple(views[: len(given)]), tuple(views[len(given) :])
        op = Op(tick=0, name=str(func), reads=reads, writes=writes, flops=0, barrier="")
        expanded_bytes = _count_expanded(given) if find_kind(func).is_convolution else 0
        return self._round_up(estimate_workspace(op) + expanded_bytes)

    def _round_up(self, nbytes: int) -> int:
        return -(-nbytes // self._block_bytes) * self._block_bytes


def _describe(values: Iterable[Any], key: list[Any], is_rough: bool, is_here: Callable[[torch.Tensor], bool]) -> None:
    """Append what tells these arguments from others of the same op. What comes first tells what it describes.

    Raises:
        TypeError, RuntimeError: one cannot be remembered.
    """
    for value in values:
        made_as = type(value)
        if made_as in _SCALARS:  # first, since to ask whether it is a tensor takes longer
            key += (made_as, None if is_rough and made_as is float else value)  # 1, 1.0 and True are equal
        elif made_as in PLAIN_TENSORS or isinstance(value, torch.Tensor):
            if value.layout is not _STRIDED:
                raise TypeError  # its shape does not tell how large it is; of a nested one there is none
            if not is_here(value):
                key.append(value.device)
            key += (value.shape, value.dtype)
        elif made_as is list or isinstance(value, (list, tuple)):
            key.append(len(value))
            _describe(value, key, is_rough, is_here)
        elif isinstance(value, (int, float, complex)):  # of a class of its own
            key += (made_as, value)
        else:
            # Of a storage or a generator, only what it is: what is remembered must not keep it.
            key.append(value if isinstance(value, _REMEMBERED) else made_as)


def _count_expanded(values: Iterable[Any]) -> int:
    """Bytes of those tensors, were they written out, whose elements stand for several each."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return sum(tensor.nbytes for tensor in tensors if 0 in tensor.stride() and tensor.numel() > 1)


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _view(tensor: torch.Tensor, storage: int) -> View:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return View(storage=storage, version=0, dtype=dtype, shape=tuple(map(int, tensor.shape)))

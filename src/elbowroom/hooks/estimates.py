"""What an op is about to allocate, before it runs, and how long it took before.

An op is tried on fake tensors the first time its kind is seen with such arguments; after that it is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeAlias

import torch

from elbowroom.hooks import sightings
from elbowroom.hooks.identity import PLAIN_TENSORS, make_test
from elbowroom.hooks.kinds import Kind, find_kind
from elbowroom.hooks.settings import Settings, read_settings
from elbowroom.hooks.stopwatch import Pace, Stopwatch, make_stopwatch
from elbowroom.hooks.trials import Trials

MOST_KEPT = 1 << 16
"""Kinds of op that are remembered; beyond, all are forgotten and found again."""

UNSEEN_BYTES = 1 << 14
"""Counted in every step for what it allocates without an op that a dispatch mode sees: states of random generators, the
scalars of a loop. It was some hundred bytes at most in all that was measured."""

_BY_SHAPES = ("convolution", "mm", "norm", "attention", "rnn")
"""In the names of ops that take what the shapes and the layouts of their arguments tell, whatever the values."""

_REMEMBERED = (str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_SCALARS = frozenset((bool, int, float, complex))
_STRIDED = torch.strided
_SIZES = frozenset((bool, int))
_get_default_dtype = torch.get_default_dtype


Exact: TypeAlias = tuple[tuple[Any, ...], Settings]
"""What an estimate rests on, and the settings."""


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
    """Remembers what ops take on one kind of device.

    Args:
        told_by: has the classes `Sighting` and `Order`.
    """

    def __init__(self, device_type: str, told_by: ModuleType = sightings) -> None:
        self._told_by = told_by
        self._is_here, self._trials = make_test(device_type), Trials(device_type)
        self._forget()
        self._measured: dict[Exact, int] = {}
        self._stopwatches: dict[torch.device, Stopwatch] = {}

    def _forget(self) -> None:
        self._known: dict[Any, sightings.Sighting[Estimate]] = {}
        self._order: sightings.Order[Estimate] = self._told_by.Order()

    def find(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Estimate:
        """What an op with these arguments takes. Cost: one or two microseconds; the first time, some hundred."""
        return self.find_of(find_kind(func), args, kwargs)

    def find_of(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Estimate:
        """The same, where the kind of op is known."""
        if kind.makes_nothing:
            return Estimate(0, 0)
        values = (*args, *kwargs.values()) if kwargs else args
        expected = self._order.expect(kind, values, kwargs)
        if expected is not None:
            return expected
        try:
            key = [kind.identity, _get_default_dtype(), *kwargs]
            _describe(values, key, kind, self._is_here)
            if kind.is_convolution:
                key.append(torch._C._get_mkldnn_enabled())
            known = tuple(key)
            found = self._known.get(known)
        except (TypeError, RuntimeError):
            return Estimate(*self._trials.run(kind, args, kwargs))  # it has an argument that cannot be remembered
        if found is None:
            estimate = Estimate(*self._trials.run(kind, args, kwargs))
            if kind.count_results is not None:
                return estimate  # values tell, which may be others the next time
            if len(self._known) >= MOST_KEPT:
                self._forget()
            found = self._known[known] = self._told_by.Sighting(kind, values, kwargs, estimate)
        elif found.is_certain and not found.is_again(values, kwargs):  # of another class, or with a gradient
            found = self._known[known] = self._told_by.Sighting(kind, values, kwargs, found.item)
        self._order.follow(found)
        return found.item

    def tell_apart(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exact | None:
        """What an op with these arguments has in common with those alone that take the same; None if that is not to be
        told."""
        key = [kind.identity, _get_default_dtype(), *kwargs]
        try:
            _describe((*args, *kwargs.values()), key, kind, self._is_here)
            known = tuple(key)
            hash(known)
        except (TypeError, RuntimeError):
            return None
        return known, read_settings()

    def learn(self, exact: Exact | None, estimate: Estimate, nbytes: int) -> None:
        """An op was seen to take so much: all that are estimated alike may."""
        inner_bytes = max(0, nbytes - estimate.result_bytes)
        if inner_bytes > estimate.inner_bytes:
            estimate.inner_bytes, estimate.nbytes = inner_bytes, estimate.result_bytes + inner_bytes
        if exact is not None:
            if len(self._measured) >= MOST_KEPT:
                self._measured.clear()
            self._measured[exact] = max(inner_bytes, self._measured.get(exact, 0))

    def find_measured(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Bytes that the same op took inside itself when it was measured; None if it never was, or if what it takes
        rests on values."""
        if not any(part in kind.func._opname for part in _BY_SHAPES):
            return None
        exact = self.tell_apart(kind, args, kwargs)
        return None if exact is None else self._measured.get(exact)

    def find_stopwatch(self, device: torch.device) -> Stopwatch:
        """What the ops on a device are timed with."""
        if device not in self._stopwatches:
            self._stopwatches[device] = make_stopwatch(device)
        return self._stopwatches[device]


def _describe(values: Iterable[Any], key: list[Any], kind: Kind, is_here: Callable[[torch.Tensor], bool]) -> None:
    """Append what tells these arguments from others of the same op. What comes first tells what it describes.

    Raises:
        TypeError, RuntimeError: one cannot be remembered. Of a nested tensor there is no shape, for one.
    """
    for value in values:
        made_as = type(value)
        if made_as in _SCALARS:  # first, since to ask whether it is a tensor takes longer
            key += (made_as, None if made_as is float and kind.may_write else value)  # 1, 1.0 and True are equal
        elif made_as in PLAIN_TENSORS or isinstance(value, torch.Tensor):
            strides = value.stride()
            # Of sparse and opaque ones the shape does not tell how large they are.
            if (0 in strides or made_as not in PLAIN_TENSORS) and value.layout is not _STRIDED:
                raise TypeError
            if not is_here(value):
                key.append(value.device)
            key += (value.shape, strides, value.dtype)
        elif made_as is list or isinstance(value, (list, tuple)):
            if value and type(value[0]) in _SIZES and not kind.mixes_scalars:
                key.append(tuple(value))
                continue
            key.append(len(value))
            _describe(value, key, kind, is_here)
        elif isinstance(value, (int, float, complex)):  # of a class of its own
            key += (made_as, value)
        else:
            # Of a storage or a generator, only what it is: what is remembered must not keep it.
            key.append(value if isinstance(value, _REMEMBERED) else made_as)

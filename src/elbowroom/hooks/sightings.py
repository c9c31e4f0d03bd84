"""Recognises an op that comes again with arguments as before, by what came before it.

To describe what an op is given takes longer than anything else that is done for it. Ops come in orders that recur, so
what followed the last one before is tried first; whether tensors are alike, PyTorch tells in one call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, TypeVar

import torch

from elbowroom.hooks.identity import PLAIN_TENSORS
from elbowroom.hooks.kinds import Kind

try:
    from torch._C._dynamo import guards

    TensorGuards: Any = guards.TensorGuards
except (AttributeError, ImportError):  # it is not documented; without it, nothing is certain, and every op is described
    TensorGuards = None

Item = TypeVar("Item")

MOST_AFTER = 8
"""Ops that are tried after another one."""

_LISTS = frozenset(form.format(f"List[{each}]") for each in ("int", "bool", "float") for form in ("{}", "Optional[{}]"))
_ONE_TYPE = _LISTS.union(
    form.format(each) for each in ("int", "bool", "float", "str", "Device") for form in ("{}", "Optional[{}]")
)
"""In schemas, of arguments that come as one type, or not at all; dtypes and layouts are integers there."""

_NUMBERS = frozenset((bool, int, float))
_COMPARED = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

_get_default_dtype = torch.get_default_dtype


class Sighting(Generic[Item]):
    """An op as it was given once, and what is known of it.

    Args:
        values: its arguments, those with names last.
        names: of those.

    Attributes:
        kind: of op.
        item: what is known.
        is_certain: whether it can be told that it is given the like again.
        after: what was seen to come next, as far as it is certain.
    """

    __slots__ = (
        *("_are_alike", "_count", "_default_dtype", "_expected", "_has_mkldnn", "_is_mixed", "_names", "_others"),
        *("_pick", "_types", "after", "is_certain", "item", "kind"),
    )

    def __init__(self, kind: Kind, values: tuple[Any, ...], names: Collection[str], item: Item) -> None:
        self.kind, self.item = kind, item
        self.after: list[Sighting[Item]] = []
        self._count, self._names, self._default_dtype = len(values), tuple(names), _get_default_dtype()
        self._has_mkldnn = torch._C._get_mkldnn_enabled() if kind.is_convolution else None
        tensors = [place for place, value in enumerate(values) if type(value) in PLAIN_TENSORS]
        others = [place for place, value in enumerate(values) if type(value) not in PLAIN_TENSORS]
        types = {each.name: str(each.type) for each in kind.func._schema.arguments}
        schema = [*list(types.values())[: len(values) - len(names)], *(types[name] for name in names)]
        # A new learning rate changes nothing of what an op in place allocates.
        compared = [place for place in others if not (kind.may_write and type(values[place]) is float)]
        self._pick, self._others, self._is_mixed = _make_getter(tensors), _make_getter(compared), bool(others)
        self._are_alike = _make_test(self._pick(values))
        self.is_certain = self._are_alike is not None and all(
            _may_compare(values[place], schema[place]) for place in others
        )
        if not self.is_certain:
            return  # before anything is kept that may be a tensor
        self._expected = tuple(list(each) if type(each) is list else each for each in self._others(values))
        # 1, 1.0 and True are equal, and to compare tensors would be an op: types first, where there may be several.
        loose = [place for place in others if place not in compared or schema[place] not in _ONE_TYPE]
        self._types = [(place, type(values[place])) for place in loose]

    def is_again(self, values: tuple[Any, ...], names: Collection[str]) -> bool:
        """Whether an op of the same kind is given the like; asked of what is certain.

        Alike are tensors of the same class, dtype, device, layout, shape and strides, which both want a gradient or
        both do not.
        """
        if len(values) != self._count or _get_default_dtype() is not self._default_dtype:
            return False
        if (names or self._names) and tuple(names) != self._names:
            return False
        if self._has_mkldnn is not None and torch._C._get_mkldnn_enabled() is not self._has_mkldnn:
            return False
        if self._is_mixed:
            for place, made_as in self._types:
                if type(values[place]) is not made_as:
                    return False
            if self._others(values) != self._expected:
                return False
            values = self._pick(values)
        assert self._are_alike is not None
        return self._are_alike(*values)


class Order(Generic[Item]):
    """What came after what."""

    def __init__(self) -> None:
        self._last: Sighting[Item] | None = None  # none that could be told apart

    def expect(self, kind: Kind, values: tuple[Any, ...], names: Collection[str]) -> Item | None:
        """What is known of an op, if it came like this after the last one before. Cost: half a microsecond."""
        if self._last is not None:
            for sighting in self._last.after:
                if sighting.kind is kind and sighting.is_again(values, names):
                    self._last = sighting
                    return sighting.item
        return None

    def follow(self, sighting: Sighting[Item]) -> None:
        """This came next, unexpected."""
        last, self._last = self._last, sighting
        if last is not None and sighting.is_certain:
            if len(last.after) >= MOST_AFTER:
                del last.after[0]
            last.after.append(sighting)


def _make_getter(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    if len(places) > 1:
        return operator.itemgetter(*places)
    begin = places[0] if places else 0
    return operator.itemgetter(slice(begin, begin + len(places)))  # of one place alone it would not be a tuple


def _make_test(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Of whether others are like these tensors; None if that cannot be told, as where one is given twice."""
    if TensorGuards is None or not tensors:
        return None
    try:
        test: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return test if test(*tensors) else None
    except (TypeError, RuntimeError):
        return None


def _may_compare(value: Any, schema: str) -> bool:
    """Whether it is told by its type and by what it equals."""
    if type(value) is list:
        return schema in _LISTS and bool(value) and _NUMBERS.issuperset(map(type, value))
    return isinstance(value, _COMPARED)

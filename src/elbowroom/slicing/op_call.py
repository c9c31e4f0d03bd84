"""OpCall: an op and its arguments by name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from elbowroom.ops.replayable import find_statistics, find_written, iterate_tensors


@dataclasses.dataclass(frozen=True, slots=True)
class OpCall:
    """An op and its arguments.

    Attributes:
        values: arguments by name, including defaults.
        reads: tensor arguments in order, as in `Op.reads`: without running statistics that the op does not read.
        names: for each of `reads`, the name of the argument that it is, or is part of.
        statistics: names of running statistics that the op updates without reading them.
        misalignments: bytes by which the memory of each of `reads` is not aligned; () if all of it is. Kernels choose
            the order of their sums by it.
    """

    op: OpOverload
    values: Mapping[str, Any]
    reads: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    statistics: tuple[str, ...]
    misalignments: tuple[int, ...] = ()

    def __getitem__(self, name: str) -> Any:
        """Return an argument."""
        return self.values[name]

    def find_indices(self, name: str) -> tuple[int, ...]:
        """Return the indices in `reads` of an argument: none if it is None, several if it is a list."""
        return tuple(index for index, each in enumerate(self.names) if each == name)

    def find_mask(self) -> tuple[int, ...]:
        """Return the positions, among the results in the op's schema, of those that this call computes."""
        if "output_mask" in self.values:
            return tuple(index for index, is_wanted in enumerate(self.values["output_mask"]) if is_wanted)
        return tuple(range(len(self.op._schema.returns) or len(find_targets(self))))

    def replace_reads(self, reads: Sequence[torch.Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with other tensors in place of `reads` and with other `values`."""
        found = dict(self.values)
        for name in dict.fromkeys(self.names):
            tensors = [reads[index] for index in self.find_indices(name)]
            found[name] = _replace_tensors(self.values[name], iter(tensors))
        found.update(values)
        return found

    def order(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments, given all by name."""
        schema = self.op._schema.arguments
        positional = tuple(values[each.name] for each in schema if not each.kwarg_only)
        return positional, {each.name: values[each.name] for each in schema if each.kwarg_only}

    def assemble(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the call's results in the form of its schema: None where its output mask leaves one out."""
        returns = self.op._schema.returns
        if not returns:
            return None
        if len(returns) == 1:
            return [tensors[0]] if str(returns[0].type) == "List[Tensor]" else tensors[0]
        found = dict(zip(self.find_mask(), tensors, strict=True))
        return tuple(found.get(position) for position in range(len(returns)))

    def run(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Call the op with arguments by name. A single result is returned as a tuple of one.

        The results of an op that returns nothing are the arguments that it writes to.
        """
        positional, named = self.order(values)
        result = self.op(*positional, **named)
        if result is None:
            written = dict.fromkeys(self.names[index] for index in find_targets(self))
            return tuple(tensor for name in written for tensor in iterate_tensors(values[name]))
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _replace_tensors(value: Any, tensors: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, (list, tuple)):
        return [_replace_tensors(each, tensors) for each in value]
    return value


def bind(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpCall:
    """Return an op's arguments by name."""
    schema = op._schema.arguments
    skipped = find_statistics(op, tuple(args))
    given = [(schema[index].name, value) for index, value in enumerate(args)] + list(kwargs.items())
    pairs = [
        (name, tensor)
        for position, (name, value) in enumerate(given)
        if position not in skipped
        for tensor in iterate_tensors(value)
    ]
    return OpCall(
        op=op,
        values={**_find_defaults(op), **dict(given)},
        reads=tuple(tensor for _, tensor in pairs),
        names=tuple(name for name, _ in pairs),
        statistics=tuple(
            name for position in skipped for name, value in [given[position]] if isinstance(value, torch.Tensor)
        ),
    )


@functools.cache
def _find_defaults(op: OpOverload) -> dict[str, Any]:
    return {each.name: each.default_value for each in op._schema.arguments}


def find_targets(call: OpCall) -> tuple[int, ...]:
    """Return the indices in `reads` of the arguments that an in-place op writes to, and returns if it returns any.

    They are its results, in this order. () for other ops.
    """
    returns = call.op._schema.returns
    if returns and not any(each.alias_info for each in returns):
        return ()
    names = [name for _, name in find_written(call.op)]
    if call.values.get("grad_scale") is None and "grads" in names:
        names.remove("grads")  # a fused optimizer only unscales them
    found = tuple(index for name in names for index in call.find_indices(name))
    return found[:1] if returns else found


def is_over_lists(op: OpOverload) -> bool:
    """Tell whether an op takes lists of tensors, and computes each item by itself."""
    return op._opname.startswith(("_foreach_", "_fused_ada", "_fused_sgd"))


def count_writes(call: OpCall) -> None:
    """Raise the versions of what an op over lists has written to. For other ops, autograd does so, not the kernel."""
    if not call.op._opname.startswith("_foreach_"):
        return
    for index in find_targets(call):
        if not call.reads[index].is_inference():
            torch.autograd.graph.increment_version(call.reads[index])

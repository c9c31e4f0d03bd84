"""RecordedOps: the ops of a step that is traced, with the ways to slice them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from elbowroom.ir.slicing import OpSlicing
from elbowroom.ir.trace import Op
from elbowroom.ops.replayable import find_statistics, iterate_tensors
from elbowroom.slicing.op_call import is_over_lists
from elbowroom.slicing.registry import find_passes

MIN_SLICED_BYTES = 1 << 20
"""The ways to slice an op are recorded if its tensors have this many bytes together."""


class RecordedOps:
    """Ops in order, and the ways to slice some of them."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.slicing: list[OpSlicing] = []

    def add(self, op: Op, slicing: OpSlicing | None) -> None:
        """Add an op with the ways to slice it, which are dropped unless all of its tensors are traced."""
        self.ops.append(op)
        if slicing is None:
            return
        missing = len(op.writes) - len(slicing.write_strides)  # running statistics are no results
        if len(op.reads) == len(slicing.read_strides) and missing >= 0:
            strides = (*slicing.write_strides, *([()] * missing))
            self.slicing.append(dataclasses.replace(slicing, tick=op.tick, write_strides=strides))


def find_slicing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> OpSlicing | None:
    """Return the ways to slice an op, without its tick; None if it is small or has none.

    Plans cut no ops over lists: these run in slices only without a plan.
    """
    if is_over_lists(func):
        return None
    skipped = find_statistics(func, args)
    values = tuple(each for position, each in enumerate((*args, *kwargs.values())) if position not in skipped)
    reads, results = list(iterate_tensors(values)), list(iterate_tensors(result))
    if sum(each.numel() * each.element_size() for each in (*reads, *results)) < MIN_SLICED_BYTES:
        return None
    alternatives = find_passes(func, args, kwargs, with_partial=True)
    if not alternatives:
        return None
    return OpSlicing(-1, alternatives, _list_strides(reads), _list_strides(results))


def _list_strides(tensors: Iterable[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, each.stride())) for each in tensors)

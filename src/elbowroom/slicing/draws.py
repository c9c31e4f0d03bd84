"""Draws of random arguments with which a probe runs an op."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.random_data import Ties, Values, fill_reads
from elbowroom.slicing.registry import list_rules
from elbowroom.slicing.rules import normalization, softmax
from elbowroom.slicing.vector_ends import ELEMENTWISE, fill_telling, find_telling

SMALL = 1 << 16
"""Elements up to which an op is probed with several draws, since few sums could agree by chance."""

ENOUGH = 64
"""Elements of each result that are compared, over all draws: another order changes every tenth sum, or more."""

MOST = 32
"""Draws of ordinary values at most."""

ROWS = 1 << 20
"""Elements that are compared, over all draws, of ops in `PER_ROW`; larger ops have fewer draws of `SUMS`."""

MANY = 1 << 12
"""Elements of each result that are compared in sums of 16 bits: another order changes one in a hundred of `Ties`."""

FEW = 100
"""The same for ops whose arguments have more than `ROWS` elements: their probes take long."""

ROUNDED = 8
"""Draws of each of `SUMS` at most, unless they are fewer than `FEW` sums."""

MOST_ELEMENTS = 1 << 29
"""Elements of all draws of an op with so few results that it has more than `ROUNDED` draws of `SUMS`."""

PER_ROW = frozenset((*softmax.RULES, *normalization.RULES))
"""Ops all of whose results in a row follow from one sum, so that there are fewer sums to compare than elements."""

SUMS = {torch.bfloat16: (2, 6, 24, 96), torch.float16: (6, 18, 72, 288)}
"""Largest integers of `Ties`, by dtype: for one of them, sums are of the right size, of few terms or many."""


def may_tell(call: OpCall, results: Sequence[torch.Tensor]) -> bool:
    """Tell whether enough sums of 16 bits are compared: not if large ops give a few numbers, as draws would take long.

    Args:
        results: as for `draw_arguments`.
    """
    sums = [each for each in _list_values(call, results) if isinstance(each, Ties)]
    elements = sum(each.numel() for each in call.reads)
    return len(sums) <= ROUNDED * len(SUMS[torch.bfloat16]) or len(sums) * elements <= MOST_ELEMENTS


def draw_arguments(call: OpCall, results: Sequence[torch.Tensor], device: torch.device) -> Iterator[list[torch.Tensor]]:
    """Yield tensors in place of a call's `reads`, on a device.

    Args:
        results: those that are compared, described by tensors on the device "meta".
    """
    generator = torch.Generator(device).manual_seed(0)
    rule = list_rules()[str(call.op)]
    for values in _list_values(call, results):
        yield fill_reads(call, rule, values, generator, device)
    telling = find_telling(call) if device.type == "cpu" else None
    if telling is not None:
        yield fill_telling(call, telling, device)


def _list_values(call: OpCall, results: Sequence[torch.Tensor]) -> list[Values | Ties]:
    if str(call.op) in ELEMENTWISE:
        return [Values.NORMAL, Values.EXTREME]
    fewest = min((each.numel() for each in results if each.numel()), default=ENOUGH)
    is_small = sum(each.numel() for each in call.reads) <= SMALL
    count = min(MOST, max(4 if is_small else 1, math.ceil(ENOUGH / fewest)))
    if str(call.op) in PER_ROW:
        count = max(count, min(2 * MOST, ROWS // max(1, sum(each.numel() for each in call.reads))))
    found: list[Values | Ties] = [*[Values.NORMAL] * count, Values.EXTREME]
    wanted = MANY if sum(each.numel() for each in call.reads) <= ROWS else FEW
    repeats = max(min(ROUNDED, math.ceil(wanted / fewest)), math.ceil(FEW / fewest))
    for dtype in {each.dtype: None for each in call.reads}:
        found += repeats * [*map(Ties, SUMS.get(dtype, ()))]
    return found

"""Chooses the ops of a step that run in slices, so that the step fits a budget.

An op is cut if its entry in the lowest forecast of the step, with everything away that may be, exceeds the budget. Its
slices are made smaller until it fits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Sequence

from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.section_grid import count_view_bytes
from elbowroom.ir.sliced_trace import SlicedTrace, slice_trace
from elbowroom.ir.slicing import OpCut, OpSlicing, SlicePass, count_parts, count_whole_bytes
from elbowroom.ir.trace import Op, Trace

FIRST_SLICES = (8, 4, 2)
"""Tensors of one slice take at most this share of the budget at first, so that others can be on their way. If that
makes too many slices, larger ones are tried."""

MOST_PARTS = 32
"""Most slices of one loop."""

MOST_ENTRIES = 40_000
"""Longest sliced trace."""

ENOUGH_ENTRIES = 10_000
"""Longest sliced trace with more slices than the budget needs."""

SHARES = (0.8, 0.6)
"""Parts of the budget within which the lowest step should fit, so that sections can move ahead and behind."""

STEP = 0.75
"""Ratio of one budget to the next in the search for the smallest, at first."""

SPACING = 0.05
"""Distance of budgets at which that search ends, as a share of them."""


class Slices(enum.StrEnum):
    """Ops that may run in slices if a step does not fit otherwise."""

    NONE = "none"
    """Ops run as a whole."""
    EXACT = "exact"
    """Slices must be expected to give the bits of the whole op."""
    ANY = "any"
    """Slices may also add the parts of a sum in another order, as gradient accumulation does."""


@dataclasses.dataclass(frozen=True, slots=True)
class SlicedStep:
    """A step some of whose ops run in slices.

    Attributes:
        cuts: by tick.
        budget_bytes: budget that the step fits with everything away that may be.
        floor: forecast of the sliced step with the lowest peak.
    """

    cuts: tuple[OpCut, ...]
    budget_bytes: int
    sliced: SlicedTrace
    costs: Costs
    floor: Forecast


FindFloor = Callable[[Trace, Costs], Forecast]
"""Forecasts the step with everything away that may be."""


class _TooLong(Exception):
    pass


class CutChooser:
    """Chooses cuts of one trace.

    Args:
        floor: forecast of the whole ops with the lowest peak.
        least_bytes: no step with slices has room for less.
    """

    def __init__(
        self, trace: Trace, costs: Costs, find_floor: FindFloor, floor: Forecast, slices: Slices, least_bytes: int
    ) -> None:
        self._trace = trace
        self._costs = costs
        self._find_floor = find_floor
        self._whole = floor
        self._least_bytes = least_bytes
        self._slicing = {} if slices is Slices.NONE else {each.tick: each for each in trace.slicing}
        self._slices = slices
        self._ops = {op.tick: op for op in trace.ops}

    def choose(self, budget_bytes: int) -> SlicedStep | None:
        """Return a step that fits the budget with everything away that may be; None if there is none.

        It is one that leaves room to move sections ahead and behind, if it has not too many of them.
        """
        best = self._choose(budget_bytes)
        for share in SHARES if best is not None else ():
            step = self._choose(int(share * budget_bytes))
            if step is None or step.sliced.trace.end > ENOUGH_ENTRIES:
                break
            best = step
        return best

    def _choose(self, budget_bytes: int) -> SlicedStep | None:
        """Return a step of which nothing exceeds the budget if everything is away that may be; None if there is none.

        Cost: a few forecasts.
        """
        for share in FIRST_SLICES if budget_bytes >= self._least_bytes else ():
            with contextlib.suppress(_TooLong):
                return self._refine(budget_bytes, budget_bytes // share)
        return None

    def _refine(self, budget_bytes: int, first_bytes: int) -> SlicedStep | None:
        """Return a step whose slices take `first_bytes` at most, and less where that is too much for the budget.

        Raises:
            _TooLong: it has too many entries.
        """
        slice_bytes: dict[int, int] = {}  # by tick
        over = self._find_over(self._whole, budget_bytes, None)
        step = None
        while over:
            finer = False
            for tick in over:
                former = slice_bytes.get(tick)
                if tick in self._slicing and (former is None or former > 1):
                    slice_bytes[tick] = max(1, first_bytes) if former is None else max(1, former // 2)
                    finer = True
            if not finer:
                return None
            cuts = self._make_cuts(slice_bytes, budget_bytes)
            if step is not None and cuts == step.cuts:
                return None
            sliced = slice_trace(self._trace, cuts)
            if sliced.trace.end > MOST_ENTRIES:
                raise _TooLong
            costs = sliced.slice_costs(self._costs)
            step = SlicedStep(cuts, budget_bytes, sliced, costs, self._find_floor(sliced.trace, costs))
            over = self._find_over(step.floor, budget_bytes, sliced)
        return step

    def find_lowest(self) -> SlicedStep | None:
        """Return the step of the lowest peak, within a few percent; None if slices do not lower it."""
        best = None
        most = self._whole.peak_bytes
        least = self._least_bytes - 1  # too small a budget
        while (1 - SPACING) * most > least:
            budget_bytes = max(int(most * STEP), (least + most) // 2)
            found = self._choose(budget_bytes)
            if found is None:
                least = budget_bytes
            else:
                best = found
                most = min(budget_bytes, found.floor.peak_bytes)
        if best is None:
            return None
        return self._choose(best.floor.peak_bytes) or best

    def _find_over(self, floor: Forecast, budget_bytes: int, sliced: SlicedTrace | None) -> list[int]:
        """Return the ticks of the original ops during which, or right before or after which, the budget is exceeded."""
        if floor.peak_bytes <= budget_bytes:
            return []
        trace = self._trace if sliced is None else sliced.trace
        sources = range(len(trace.ops)) if sliced is None else sliced.sources
        live = floor.live_bytes
        found, begin = dict[int, None](), 0
        for op, source in zip(trace.ops, sources, strict=True):
            if max(live[begin : op.tick + 1], default=0) > budget_bytes:
                found[self._trace.ops[source].tick] = None
            begin = op.tick + 1
        return list(found)

    def _make_cuts(self, slice_bytes: dict[int, int], budget_bytes: int) -> tuple[OpCut, ...]:
        found = []
        for tick, nbytes in sorted(slice_bytes.items()):
            op, slicing = self._ops[tick], self._slicing[tick]
            passes = choose_passes(op, slicing, budget_bytes, self._slices)
            if passes is not None:
                parts = tuple(_round_parts(each, op, nbytes) for each in passes)
                found.append(OpCut(tick, passes, parts))
        return tuple(found)


def choose_passes(op: Op, slicing: OpSlicing, budget_bytes: int, slices: Slices) -> tuple[SlicePass, ...] | None:
    """Return the alternative whose slices read the least as a whole; of equals the first. None if none is allowed.

    If sums may be added in another order, the alternatives that do so come first: they read each tensor once.
    """
    sizes = _list_sizes(op)
    allowed = [each for each in slicing.alternatives if count_whole_bytes(each, *sizes) <= budget_bytes]
    summing = [passes for passes in allowed if any(each.sums for each in passes)]
    exact = [passes for passes in allowed if passes not in summing]
    chosen = summing if summing and slices is Slices.ANY else exact
    return min(chosen, key=lambda each: count_whole_bytes(each, *sizes), default=None)


def _list_sizes(op: Op) -> tuple[Sequence[int], Sequence[int]]:
    return [count_view_bytes(view) for view in op.reads], [count_view_bytes(view) for view in op.writes]


def _round_parts(slice_pass: SlicePass, op: Op, slice_bytes: int) -> tuple[int, ...]:
    """Return numbers of slices that are powers of two, so that the sections of one op are those of the next."""
    counts = count_parts(slice_pass, *_list_sizes(op), slice_bytes)
    return tuple(min(1 << (count - 1).bit_length(), MOST_PARTS) for count in counts)

"""Holds a running step against the trace that its plan was made for: the calls of the hooks are the program counter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from elbowroom.ir.placement import Berth, Placement
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import LASTING, Trace
from elbowroom.runtime.residence import Residence


class Observer(Protocol):
    """Told what autograd does, while a step is being captured."""

    def saved(self, tensor: torch.Tensor) -> int: ...
    def needed(self, save: int, given: torch.Tensor) -> None: ...
    def save_released(self, save: int) -> None: ...


class Known(NamedTuple):
    """A step that is known, and what is to be done about it.

    Attributes:
        trace, plan: as they are.
        placement: where its copies are to lie.
        workspace_bytes: that each of its ops takes inside itself.
        live_bytes: that are there during each entry, all of it included.
    """

    trace: Trace
    plan: Plan
    placement: Placement
    workspace_bytes: Sequence[int]
    live_bytes: Sequence[int]


SLACK_OPS = 64
"""A save may come so much later than in the trace: programs measure something now and then."""

NEVER = 1 << 60
"""More ops than any step has."""


class Follower:
    """Gives saves and needs the ticks they have in a trace, for as long as the step is one that is known.

    Several may be known that begin alike. A step that leaves the trace it followed goes on with another one that it has
    been the same as so far. Saves of equal sizes may still come from other ops: where their number is not the trace's,
    and is that of another one, it is the other one.

    Args:
        known: what the step may be, the likeliest first; where there is nothing, ticks only count.
        min_bytes: of smaller storages it does not matter whether they are plain.
        bound: the residences of this step by the trace's ids, which grow as saves are recognised.
        on_change: told why, whenever the step leaves the trace that it followed.
        count_ops: how many ops there have been.
        set_due: told after how many ops the next save should have come at the latest; `NEVER` where a need comes first,
            or nothing does.

    Attributes:
        followed: which of the traces the step has been the same as so far; None if it is none of them.
        trace: that one.
        first_due: after so many ops the first save should have come at the latest.
    """

    def __init__(
        self,
        known: Sequence[Known],
        min_bytes: int,
        bound: dict[int, Residence],
        on_change: Callable[[str], None],
        count_ops: Callable[[], int] = lambda: 0,
        set_due: Callable[[int], None] = lambda ops: None,
    ) -> None:
        self._known, self._min_bytes, self._bound, self._on_change = known, min_bytes, bound, on_change
        self._count_ops, self._set_due, self._may_doubt = count_ops, set_due, len(known) > 1
        self.followed: int | None = None
        self.trace: Trace | None = None
        self._take(0 if known else None)
        self._saves = self._needs = self.tick = 0
        self._extra_ops = 0  # that the trace does not have, up to the last save or need
        self.first_due = self._find_due()

    def _take(self, followed: int | None) -> None:
        self.followed, self.trace = followed, None if followed is None else self._known[followed].trace

    def find_berth(self, storage: int) -> Berth | None:
        """Where the copy of a storage that leaves now was planned to lie; None if nobody planned one."""
        return None if self.followed is None else self._known[self.followed].placement.find(storage, self.tick)

    def stop(self, why: str) -> None:
        """The step is none that is known."""
        if self.followed is not None:
            self._take(None)
            self._set_due(NEVER)
            self._on_change(why)

    def leave(self, why: str) -> None:
        """The step is not the one that it was taken for."""
        self._go_on(why, lambda trace: "")  # of all that begin alike, saves and needs will tell

    def follow_save(self, index: int, residence: Residence | None) -> int:
        """The tick of a save. Where the trace has it, its residence is bound to the storage there, unless it lasts."""
        trace = self.trace
        if trace is not None:
            if why := self._compare_save(trace, index, residence):
                trace = self._go_on(why, lambda other: self._compare_save(other, index, residence))
            elif self._may_doubt:
                tick = self._count_ops() + index + self._needs
                trace = self._doubt(trace, index, tick, lambda other: self._compare_save(other, index, residence))
        self._saves = index + 1
        if trace is None:
            return index
        save = trace.saves[index]
        if residence is not None and residence.id < 0 and not self.is_lasting(index):
            residence.id = save.storage
            self._bound[residence.id] = residence
        return self._reach(save.tick)

    def is_lasting(self, save: int) -> bool:
        """Whether a save is, by the trace that the step follows, of what outlives the step: nothing moves that."""
        trace = self.trace
        return trace is not None and trace.storages[trace.saves[save].storage].role in LASTING

    def follow_need(self, index: int, save: int) -> int:
        """The tick of a need, the step's `index`th, which asks for a `save`."""
        trace = self.trace
        if trace is not None and (why := _compare_need(trace, index, save)):
            trace = self._go_on(why, lambda other: _compare_need(other, index, save))
        self._needs = index + 1
        return index if trace is None else self._reach(trace.needs[index].tick)

    def _reach(self, tick: int) -> int:
        """The step has come to the save or need that the trace has at `tick`."""
        self.tick = tick
        self._extra_ops = self._count_ops() - (tick + 1 - self._saves - self._needs)
        self._set_due(self._find_due())
        return tick

    def _find_due(self) -> int:
        trace = self.trace
        if trace is None or self._saves >= len(trace.saves):
            return NEVER
        tick = trace.saves[self._saves].tick
        if self._needs < len(trace.needs) and trace.needs[self._needs].tick < tick:
            return NEVER
        return tick - self._saves - self._needs + SLACK_OPS

    def _go_on(self, why: str, compare: Callable[[Trace], str]) -> Trace | None:
        """Follow another trace that all has been the same as so far, and that `compare` finds nothing wrong with."""
        if self.followed is not None:
            self._take(self._find_other(compare))
            self._set_due(self._find_due())
            self._on_change(why)
        return self.trace

    def _doubt(self, trace: Trace, index: int, tick: int, compare: Callable[[Trace], str]) -> Trace | None:
        if trace.saves[index].tick == tick:
            return trace
        other = self._find_other(
            lambda other: compare(other) or ("" if other.saves[index].tick == tick else "it has other ops")
        )
        if other is None:
            self._may_doubt = False  # an op more or less, which no trace tells of
            return trace
        self._take(other)
        self._on_change(f"save {index} comes at tick {tick}, where the trace has it at {trace.saves[index].tick}")
        return self.trace

    def _find_other(self, compare: Callable[[Trace], str]) -> int | None:
        present = self.trace
        if present is None:
            return None
        for position, (trace, *_) in enumerate(self._known):
            if trace is not present and self._begins_alike(present, trace) and not compare(trace):
                return position
        return None

    def _begins_alike(self, one: Trace, other: Trace) -> bool:
        """Whether two traces say the same of what the step has done so far."""
        return self._tell_beginning(one) == self._tell_beginning(other)

    def _tell_beginning(self, trace: Trace) -> tuple[object, ...]:
        saves = [(save.tick, save.storage, trace.storages[save.storage].nbytes) for save in trace.saves[: self._saves]]
        return saves, [(need.tick, need.save) for need in trace.needs[: self._needs]]

    def _compare_save(self, trace: Trace, index: int, residence: Residence | None) -> str:
        if index >= len(trace.saves):
            return f"it saves more than {index} tensors"
        home = trace.storages[trace.saves[index].storage]
        if residence is None:  # nothing rests on smaller ones: attention's seed lies on the host on CUDA
            return (
                f"save {index} is no plain tensor, where the trace has {home.nbytes} bytes"
                if home.nbytes >= self._min_bytes
                else ""
            )
        if residence.nbytes != home.nbytes:
            return f"save {index} has {residence.nbytes} bytes, where the trace has {home.nbytes}"
        bound = self._bound.get(home.id)
        if bound is not residence and (bound is not None or residence.id not in (-1, home.id)):
            return f"save {index} is of another storage than in the trace"
        return ""


def _compare_need(trace: Trace, index: int, save: int) -> str:
    if index >= len(trace.needs):
        return "it asks for saved tensors again"
    expected = trace.needs[index].save
    return "" if expected == save else f"need {index} is of save {save}, where the trace has save {expected}"

"""Makes the moves of model state that a plan has, at the ops that it names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from elbowroom.hooks.storage_ids import get_gradient, get_plain_storage
from elbowroom.ir.plan import Plan
from elbowroom.ir.state import MoveKind, StateMove, list_away, list_moves
from elbowroom.ir.trace import Role, Trace
from elbowroom.ir.unused_state import list_unused_state
from elbowroom.runtime.state_pager import StatePager
from elbowroom.runtime.state_tensors import NamedTensor, StateTensors


@dataclasses.dataclass(frozen=True)
class StateSchedule:
    """Moves of one plan, by the op at which they are made.

    Attributes:
        trace, plan: as given.
    """

    trace: Trace
    plan: Plan

    @functools.cached_property
    def moves(self) -> Mapping[tuple[int, bool], Sequence[StateMove]]:
        """Moves by position of the op in `Trace.ops`, and whether they are made before it."""
        positions = {op.tick: position for position, op in enumerate(self.trace.ops)}
        found: dict[tuple[int, bool], list[StateMove]] = {}
        for move in list_moves(self.trace, self.plan):
            if move.kind is not MoveKind.WAIT:  # the op itself waits for what it uses
                found.setdefault((positions[move.tick], move.kind.is_before), []).append(move)
        return found

    @functools.cached_property
    def away_at_begin(self) -> Sequence[int]:
        """Storages that are away when the step begins."""
        spans = list_away(self.trace, self.plan)
        return [storage for storage, away in spans.items() if any(begin <= 0 < end for begin, end in away)]

    @functools.cached_property
    def unused(self) -> Sequence[int]:
        """Storages that are away during the whole step."""
        return [each.id for each in list_unused_state(self.trace)]

    def count_unused(self, kept: Sequence[torch.Tensor], name_residents: Callable[[], Iterable[NamedTensor]]) -> int:
        """Return the bytes of `unused`. Arguments: as for `StateTensors.find`."""
        found = self.tensors.find(kept, name_residents)
        storages = (_find_storage(self.trace, each, found) for each in self.unused)
        return sum(each.nbytes() for each in storages if each is not None)

    @functools.cached_property
    def there_at_begin(self) -> Sequence[int]:
        """Storages that are in memory when they are first used, or on their way back; the first used first.

        Without those that leave before: the last step copied them, and the plan has no room for them if they return.
        """
        trace, away = self.trace, list_away(self.trace, self.plan)
        first = {each: trace.state_uses[each][0].tick for each in trace.state if trace.storages[each].created < 0}
        leaving = {each for each, spans in away.items() if any(begin <= first.get(each, 0) for begin, _ in spans)}
        return sorted(first.keys() - leaving, key=lambda each: (first[each], each))

    def list_positions(self, *, is_before: bool) -> set[int]:
        """Return the positions of the ops with moves before them, or after them."""
        return {position for position, before in self.moves if before is is_before}

    @functools.cached_property
    def tensors(self) -> StateTensors:
        """Finds the tensors of the job whose storages move."""
        return StateTensors(self.trace)


class StateMoves:
    """Makes the moves of a schedule in one step.

    Args:
        pager: moves the storages.
        tensors: by storage; for a gradient, that of its parameter.
    """

    def __init__(self, schedule: StateSchedule, pager: StatePager, tensors: Mapping[int, torch.Tensor]) -> None:
        self._schedule = schedule
        self._pager = pager
        self._storages = pager.storages
        self._tensors = tensors

    def begin(self) -> None:
        """Have away what the plan has away when a step begins, and all other state in memory or on its way."""
        schedule = self._schedule
        for storage in (*schedule.unused, *schedule.away_at_begin):
            if (found := self._find(storage)) is not None:
                self._storages.release(found)
        for storage in schedule.there_at_begin:
            if (found := self._find(storage)) is not None:
                self._pager.begin_reload(found)
        self._pager.follows_plan = True

    @property
    def is_followed(self) -> bool:
        """True while the ops of the step are those of the trace."""
        return self._pager.follows_plan

    def leave(self) -> None:
        """Move what the plan does not say from now on."""
        self._pager.follows_plan = False

    def make(self, position: int, *, is_before: bool) -> None:
        """Make the moves before or after an op. `position`: of the op in `Trace.ops`."""
        for move in self._schedule.moves[position, is_before]:
            storage = self._find(move.storage)
            if storage is None:
                continue
            if move.kind is MoveKind.RELOAD:
                self._pager.begin_reload(storage)
            elif move.kind is MoveKind.COPY:
                self._storages.begin_copy(storage)
            else:
                self._storages.release(storage)

    def _find(self, storage: int) -> torch.UntypedStorage | None:
        return _find_storage(self._schedule.trace, storage, self._tensors)


def _find_storage(trace: Trace, storage: int, tensors: Mapping[int, torch.Tensor]) -> torch.UntypedStorage | None:
    """Return a storage of a trace as it is in this step; None if it is unknown, or not there."""
    tensor = tensors.get(storage)
    if tensor is not None and trace.storages[storage].role is Role.GRADIENT:
        tensor = get_gradient(tensor)
    return None if tensor is None else get_plain_storage(tensor)


def is_followed(moves: StateMoves | None) -> bool:
    """Tell whether the plan's moves of state are still made, or there are none.

    Once the optimizer's ops are not those of the trace, the plan is followed in all but these.
    """
    return moves is None or moves.is_followed

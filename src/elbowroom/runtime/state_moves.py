"""Makes the moves of model state that a plan has, at the ops that it names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

import torch

from elbowroom.hooks.storage_ids import get_plain_storage
from elbowroom.ir.plan import Plan
from elbowroom.ir.state import MoveKind, StateMove, list_away, list_moves
from elbowroom.ir.trace import Role, Trace
from elbowroom.runtime.state_pager import StatePager

NamedTensor = tuple[torch.Tensor, Role, str, str | None]
"""A tensor of the state, its role, its label, and the path of the module that owns it."""


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
    def there_at_begin(self) -> Sequence[int]:
        """Storages that are in memory when the step begins, or on their way back; the first used first."""
        trace, away = self.trace, set(self.away_at_begin)
        there = [each for each in trace.state if trace.storages[each].created < 0 and each not in away]
        return sorted(there, key=lambda each: trace.state_uses[each][0].tick)

    def list_positions(self, *, is_before: bool) -> set[int]:
        """Return the positions of the ops with moves before them, or after them."""
        return {position for position, before in self.moves if before is is_before}


class StateMoves:
    """Makes the moves of a schedule in one step.

    Args:
        pager: moves the storages.
        residents: parameters, gradients, buffers and optimizer state, as they are when the step begins.
    """

    def __init__(self, schedule: StateSchedule, pager: StatePager, residents: Iterable[NamedTensor]) -> None:
        self._schedule = schedule
        self._pager = pager
        self._storages = pager.storages
        self._tensors = _match(schedule.trace, residents)

    def begin(self) -> None:
        """Have away what the plan has away when a step begins, and all other state in memory or on its way."""
        away = self._schedule.away_at_begin
        for storage in away:
            if (found := self._find(storage)) is not None:
                self._storages.release(found)
        for storage in self._schedule.there_at_begin:
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
        """Return a storage of the trace as it is in this step; None if it is unknown, or not there."""
        tensor = self._tensors.get(storage)
        if tensor is not None and self._schedule.trace.storages[storage].role is Role.GRADIENT:
            tensor = tensor.grad
        return None if tensor is None else get_plain_storage(tensor)


def _match(trace: Trace, residents: Iterable[NamedTensor]) -> dict[int, torch.Tensor]:
    """Return the tensor of each storage of a trace's state; for a gradient, that of its parameter.

    Tensors with the same role and label are in the order in which the trace lists them.
    """
    tensors: dict[tuple[Role, str, int], list[torch.Tensor]] = {}
    seen = set[int]()
    for tensor, role, label, _ in residents:
        home = get_plain_storage(tensor)
        if home is None or home._cdata in seen:
            continue
        seen.add(home._cdata)
        tensors.setdefault((role, label, home.nbytes()), []).append(tensor)
        if role is Role.PARAMETER:
            tensors.setdefault((Role.GRADIENT, f"gradient of {label}", home.nbytes()), []).append(tensor)
    found: dict[int, torch.Tensor] = {}
    taken: dict[tuple[Role, str, int], int] = {}
    for storage in sorted(trace.state):
        traced = trace.storages[storage]
        key = (traced.role, traced.label, traced.nbytes)
        named = tensors.get(key, ())
        index = 0 if traced.role is Role.GRADIENT else taken.get(key, 0)
        if index < len(named):
            found[storage] = named[index]
            taken[key] = index + 1
    return found


def is_followed(moves: StateMoves | None) -> bool:
    """Tell whether the plan's moves of state are still made, or there are none.

    Once the optimizer's ops are not those of the trace, the plan is followed in all but these.
    """
    return moves is None or moves.is_followed

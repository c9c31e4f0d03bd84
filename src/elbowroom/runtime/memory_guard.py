"""Keeps a step within its bytes: has storages leave until there is room, and refuses the step if none may."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from elbowroom.ir.actions import Action
from elbowroom.ir.events import PressureRaised
from elbowroom.residency.machine import Machine
from elbowroom.runtime.account import Account
from elbowroom.runtime.facts import StepFacts
from elbowroom.runtime.shortage import explain_shortage


class Step(Protocol):
    """A step that is running.

    Attributes:
        refusal: why a storage could not leave the device, if one could not.
    """

    refusal: str

    @property
    def saves(self) -> int: ...

    @property
    def needs(self) -> int: ...

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Carry out what the machine answers."""
        ...


class MemoryGuard:
    """Makes room in one step.

    Args:
        account: of what is there; has the limit.
        machine: says what leaves.
        facts: of the step; name what has no room below.
        list_residents: what is there before the step and after it.
        device: the one whose memory is kept.
        step: carries out what the machine answers.
    """

    def __init__(
        self,
        account: Account,
        machine: Machine,
        facts: StepFacts,
        list_residents: Callable[[], list[torch.Tensor]],
        device: torch.device,
        step: Step,
    ) -> None:
        self._account, self._machine, self._facts = account, machine, facts
        self._list_residents, self._device, self._step = list_residents, device, weakref.ref(step)

    def count_residents(self) -> None:
        """Count what is there before the step. At waking again: there may be others by then."""
        self._account.mark_staying(self._list_residents(), self._device)

    def _list_here(self) -> Iterable[torch.UntypedStorage]:
        there = (each for each in self._list_residents() if each.layout is torch.strided)
        return (each.untyped_storage() for each in there if each.device.type == self._device.type)

    def make_room(self, nbytes: int, what: str) -> None:
        """Have storages leave until the account has room for `nbytes`.

        Args:
            what: takes them, for the message.

        Raises:
            Infeasible: everything that may leave has left, and there is not enough.
        """
        while (missing := self._account.live_bytes + nbytes - self._account.limit_bytes) > 0:
            self.evict(missing, nbytes, self._account.limit_bytes, what)

    def evict(self, missing_bytes: int, nbytes: int, limit_bytes: int, what: str) -> None:
        """Have something leave, since of `nbytes` so many are missing within a limit.

        Raises:
            Infeasible: nothing may leave.
        """
        step = self._step()
        assert step is not None  # it asks
        actions = self._machine.feed(PressureRaised(missing_bytes, step.saves + step.needs))
        if not actions:
            here, round_up, stuck = self._list_here(), self._account.round, self._facts.stuck
            raise explain_shortage(what, nbytes, missing_bytes, limit_bytes, here, round_up, stuck, step.refusal)
        step.carry_out(actions)

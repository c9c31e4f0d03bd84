"""A plan, for as long as the step is the plan's, and an online policy for all that no plan foresaw.

Asleep: the plan alone decides. Awake: room is watched, the online policy is told of everything, answers pressure, and
decides alone where there is no plan. A step wakes once, and stays awake.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from elbowroom.ir.actions import Offload, Release
from elbowroom.ir.events import Event, PressureRaised
from elbowroom.ir.plan import Plan
from elbowroom.residency import plan_policy
from elbowroom.residency.context import replay_seconds
from elbowroom.residency.machine import Drop, Intent
from elbowroom.residency.online import Online


class Policy:
    """Follows plans, one after the other.

    Args:
        online: decides without a plan.
        plan: followed first.
        is_awake: whether room is watched from the beginning.
    """

    def __init__(self, online: Online, plan: Plan | None, *, is_awake: bool) -> None:
        self._online, self._is_awake = online, is_awake
        self._moves = None if plan is None else plan_policy.Policy(plan)

    def follow(self, plan: Plan | None, tick: int) -> None:
        """From `tick` on the step is this plan's, or nobody's."""
        self._moves = None if plan is None else plan_policy.Policy(plan, since=tick)

    def wake(self, gone: Iterable[Release | Drop]) -> None:
        """Room is watched from now on, and the online policy knows what has been. `gone`: what is not on the device."""
        self._is_awake = True
        for intent in gone:
            self._online.learn(intent)

    @property
    def due_tick(self) -> int:
        """Before this, it does not matter whether it is told of what autograd saves and needs, and is not to move."""
        if self._is_awake:
            return -1
        return plan_policy.NEVER if self._moves is None else self._moves.due_tick

    def decide(self, event: Event) -> Iterable[Intent]:
        """What to do once `event` has been served."""
        if not self._is_awake:
            return () if self._moves is None else self._moves.decide(event)
        if self._moves is None or isinstance(event, PressureRaised):
            return self._online.decide(event)
        self._online.watch(event)
        intents = [each for intent in self._moves.decide(event) for each in self._translate(intent)]
        for intent in intents:
            self._online.learn(intent)
        return intents

    def _translate(self, intent: Intent) -> tuple[Intent, ...]:
        """How the plan would compute a storage is how another step did: this one has ways of its own, or none."""
        if not isinstance(intent, Drop):
            return (intent,)
        context, storage = self._online.context, intent.storage
        if not context.may_move(storage):
            return ()  # nor is it one that this step has, perhaps
        if replay_seconds(context, storage) < math.inf:
            return (Drop(storage, context.add_segment(storage)),)
        return (Offload(storage), Release(storage))

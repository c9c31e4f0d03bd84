"""Follows a plan, with an online policy for everything that the plan did not foresee.

The online policy observes all events and moves, and alone decides on evictions under pressure.
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
    """Follows a plan, and calls an online policy under pressure.

    Args:
        online: observes all events and moves.
        plan: the plan to follow.
        since: the plan is followed from this tick on.
    """

    def __init__(self, online: Online, plan: Plan, *, since: int = -1) -> None:
        self._online = online
        self._moves = plan_policy.Policy(plan_policy.list_moves(plan, since=since))

    def decide(self, event: Event) -> Iterable[Intent]:
        """Return the intents to carry out after `event`."""
        if isinstance(event, PressureRaised):
            return self._online.decide(event)
        self._online.watch(event)
        intents = [each for intent in self._moves.decide(event) for each in self._translate(intent)]
        for intent in intents:
            self._online.learn(intent)
        return intents

    def _translate(self, intent: Intent) -> tuple[Intent, ...]:
        """Return the intents for a move of the plan. Drops use segments of this step, whose ops may differ."""
        if not isinstance(intent, Drop):
            return (intent,)
        context = self._online.context
        storage = intent.storage
        if not context.may_move(storage):
            return ()  # this step may not have the storage
        if replay_seconds(context, storage) < math.inf:
            return (Drop(storage, context.add_segment(storage)),)
        return (Offload(storage), Release(storage))

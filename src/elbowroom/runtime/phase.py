"""Phases of a step.

FOLLOWING_PLAN --- ends as planned --> DRAINING --.
      | drift, or no room                          |
      v                                            v
   MANAGED ------.                               CLOSED
      ^          |--- ends --> SETTLING ----------^
      | no room  |
 UNPRESSURED ----|
   CAPTURING ----'
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Phase of a step.

    Attributes:
        follows_plan: whether only the plan moves storages, so that no memory is freed on demand.
        has_ended: whether the program has left the step.
        has_budget: whether the budget is enforced.
    """

    CAPTURING = 0, False, False, True  # every storage leaves as soon as it is saved, as far as the tier below has room
    FOLLOWING_PLAN = 1, True, False, True  # saves and needs of storages that stay or are only copied are only logged
    UNPRESSURED = 2, False, False, True  # no plan and no shortage: all saves and needs are only logged
    MANAGED = 3, False, False, True  # storages leave when memory is short; all events are reported to the machine
    SETTLING = 4, False, True, True  # dropped storages are recomputed while their inputs exist, within the budget
    DRAINING = 5, True, True, False  # a backward pass through the rest of the graph still follows the plan
    CLOSED = 6, False, True, False  # storages of the rest of the graph come back when they are needed

    def __init__(self, number: int, follows_plan: bool, has_ended: bool, has_budget: bool) -> None:
        self.number = number
        self.follows_plan = follows_plan
        self.has_ended = has_ended
        self.has_budget = has_budget


NEXT_PHASES: dict[Phase, tuple[Phase, ...]] = {
    Phase.CAPTURING: (Phase.SETTLING,),
    Phase.FOLLOWING_PLAN: (Phase.MANAGED, Phase.DRAINING),
    Phase.UNPRESSURED: (Phase.MANAGED, Phase.SETTLING),
    Phase.MANAGED: (Phase.SETTLING,),
    Phase.SETTLING: (Phase.CLOSED,),
    Phase.DRAINING: (Phase.CLOSED,),
    Phase.CLOSED: (),
}
"""Phases that may follow each phase."""

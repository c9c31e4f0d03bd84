"""When a solver stops, and what it then says: how far its solution may be from the best.

A limit in nodes of the search tree ends the same search at the same place on every machine; one in seconds does not, so
it is only there for the worst. Either way the best solution so far is taken, and what that may cost is logged under the
strategy's name: as a warning where a limit came first, else as information.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from elbowroom.errors import UsageError

_log = logging.getLogger(__name__)

LAST_RESORT_SECONDS = 120.0
"""Far more than the nodes take that strategies ask for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SolverLimits:
    """When a solver stops.

    Attributes:
        gap: where its solution is within this share of the bound.
        nodes: after so many of the search tree.
        seconds: after so long.

    Raises:
        UsageError: there are no nodes, or no seconds.
    """

    gap: float
    nodes: int
    seconds: float

    def __post_init__(self) -> None:
        if self.nodes < 1 or not self.seconds > 0:
            raise UsageError(
                f"a solver needs nodes >= 1 and seconds > 0, not nodes={self.nodes} seconds={self.seconds}"
            )

    def options(self, seconds: float) -> dict[str, Any]:
        """As `scipy.optimize.milp` wants them, with so many seconds left."""
        return {"mip_rel_gap": self.gap, "node_limit": self.nodes, "time_limit": max(seconds, 0.0)}

    def say(self, strategy: str, gap: float, of_what: str) -> None:
        """Log how far from the best the solution taken may be; `gap` is infinite where no bound is known."""
        distance = f"within {gap:.2%} of the best" if gap < float("inf") else "no bound is known"
        is_done = gap <= self.gap * (1 + 1e-6)
        ending = "" if is_done else f"; it stopped at its limit of {self.nodes} nodes or {self.seconds:g} s"
        _log.log(logging.INFO if is_done else logging.WARNING, "%s: %s: %s%s", strategy, of_what, distance, ending)

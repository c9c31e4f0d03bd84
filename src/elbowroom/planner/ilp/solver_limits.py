"""Limits for a solver, and the log message that states how far its solution may be from the optimum.

A limit in nodes of the search tree stops the same search at the same point on every machine. A limit in seconds does
not, so it is only a last resort. In both cases the best solution so far is used, and its gap is logged under the
strategy's name: as a warning if a limit was reached, as information otherwise.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from elbowroom.errors import UsageError

_log = logging.getLogger(__name__)

LAST_RESORT_SECONDS = 120.0
"""Much longer than solvers take for the node limits that strategies use."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SolverLimits:
    """Conditions on which a solver stops.

    Attributes:
        gap: relative gap between the solution and the bound.
        nodes: nodes of the search tree.
        seconds: elapsed time.

    Raises:
        UsageError: `nodes` or `seconds` is not positive.
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
        """Return the options of `scipy.optimize.milp`, with this many seconds left."""
        return {"mip_rel_gap": self.gap, "node_limit": self.nodes, "time_limit": max(seconds, 0.0)}

    def log_gap(self, strategy: str, gap: float, subject: str) -> None:
        """Log how far the solution may be from the optimum; `gap` is infinite if no bound is known."""
        distance = f"within {gap:.2%} of the best" if gap < float("inf") else "no bound is known"
        is_done = gap <= self.gap * (1 + 1e-6)
        ending = "" if is_done else f"; it stopped at its limit of {self.nodes} nodes or {self.seconds:g} s"
        _log.log(logging.INFO if is_done else logging.WARNING, "%s: %s: %s%s", strategy, subject, distance, ending)

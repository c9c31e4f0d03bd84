"""Faults of the planner, which must not end the user's training."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from elbowroom.errors import Infeasible, TraceError

logger = logging.getLogger(__name__)


def explain_fault(error: TraceError) -> str:
    """Return why steps run without a plan after a fault of the planner."""
    return (
        f"steps like this one run without a plan, in slices if need be. The planner failed; please report this: {error}"
    )


def explain_fault_again(error: TraceError) -> str:
    """Return why steps keep their plan after a fault in planning them again."""
    return f"steps like this one keep their plan. The planner failed; please report this: {error}"


@contextlib.contextmanager
def keeping_plan() -> Iterator[None]:
    """Return a context in which a step is planned again. If no plan fits, or the planner fails, it keeps its own."""
    try:
        yield
    except Infeasible:
        pass
    except TraceError as error:
        logger.warning("%s", explain_fault_again(error))

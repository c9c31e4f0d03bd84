"""Schedule of captures: when the next step is captured, or captured if it is of an unknown kind."""

from __future__ import annotations

import logging

from elbowroom.errors import Infeasible
from elbowroom.ir.plan import Plan

logger = logging.getLogger(__name__)

MOST_STEPS_BETWEEN_CAPTURES = 61
"""Limit on the steps without a plan between two captures. A prime, so that captures meet each of several kinds of step
that take turns."""

FIRST_PATIENCE = 2
"""Steps in a row whose optimizer runs other ops than the trace has, after which the step is captured again. The number
doubles each time that this is in vain."""

MOST_STEPS_AWAITED = 256
"""Limit on the steps that are traced in expectation of one of a kind that has recurred."""

MOST_EXPECTED = 6
"""Limit on the futile captures in a row after which no kind of step is expected at the pace of its last ones."""

MOST_WITHOUT_NEEDS = 4
"""Limit on the evaluations in a row that are captured in expectation of a training step."""

UNKNOWN = "it is not known what these steps do"
IN_SLICES = "The captured step ran in slices, so a budget below this number may do."

NO_PLAN = "no plan fits the budget, so ops run in slices if need be"


def explain_no_plan(error: Infeasible) -> str:
    """Return why steps run without a plan that can run in slices."""
    return f"steps like this one run without a plan, in slices if need be. No plan fits: {error}"


class CaptureSchedule:
    """Decides which steps are captured. All steps are counted from 0.

    Attributes:
        reason: why steps run without a plan, as far as that is known.
        captures: captured steps since the last one that was planned.
        capture_seconds: that the last captured step took.
        awaited_bytes: first saves of the kinds of step that are worth a plan.
    """

    def __init__(self) -> None:
        self.reason = UNKNOWN
        self.captures = 0
        self.capture_seconds = 0.0
        self.awaited_bytes: set[int] = set()
        self._futile = 0
        self._next = 0
        self._lacked_needs = False  # the last futile capture
        self._some_have_needs = False
        self._without_needs = 0  # captures since the last step that had some
        self._has_recurred = False
        self._recurred_at = 0
        self._awaited = 0  # steps left
        self._plan: Plan | None = None  # of the last step that has followed one
        self._partly = 0  # steps in a row that have followed it, but for its moves of model state
        self._whole = 0  # steps in a row that have followed all of it
        self._patience = FIRST_PATIENCE

    def is_due(self, step: int, *, knows_some: bool) -> bool:
        """Return True if a step is captured, of whatever kind it is.

        Args:
            knows_some: whether some kind of step has a plan.
        """
        return (self._has_recurred or not knows_some) and step >= self._next

    def awaits_unknown(self, step: int) -> bool:
        """Return True if a step that begins now is captured if its first save tells that it is of an awaited kind."""
        if not self._awaited or step < self._next:
            return False
        self._awaited -= 1
        if not self._awaited:  # they do not come any more
            self._has_recurred = False
            self.awaited_bytes.clear()
        return True

    def note_recurrence(self, step: int, first_bytes: int | None) -> None:
        """Note that a kind of step without a plan has recurred, and is worth one.

        If the next capture met another kind, it is expected again after as many steps as passed since the last time:
        kinds that take turns would otherwise be missed for ever by captures at distances of powers of two.

        Args:
            step: of that kind.
            first_bytes: of its first save, which tells; None if steps of known kinds begin alike. What differs later on
                is captured only from its beginning.
        """
        if self._has_recurred and 0 < self._futile <= MOST_EXPECTED:
            self._next = step + step - self._recurred_at
        self._has_recurred, self._recurred_at = True, step
        self._awaited = 0 if first_bytes is None else MOST_STEPS_AWAITED
        if first_bytes is not None:
            self.awaited_bytes.add(first_bytes)

    def note_success(self) -> None:
        """Note that a captured step has got its plan."""
        self._futile = 0
        self._has_recurred = False
        self._awaited = 0
        self.awaited_bytes.clear()

    def note_followed(self, plan: Plan, *, is_whole: bool) -> None:
        """Note that a step has followed a plan.

        Args:
            plan: of the step. With another one the count of such steps begins anew.
            is_whole: whether its moves of model state were made to the end. They are not if the optimizer runs other
                ops than in the captured step, as with another budget, for which it updates other groups.
        """
        if plan is not self._plan:
            self._partly = self._whole = 0
        self._plan = plan
        if not is_whole and plan.state:
            self._partly += 1
            self._whole = 0
            return
        self._partly = 0
        self._whole += 1
        if self._whole >= self._patience:  # one alone may be the first micro-batch of several
            self._patience = FIRST_PATIENCE

    def is_due_again(self, plan: Plan) -> bool:
        """Return True, once, if steps follow a plan no more to the end, and the next one is captured instead."""
        if plan is not self._plan or self._partly < self._patience:
            return False
        self._partly = 0
        self._patience *= 2
        return True

    def begin_anew(self) -> None:
        """Forget that captures were futile: there is another budget, within which a plan may fit."""
        self._futile = self._next = 0
        self.reason = UNKNOWN

    def note_needs(self) -> None:
        """Note that a step without a plan ran a backward pass, and so is worth a capture."""
        self._some_have_needs = True
        self._without_needs = 0
        if self._lacked_needs:
            self._lacked_needs = False
            self._futile = self._next = 0
            self.reason = UNKNOWN

    def note_no_needs(self, step: int, why: str, *, knows_some: bool) -> None:
        """Note that a captured step ran no backward pass.

        While no kind of step has a plan, the next one is captured if some step ran one: this may be an evaluation. But
        after several in a row it may be a long one.

        Args:
            step: the captured one.
            why: explains that there is nothing to plan.
            knows_some: as for `is_due`.
        """
        self._without_needs += 1
        if not self._some_have_needs or knows_some or self._without_needs > MOST_WITHOUT_NEEDS:
            self._lacked_needs = True
            self.reason = why
            self.put_off(step, why)

    def put_off(self, step: int, why: str = "") -> None:
        """Postpone the next capture after a futile one, with exponential backoff. Warn if it is the first of several.

        Args:
            step: the captured one.
            why: it was futile; "" if that is usual.
        """
        self._next = step + min(2**self._futile, MOST_STEPS_BETWEEN_CAPTURES)
        self._futile += 1
        if self._futile == 1 and why:
            logger.warning("step %d: %s", step, why)

"""One kind of step in the plan cache."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter

from elbowroom.cost.prediction_check import PredictionCheck
from elbowroom.hooks.input_guard import Inputs
from elbowroom.ir.costs import Measurements
from elbowroom.ir.journal import StepRecord
from elbowroom.ir.timeline import Activity
from elbowroom.planned_step import PlannedStep


class Source(enum.Enum):
    """Source of an entry's op times, which tells whether the next step measures them."""

    ESTIMATED = enum.auto()
    """The roofline and earlier runs, or measurements beside a compiling process: measured in the first steps."""
    MEASURED = enum.auto()
    DOUBTED = enum.auto()
    """Measured, but steps take another time than predicted: measured again."""


class OpBytes(enum.Enum):
    """Origin of the bytes that an entry's ops take."""

    MEASURED = enum.auto()
    ESTIMATED = enum.auto()
    """Some ran in slices when the step was captured, and what they take as a whole is estimated."""
    DOUBTED = enum.auto()
    """They are estimated, and a step had too little room for its plan: they are measured in the next one."""
    UNKNOWN = enum.auto()
    """Some ran in slices then, too."""


@dataclasses.dataclass(slots=True)
class PlanCacheEntry:
    """One kind of step with its plan, and measurements of its steps.

    Attributes:
        planned: the step and its plan.
        source: of the costs.
        measured_steps: steps observed so far to measure the costs.
        recordings: measurements of these steps that are not in the costs yet.
        check: compares steps with their prediction.
        growth_bytes: most bytes that a plain step held beyond those that existed before it.
        busy_seconds: of the first steps that followed the current plan, stalls excluded.
        predicted_seconds: prediction for these, as it was when the step was planned, and corrected after them.
        calls: shapes that the model was called with, and the highest count of each in one step.
        ops_before_call: ops of a step before the model is first called; None if autograd saves something before, does
            not record that call, or this is unknown.
        activities: copies, waits and replays of the last step of this kind.
        is_seen: whether this room has run such a step; another room's may belong to another model.
        lost_seconds: that a better plan might have saved.
        measuring_seconds: that the last step measured op by op took longer than predicted.
        is_proven: whether a step has followed the current plan to its end, within the budget.
        op_bytes: of the costs.
        is_short: whether steps need more than any plan has room for, when ops run as a whole. They follow the current
            plan as far as there is room.
        excess_bytes: that steps needed beyond the forecast peak.
        is_agreed: whether all ranks of a distributed job follow the plan, which the times of one do not change.
    """

    planned: PlannedStep
    source: Source
    growth_bytes: int = 0
    measured_steps: int = 0
    recordings: list[Measurements] = dataclasses.field(default_factory=list)
    check: PredictionCheck = dataclasses.field(default_factory=PredictionCheck)
    busy_seconds: list[float] = dataclasses.field(default_factory=list)
    predicted_seconds: float = dataclasses.field(init=False)
    calls: Counter[Inputs] = dataclasses.field(default_factory=Counter)
    ops_before_call: int | None = None
    activities: tuple[Activity, ...] = ()
    is_seen: bool = True
    lost_seconds: float = 0.0
    measuring_seconds: float = 0.0
    is_proven: bool = False
    op_bytes: OpBytes = OpBytes.MEASURED
    is_short: bool = False
    excess_bytes: int = 0
    is_agreed: bool = False

    def __post_init__(self) -> None:
        self.predicted_seconds = self.planned.busy_seconds

    @property
    def is_peak_known(self) -> bool:
        """True if the bytes of all ops were measured, or a step has shown that the plan keeps the budget."""
        return self.is_proven or (self.source is not Source.ESTIMATED and self.op_bytes is OpBytes.MEASURED)

    def is_measuring(self, settling_steps: int) -> bool:
        """Return True if the next step should be measured op by op."""
        if self.op_bytes is OpBytes.DOUBTED:
            return True
        if self.source is Source.ESTIMATED:
            return self.measured_steps < settling_steps
        return self.source is Source.DOUBTED

    def adopt(self, planned: PlannedStep) -> None:
        """Replace the plan by one with measured costs."""
        self.source = Source.MEASURED
        self.replace(planned)

    def replace(self, planned: PlannedStep) -> None:
        """Replace the plan."""
        self.planned = planned
        self.predicted_seconds = planned.busy_seconds
        self.busy_seconds.clear()
        self.activities = ()
        self.is_proven = self.is_short = False

    def note_measured(self, record: StepRecord) -> None:
        """Note how much longer a step took because its ops were measured."""
        self.measuring_seconds = max(0.0, record.seconds - record.stall_seconds - self.predicted_seconds)

    def is_usual(self, inputs: Inputs, count: int) -> bool:
        """Return True if steps of this kind call the model this often with these shapes, or if no call was observed."""
        return not self.calls or count <= self.calls[inputs]

    def expect_growth(self) -> int:
        """Return the bytes that a step of this kind may hold beyond those that exist before it."""
        return max(self.growth_bytes, self.planned.activation_bytes)

"""State of one step, shared by the parts of the runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from elbowroom.errors import InternalError
from elbowroom.ir.plan import Segment
from elbowroom.residency.capacity_first import Policy as CapacityFirst
from elbowroom.residency.machine import Machine
from elbowroom.runtime.activity_log import ActivityLog
from elbowroom.runtime.candidate import Candidate
from elbowroom.runtime.phase import NEXT_PHASES, Phase
from elbowroom.runtime.saved_storage import SavedStorage
from elbowroom.runtime.step_environment import StepEnvironment
from elbowroom.runtime.step_storages import StepStorages, load_native


@dataclasses.dataclass(slots=True, kw_only=True)
class StepState:
    """State of one step.

    Attributes:
        phase: current phase; changed only by `enter`.
        candidates: planned steps that this one may match, the likeliest first.
        storages: storages of the tensors that autograd has saved.
        machine: tracks where each of these storages is, and returns the actions that move them.
        segments: segments that recompute dropped storages: those of the plan, then those of this step.
        watcher: the extension's watcher of the step's ops.
        saved_tensors: the extension's record of the step's saves and needs.
        stuck_bytes: sizes of the storages that the tier below refused, by id, until it has room again.
        refusal: reason for the first refusal by the tier below; "" if there was none.
        recomputed: number of segments replayed.
        left_for_room: whether the plan was left since something did not fit into the budget.
        missing_bytes: bytes that did not fit then; 0 if they were only guessed.
        drift: reason why the step matches no candidate; "" while it matches one.
        captured_bytes: if the step is unlike any candidate and its first save is one of these, it goes on as in
            CAPTURING, rather than under the online policy.
        is_unlike_any: whether the first save of the step has another size than those of all candidates.
        given_up: reason why storages could not be recomputed when the step ended; "" if all could.
        activity_log: of the step.
    """

    phase: Phase
    candidates: Sequence[Candidate]
    storages: StepStorages
    machine: Machine
    segments: list[Segment]
    watcher: Any
    saved_tensors: Any
    stuck_bytes: dict[int, int] = dataclasses.field(default_factory=dict)
    refusal: str = ""
    recomputed: int = 0
    left_for_room: bool = False
    missing_bytes: int = 0
    drift: str = ""
    captured_bytes: Collection[int] = ()
    is_unlike_any: bool = False
    given_up: str = ""
    activity_log: ActivityLog = dataclasses.field(default_factory=ActivityLog)

    @property
    def is_awaited(self) -> bool:
        """True if the step is unlike any candidate, and is captured."""
        return self.is_unlike_any and self.saved_tensors.sizes[0] in self.captured_bytes

    @property
    def events(self) -> int:
        """Number of saves and needs so far."""
        return int(self.saved_tensors.saves + self.saved_tensors.needs)

    @property
    def followed(self) -> int | None:
        """Index of the candidate that the step matches so far; None if it matches none."""
        return None if self.saved_tensors.followed < 0 else int(self.saved_tensors.followed)

    def has_no_room_below(self, saved: SavedStorage) -> bool:
        """Tell whether the tier below has refused a storage of this size and has no copy of this one."""
        return saved.copy is None and bool(self.stuck_bytes) and saved.nbytes >= min(self.stuck_bytes.values())

    def enter(self, phase: Phase) -> None:
        """Enter another phase.

        Raises:
            InternalError: it may not follow the current one.
        """
        if phase not in NEXT_PHASES[self.phase]:
            raise InternalError(f"a step in phase {self.phase.name} cannot enter phase {phase.name}")
        self.phase = phase


def make_state(phase: Phase, environment: StepEnvironment, candidates: Sequence[Candidate], host: object) -> StepState:
    """Return the state of a new step. `host`: object that the extension calls, held weakly."""
    native = load_native()
    storages = StepStorages(environment)
    segments = list(candidates[0].plan.segments) if phase is Phase.FOLLOWING_PLAN else []
    watcher = native.OpWatch(str(environment.device), storages.table, host)
    timetables = [each.timetable for each in candidates]
    return StepState(
        phase=phase,
        candidates=candidates,
        storages=storages,
        machine=Machine(CapacityFirst(storages.may_move), segments),
        segments=segments,
        watcher=watcher,
        saved_tensors=native.SavedTensors(watcher, str(environment.device), host, timetables, environment.min_bytes),
    )

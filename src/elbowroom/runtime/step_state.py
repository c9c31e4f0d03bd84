"""The state of one step, which its parts share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from elbowroom.errors import InternalError
from elbowroom.ir.plan import Segment
from elbowroom.residency.capacity_first import Policy as CapacityFirst
from elbowroom.residency.machine import Machine
from elbowroom.runtime.candidate import Candidate
from elbowroom.runtime.phase import NEXT_PHASES, Phase
from elbowroom.runtime.saved_storage import SavedStorage
from elbowroom.runtime.step_environment import StepEnvironment
from elbowroom.runtime.step_storages import StepStorages, load_native


@dataclasses.dataclass(slots=True, kw_only=True)
class StepState:
    """State of one step.

    Attributes:
        phase: changed by `enter` alone.
        candidates: planned steps that this one may be, the likeliest first.
        storages: that autograd has saved tensors of.
        machine: knows where each of these storages is, and says what moves.
        segments: how dropped storages are computed again. Those of the plan come first; those of the step follow.
        watcher: of the extension; watches the ops of the step.
        saved_tensors: of the extension; watches what autograd saves and needs in the step.
        stuck_bytes: sizes of the storages that the tier below had no room for, by id, until there is room again.
        refusal: why the first of the storages that had to stay did so; "" if none had to.
        recomputed: segments replayed.
        drift: why the step is none of the candidates; "" while it is one.
        given_up: why storages could not be computed when the step ended; "" if all could.
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
    drift: str = ""
    given_up: str = ""

    @property
    def events(self) -> int:
        """Saves and needs so far."""
        return int(self.saved_tensors.saves + self.saved_tensors.needs)

    @property
    def followed(self) -> int | None:
        """Index of the candidate that the step is so far; None if it is none of them."""
        return None if self.saved_tensors.followed < 0 else int(self.saved_tensors.followed)

    def has_no_room_below(self, saved: SavedStorage) -> bool:
        """Tell whether the tier below has refused a storage of this size. One that has a copy there needs no room."""
        return saved.copy is None and bool(self.stuck_bytes) and saved.nbytes >= min(self.stuck_bytes.values())

    def enter(self, phase: Phase) -> None:
        """Go on to another phase.

        Raises:
            InternalError: it may not come after the present one.
        """
        if phase not in NEXT_PHASES[self.phase]:
            raise InternalError(f"a step in phase {self.phase.name} cannot enter phase {phase.name}")
        self.phase = phase


def make_state(phase: Phase, environment: StepEnvironment, candidates: Sequence[Candidate], host: object) -> StepState:
    """Return the state of a step that begins. `host`: called by the extension; held weakly."""
    native = load_native()
    storages = StepStorages(environment)
    segments = list(candidates[0].plan.segments) if phase is Phase.FOLLOWING_PLAN else []
    watcher = native.OpWatch(environment.device.type, storages.table, host)
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

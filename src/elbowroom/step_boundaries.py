"""StepBoundaries: where the steps of a room begin and end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from elbowroom.errors import Infeasible, UsageError
from elbowroom.hooks.open_steps import OpenStep
from elbowroom.optimizer_steps import OptimizerSteps
from elbowroom.runtime.ending_step import StepAborted
from elbowroom.shared_lease import LeaseHolder, SharedLease
from elbowroom.step_modes import StepModes

LEASE = (
    "The budget is this job's lease of a shared device: it is larger while fewer jobs share the device, or where "
    "`elbowroom share` has more memory."
)


class StepBoundaries:
    """Begins and ends the steps of a room, one at a time.

    Args:
        modes: run the steps.
        shared: lease that may change between steps; None if the room has a budget of its own.
        holder: the room, whose lease it is; a proxy, which does not keep it alive.

    Attributes:
        shared: as given.
        has_begun: whether a step has ever begun.
    """

    def __init__(self, modes: StepModes, shared: SharedLease | None, holder: LeaseHolder) -> None:
        self._modes = modes
        self.shared = shared
        self._holder = holder
        self.has_begun = False
        self._step: OpenStep | None = None
        self._found: OptimizerSteps | None = None

    @property
    def is_inside(self) -> bool:
        """True while a step runs."""
        return self._step is not None

    @property
    def is_inside_own(self) -> bool:
        """True while a step runs that this thread has begun."""
        return self._step is not None and self._step.thread == threading.get_ident()

    @property
    def was_refused(self) -> bool:
        """True if the running or last step was refused memory."""
        return self._modes.was_refused

    def find(self, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Begin and end steps at the loop's calls of the model and the optimizers, until the program begins one."""
        self._found = OptimizerSteps(self, model, optimizers)

    def stop_finding(self) -> None:
        """End a step that was found, and find no more."""
        if (found := self._found) is not None:
            try:
                found.end(StepAborted() if found.has_failed else None)
            finally:
                found.close()
                self._found = None

    def abort_found(self) -> None:
        """Abort a running step that was found, as no `with` of the program ends it. One that begins goes on."""
        if self._found is not None and self.is_inside:
            self._found.end(StepAborted())

    def close(self) -> None:
        """Abort a running step of this thread, and find no more."""
        if self.is_inside_own:
            self.end_step(StepAborted())
        if (found := self._found) is not None:
            found.close()
            self._found = None  # last, so that an interrupted call can be repeated

    def begin_step(self) -> None:
        """Begin a step. Errors: as for `Room.begin_step`."""
        if self.is_inside_own and self._step is not None and self._step.is_ending:
            self.end_step(StepAborted())  # an interrupt came as it ended
        if self._step is not None:
            raise UsageError(
                "a step begins inside a step of the same room: one `with room.step():`, or one begin_step() with its "
                "end_step(), is one whole training step"
            )
        if self.shared is not None:
            self.shared.renew(self._holder)
        self.has_begun = True
        self._step = OpenStep(self._modes.step())
        try:
            self._step.context.__enter__()
        except BaseException:
            self._note_end()
            raise

    def end_step(self, error: BaseException | None = None) -> None:
        """End the step. Arguments and errors: as for `Room.end_step`."""
        step = self._step
        if step is None:
            raise UsageError("no step of this room has begun: call begin_step() first")
        if step.thread != threading.get_ident():
            raise UsageError("this step was begun in another thread, which has to end it")
        step.is_ending = True
        try:
            if error is None:
                step.context.__exit__(None, None, None)
            else:
                step.context.__exit__(type(error), error, error.__traceback__)
            if self.shared is not None and error is None:
                self.shared.note_step(self._holder)  # takes seconds for a new kind of step: the job is not idle yet
        finally:
            if self.shared is not None and isinstance(error, Infeasible):
                error.add(LEASE)
            self._note_end()

    def _note_end(self) -> None:
        """Note that no step runs any more, whether it succeeded or failed."""
        self._step = None
        if self.shared is not None:
            with contextlib.suppress(ReferenceError):  # the collector has found the room in a cycle: it is detached
                self.shared.begin_idle(self._holder)

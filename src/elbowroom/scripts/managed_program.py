"""Manages the training jobs of the program that runs in this process."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from elbowroom.api import open_room
from elbowroom.errors import UsageError
from elbowroom.hooks.attachment import is_marked
from elbowroom.hooks.sharded import find_wrapper
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.optimizer_steps import OptimizerSteps
from elbowroom.room import Room
from elbowroom.scripts.job_finder import FoundJob, JobFinder, list_other_models, list_other_tensors
from elbowroom.scripts.journal_file import JournalFile
from elbowroom.scripts.live_view import LiveView

logger = logging.getLogger(__name__)

MOST_ROOMS = 4
"""Number of jobs in one program after which a warning says that each begins anew."""


LAUNCHED = "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"
"""Variables of processes that torchrun, Slurm or MPI has started as one of several."""

SOME_STEPS = 2
"""Steps without an inner loop after which none is expected."""


class ManagedProgram:
    """Fits each training job of a program into a budget as soon as the program begins to train.

    Args:
        memory_budget, options: as for `elbowroom.fit`.
        journal_file: receives the journals.
        view: shows the steps.
        profile: of this machine; by default measured once.
    """

    def __init__(
        self,
        memory_budget: str,
        options: dict[str, Any],
        *,
        journal_file: JournalFile | None = None,
        view: LiveView | None = None,
        profile: HardwareProfile | None = None,
    ) -> None:
        self._memory_budget = memory_budget
        self._options = options
        self._journal_file = journal_file
        self._view = view
        self._profile = profile
        self._room: Room | None = None
        self._former: Room | None = None  # detached; what it counted is still part of the budget
        self._models: list[torch.nn.Module] = []
        self._whole_steps = 0  # of the latest job
        self._has_inner_loops = False
        self._steps: OptimizerSteps | None = None
        self._is_rank = any(name in os.environ for name in LAUNCHED)
        self._lock = threading.RLock()  # the program may train in several threads
        self._finder = JobFinder(self._start, self._stop_for_another, self._note_backward, self._note_failure)
        self.rooms = 0
        self.has_own_rooms = False

    @property
    def room(self) -> Room | None:
        """Room of the latest job."""
        return self._room

    def open(self) -> None:
        """Begin to watch the program."""
        self._finder.open()

    def close(self, error: BaseException | None = None) -> None:
        """Write the journal and let go of the program. `error`: the exception that ended it, if any."""
        self._finder.close()
        self._stop(error)
        if self._view is not None:
            self._view.close()

    def _start(self, job: FoundJob) -> None:
        with self._lock:
            self._start_alone(job)

    def _start_alone(self, job: FoundJob) -> None:
        if any(is_marked(each) for each in job.model.modules()):  # the program calls elbowroom.fit itself
            self.has_own_rooms = True
            return
        self._check_ranks()
        gc.collect()  # what is left of a former job, or of a model that was dropped, is not part of this one
        # Other ranks may have other modules beside the model.
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        model = find_wrapper(job.model)  # whose buckets count
        self._models = [model, *(list_other_models(job.model) if is_alone else ())]
        room = open_room(self._models, job.optimizers, self._memory_budget, profile=self._profile, **self._options)
        room.count_also(list_other_tensors(job.model), self._former)
        self._former = None
        self._profile = room.profile
        self._room = room
        self._whole_steps, self._has_inner_loops = 0, False
        self.rooms += 1
        if self._journal_file is not None:
            self._journal_file.begin_room()
        self._steps = OptimizerSteps(
            room, job.model, job.optimizers, after_step=self._note_step, others=self._models[1:]
        )
        if not job.optimizers:
            logger.warning(
                "the program updates the parameters without an optimizer of torch.optim, so its first step was not "
                "noticed, and may have exceeded the budget"
            )
        elif job.called is None:
            self._steps.begin_at_ends()
        if self.rooms == MOST_ROOMS:
            logger.warning(
                "this is the %dth time that the program makes an optimizer and trains with it; each time its steps are "
                "learned anew. If it makes one in every iteration, call elbowroom.fit in the program instead",
                MOST_ROOMS,
            )

    def _check_ranks(self) -> None:
        """Warn if the program may have started other ranks by itself."""
        distributed = torch.distributed
        if self._is_rank or not (distributed.is_available() and distributed.is_initialized()):
            return
        if (ranks := distributed.get_world_size()) > 1:
            logger.warning(
                "this is one of %d ranks. If the program has started the others by itself, as Lightning does, they "
                "train without a budget: start all with torchrun --nproc-per-node ... -m elbowroom.run, or use "
                "elbowroom.fit, or the callback for its framework, in the program", ranks,
            )  # fmt: skip

    def _stop_for_another(self, optimizer: Optimizer) -> bool:
        """End the present job, unless another optimizer is made inside one of its steps, which then belongs to it.

        It is that of an inner loop if it updates another model, as in MAML. But a program that catches an error may
        give up the step and train again: with a new optimizer for the model, or with a new model, after an error that
        was seen or after steps without an inner loop.
        """
        with self._lock:
            return self._stop_alone(optimizer)

    def _stop_alone(self, optimizer: Optimizer) -> bool:
        steps = self._steps
        is_inside = steps is not None and steps.is_running and not steps.begins_at_ends and not steps.has_failed
        has_loops = self._has_inner_loops or self._whole_steps < SOME_STEPS
        if is_inside and has_loops and not self._is_for_same_model(optimizer):
            self._has_inner_loops = True
            return False
        self._stop(None)
        if self._room is not None:
            self._former = self._room
            self._room = None
        self._models = []
        return True

    def _is_for_same_model(self, optimizer: Optimizer) -> bool:
        own = {id(each) for model in self._models for each in model.parameters()}
        return any(id(each) in own for group in optimizer.param_groups for each in group["params"])

    def _stop(self, error: BaseException | None) -> None:
        if self._steps is None or self._room is None:
            return
        steps, self._steps = self._steps, None
        room = self._room
        try:
            steps.finish(error)
        finally:
            room.detach()  # first, as a running step has replaced calls after us
            steps.close()
            self._write(lambda file: file.finish(room))

    def _note_backward(self) -> None:
        if self._steps is not None:
            self._steps.end_at_next_call()

    def _note_failure(self) -> None:
        if self._steps is not None:
            self._steps.note_failure()

    def _note_step(self) -> None:
        room = self._room
        if room is None:
            return  # another thread has begun another job
        self._whole_steps += 1
        if self._journal_file is not None and self._journal_file.is_due():
            journal = room.journal()
            self._write(lambda file: file.write(journal))
        if self._view is not None:
            self._view.update(room)

    def _write(self, write: Callable[[JournalFile], None]) -> None:
        if self._journal_file is None:
            return
        try:
            write(self._journal_file)
        except UsageError as error:
            logger.warning("the journal is not written: %s", error)

"""Integration with the Trainer of transformers, and with trainers built on it, such as TRL's."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from elbowroom.api import check_arguments, open_room
from elbowroom.errors import NO_ROOM
from elbowroom.integrations.learned_file import load_learned, read_learned, save_learned
from elbowroom.integrations.logged_metrics import list_metrics
from elbowroom.integrations.wrapped_optimizers import unwrap_optimizer
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.room import Room

OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""How Accelerate tells errors for which it tries a smaller batch from others (`should_reduce_batch_size`)."""


class ElbowroomCallback(TrainerCallback):
    """Runs the training steps of a Trainer within a memory budget.

        trainer = Trainer(..., callbacks=[ElbowroomCallback("20GiB")])

    A step is one update of the parameters, with all its micro-batches. Evaluation and checkpoints run between steps.
    What the room learns is saved in each checkpoint folder, and taken over by a run that resumes from one.

    Args:
        memory_budget: as for `elbowroom.fit`.
        other_models: modules that a step uses beside the model, such as the reference model of TRL's DPOTrainer. They
            may leave the device, too.
        logs_metrics: whether the Trainer's logs contain metrics of the room, with the prefix "elbowroom/".
        profile: as for `elbowroom.fit`.
        **options: as for `elbowroom.fit`.

    Attributes:
        room: of the present or the last training; None before.
    """

    def __init__(
        self,
        memory_budget: int | float | str,
        *,
        other_models: Sequence[torch.nn.Module] = (),
        logs_metrics: bool = True,
        profile: HardwareProfile | None = None,
        **options: Any,
    ) -> None:
        check_arguments(memory_budget, profile=profile, **options)
        self._memory_budget = memory_budget
        self._other_models = tuple(other_models)
        self._logs_metrics = logs_metrics
        self._profile = profile
        self._options = options
        self._is_running = False
        self.room: Room | None = None
        watch_training_loops()

    def report_first(self, trainer: Any) -> None:
        """Move this callback before those that report to TensorBoard, W&B and others, which then receive our metrics.

        The Trainer calls its own callbacks first.
        """
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fit the model into the budget.

        Raises:
            UsageError, Infeasible: as for `elbowroom.fit`.
        """
        self._close()
        optimizer = unwrap_optimizer(kwargs["optimizer"])
        models = [kwargs["model"], *self._other_models]
        self.room = open_room(models, optimizer, self._memory_budget, profile=self._profile, **self._options)
        self._profile = self.room.profile
        if state.global_step:
            self._resume(args, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a step of the room."""
        if self.room is not None and not self._is_running:
            self.room.begin_step()
            self._is_running = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step of the room."""
        if self.room is not None and self._is_running:
            self._is_running = False
            self.room.end_step()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the room's metrics to the Trainer's logs of training steps."""
        logs = kwargs.get("logs")
        if not self._logs_metrics or self._is_running or not logs or "loss" not in logs:
            return
        found = list_metrics(self.room)
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save what the room has learned beside the checkpoint."""
        folder = pathlib.Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.room is not None and folder.is_dir():
            save_learned(self.room, folder, args.process_index)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach the room."""
        self._close()

    def _resume(self, args: Any, state: Any) -> None:
        assert self.room is not None
        folders = [pathlib.Path(args.output_dir) / f"checkpoint-{state.global_step}"]
        if isinstance(args.resume_from_checkpoint, str):
            folders.insert(0, pathlib.Path(args.resume_from_checkpoint))
        for folder in folders:
            if learned := read_learned(folder, args.process_index):
                load_learned(self.room, learned)
                return

    def abort(self, error: BaseException) -> None:
        """End the step that an error aborts, if one is running, and detach the room."""
        if self.room is not None and self._is_running:
            self._is_running = False
            self.room.end_step(error)
        self._close()

    def _close(self) -> None:
        self._is_running = False
        if self.room is not None:
            self.room.detach()


def watch_training_loops() -> None:
    """Have training loops of transformers tell our callbacks of errors, for which there is no event. Permanent."""
    inner = Trainer._inner_training_loop
    if hasattr(inner, "tells_callbacks"):
        return

    @functools.wraps(inner)
    def run(trainer: Trainer, *args: Any, **options: Any) -> Any:
        try:
            return inner(trainer, *args, **options)
        except BaseException as error:
            for each in trainer.callback_handler.callbacks:
                if isinstance(each, ElbowroomCallback):
                    each.abort(error)
            if isinstance(error, NO_ROOM) and trainer.args.auto_find_batch_size:
                raise RuntimeError(f"{OUT_OF_MEMORY}: {error}") from error  # a smaller batch is tried then
            raise

    run.tells_callbacks = True  # type: ignore[attr-defined]
    Trainer._inner_training_loop = run  # type: ignore[assignment, method-assign]

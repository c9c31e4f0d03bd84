"""Integration with the Trainer of Lightning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from elbowroom.api import check_arguments, open_room
from elbowroom.integrations.logged_metrics import list_metrics
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.room import Room


class ElbowroomCallback(Callback):
    """Runs the training steps of a Lightning Trainer within a memory budget.

        trainer = Trainer(..., callbacks=[ElbowroomCallback("20GiB")])

    A step is one update of the parameters, with all its batches if the Trainer accumulates gradients; with manual
    optimization, a batch in which any optimizer steps. Validation and checkpoints run between steps. What the room
    learns is saved in the Trainer's checkpoints, and taken over by a run that resumes from one.

    Args:
        memory_budget: as for `elbowroom.fit`.
        other_models: modules that a step uses beside the LightningModule. They may leave the device, too, as may those
            that the Trainer's callbacks hold, such as the average of `StochasticWeightAveraging`.
        logs_metrics: whether the Trainer's loggers receive metrics of the room, with the prefix "elbowroom/", every
            `log_every_n_steps`.
        profile: as for `elbowroom.fit`.
        **options: as for `elbowroom.fit`.

    Attributes:
        room: of the present or the last training; None before.
    """

    def __init__(
        self,
        memory_budget: int | float | str,
        *,
        other_models: Sequence[nn.Module] = (),
        logs_metrics: bool = True,
        profile: HardwareProfile | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_arguments(memory_budget, profile=profile, **options)
        self._memory_budget = memory_budget
        self._other_models = tuple(other_models)
        self._logs_metrics = logs_metrics
        self._profile = profile
        self._options = options
        self._is_running = False
        self._updates = 0  # when the step began
        self._learned: dict[str, Any] | None = None
        self.room: Room | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit the module into the budget.

        Raises:
            UsageError, Infeasible: as for `elbowroom.fit`.
        """
        self._close(None)
        model = trainer.model or pl_module  # in the wrapper of the Trainer's strategy, if there is one
        models = [model, *self._other_models, *_list_modules_of_callbacks(trainer, pl_module)]
        self.room = open_room(models, trainer.optimizers, self._memory_budget, profile=self._profile, **self._options)
        self._profile = self.room.profile
        if self._learned is not None:
            self.room.load_state_dict(self._learned)
            self._learned = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Begin a step of the room, unless the batch belongs to a step that runs."""
        if self.room is not None and not self._is_running:
            self._updates = trainer.global_step
            self.room.begin_step()
            self._is_running = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """End the step of the room if the parameters were updated."""
        if self.room is None or not self._is_running or trainer.global_step == self._updates:
            return
        self._is_running = False
        self.room.end_step()
        interval: int = getattr(trainer, "log_every_n_steps", 1)
        if self._logs_metrics and trainer.global_step % interval == 0:
            for each in trainer.loggers:
                each.log_metrics(list_metrics(self.room), step=trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the step that the exception aborts, and detach the room."""
        self._close(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Detach the room."""
        self._close(None)

    def state_dict(self) -> dict[str, Any]:
        """Return what the room has learned; called by the Trainer for a checkpoint."""
        return {} if self.room is None else self.room.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Receive what `state_dict` returned; called by the Trainer before training begins."""
        self._learned = state_dict or None

    def _close(self, error: BaseException | None) -> None:
        if self.room is None:
            return
        is_running, self._is_running = self._is_running, False
        if is_running and error is not None:
            self.room.end_step(error)
        self.room.detach()


def _list_modules_of_callbacks(trainer: Trainer, pl_module: LightningModule) -> list[nn.Module]:
    """List the modules among the attributes of a Trainer's callbacks that have other parameters on the device."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    held = [each for callback in callbacks for each in vars(callback).values() if isinstance(each, nn.Module)]
    own = set(map(id, pl_module.parameters()))

    def is_other(module: nn.Module) -> bool:
        parameters = list(module.parameters())
        is_here = {each.device for each in parameters} == {pl_module.device}
        return is_here and not own.issuperset(map(id, parameters))

    return list(filter(is_other, held))

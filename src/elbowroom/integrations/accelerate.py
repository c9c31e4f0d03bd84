"""Integration with loops that use Accelerate."""

from __future__ import annotations

import pathlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch.optim import Optimizer

from elbowroom.api import check_arguments, open_room
from elbowroom.errors import UsageError
from elbowroom.integrations.learned_file import load_learned, read_learned, save_learned
from elbowroom.integrations.logged_metrics import list_metrics
from elbowroom.integrations.wrapped_optimizers import unwrap_optimizer
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.optimizer_steps import OptimizerSteps
from elbowroom.room import Room


class ElbowroomPlugin:
    """Runs the training steps of a loop that uses Accelerate within a memory budget.

        plugin = ElbowroomPlugin("20GiB")
        model, optimizer, loader = plugin.prepare(accelerator, model, optimizer, loader)

    The rest of the loop stays as it is. A step begins when the model is called for training and ends when the optimizer
    has updated the parameters, so it covers all batches of `accelerator.accumulate`. What the room learns is in a file
    of its own beside the others of `accelerator.save_state`, which `load_state` takes over if it is there.

    Args:
        memory_budget: as for `elbowroom.fit`.
        profile: as for `elbowroom.fit`.
        **options: as for `elbowroom.fit`.

    Attributes:
        room: of the loop; None before `prepare`.
    """

    def __init__(
        self, memory_budget: int | float | str, *, profile: HardwareProfile | None = None, **options: Any
    ) -> None:
        check_arguments(memory_budget, profile=profile, **options)
        self._memory_budget = memory_budget
        self._profile = profile
        self._options = options
        self._steps: OptimizerSteps | None = None
        self._registered_with: weakref.WeakSet[Accelerator] = weakref.WeakSet()
        self._learned: dict[str, Any] = {}  # to be taken over after this step
        self._rank = 0
        self.room: Room | None = None

    def prepare(self, accelerator: Accelerator, *objects: Any, **options: Any) -> Any:
        """Return what `accelerator.prepare` returns for these objects, and fit the models among them into the budget.

        Args:
            *objects, **options: as for `accelerator.prepare`; at least one model and one optimizer.

        Raises:
            UsageError: there is no model or no optimizer, or this plugin has prepared a loop already.
            UsageError, Infeasible: as for `elbowroom.fit`.
        """
        if self._steps is not None:
            raise UsageError("this plugin has prepared a loop already; call its close() first")
        prepared = accelerator.prepare(*objects, **options)
        listed = prepared if len(objects) > 1 else (prepared,)
        models = [each for each in listed if isinstance(each, torch.nn.Module)]
        optimizers = [unwrap_optimizer(each) for each in listed if isinstance(each, Optimizer)]
        if not models or not optimizers:
            raise UsageError("prepare() takes the model and its optimizer together, as accelerator.prepare does")
        model = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
        self.room = open_room(model, optimizers, self._memory_budget, profile=self._profile, **self._options)
        self._profile = self.room.profile
        self._steps = OptimizerSteps(self.room, model, optimizers, after_step=self._take_over)
        if accelerator not in self._registered_with:
            self._registered_with.add(accelerator)
            accelerator.register_save_state_pre_hook(self._save)
            accelerator.register_load_state_pre_hook(self._load)
        self._rank = accelerator.process_index
        return prepared

    def metrics(self) -> dict[str, int | float]:
        """Return metrics of the room for `accelerator.log`, with the prefix "elbowroom/"."""
        return list_metrics(self.room)

    def close(self) -> None:
        """Let go of the loop: the model can be trained without a budget, or prepared anew."""
        if self._steps is not None and self.room is not None:
            self._steps.finish()
            self.room.detach()  # first, as a running step has replaced calls after us
            self._steps.close()
            self._steps = None
        self._learned = {}

    def _save(self, models: Sequence[Any], weights: Sequence[Any], folder: str) -> None:
        if self.room is not None:
            save_learned(self.room, pathlib.Path(folder), self._rank)

    def _load(self, models: Sequence[Any], folder: str) -> None:
        """Take over what an earlier run has learned, after the step if one runs."""
        self._learned = read_learned(pathlib.Path(folder), self._rank)
        if self._steps is not None and not self._steps.is_running:
            self._take_over()

    def _take_over(self) -> None:
        learned, self._learned = self._learned, {}
        if self.room is not None:
            load_learned(self.room, learned)

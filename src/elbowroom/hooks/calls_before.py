"""CallsBefore: which frozen models a loop calls before it calls the trained one, as distillation calls its teacher."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer

from elbowroom.hooks.input_guard import list_entries


class CallsBefore:
    """Calls of frozen models between steps. A step begins with one if the last step followed one of the same model.

    None begins while the trained model is in evaluation mode, or in another thread than the last one. If the trained
    model is then called without gradients, that is an evaluation after all.

    Args:
        models: of the job, the trained one first.
        others: other modules that the steps may use. They are not kept alive.
        optimizers: what these do not update is frozen.

    Attributes:
        models: as given.
        is_open: whether a step that such a call began has not called the trained model yet.
        knows_steps: whether a step has begun at a call.
    """

    def __init__(
        self, models: Sequence[torch.nn.Module], others: Iterable[torch.nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:
        self.models = models
        self.is_open = self.knows_steps = False
        self._trained = {id(each) for one in optimizers for group in one.param_groups for each in group["params"]}
        frozen = [each for each in models[1:] if self._trained and not self.is_trained(each)]
        self._others = [weakref.ref(entry) for each in others for entry in list_entries(each)]
        self._frozen = [*(weakref.ref(entry) for each in frozen for entry in list_entries(each)), *self._others]
        self._called: set[int] = set()
        self._former: set[int] = set()
        self._thread = 0

    def is_trained(self, module: torch.nn.Module) -> bool:
        """Tell whether an optimizer updates a module."""
        return not self._trained.isdisjoint(map(id, module.parameters()))

    def is_other(self, module: torch.nn.Module) -> bool:
        """Tell whether a module is none of the job's."""
        return any(each() is module for each in self._others)

    def begins_step(self, module: torch.nn.Module) -> bool:
        """Note a call between steps. Return True if a step begins with it.

        None begins inside of `torch.inference_mode`, whose end would undo what a step sets for its thread.
        """
        is_training = getattr(self.models[0], "training", False) and self._thread in (0, threading.get_ident())
        if not is_training or not any(each() is module for each in self._frozen):
            return False
        self._called.add(id(module))
        return id(module) in self._former and not torch.is_inference_mode_enabled()

    def note_step(self, *, is_open: bool) -> None:
        """Note that a step has begun. `is_open`: with a call of a frozen model."""
        self._former = self._called
        self._called = set()
        self._thread = threading.get_ident()
        self.is_open = is_open
        self.knows_steps = True

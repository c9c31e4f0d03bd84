"""UpdateGroups: the optimizers of a job update a few parameters at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.optim import Optimizer

from elbowroom.hooks.grouped_step import Begin, GroupedStep, find_groupable
from elbowroom.ops.update_marks import begin_update

GROUPS = 32
"""An optimizer updates parameters of this share of the budget at a time. With gradients, state and temporaries they
take several times as much."""

HELD = 2
"""The update of a group begins with all that it uses in memory, unless that is more than this share of the budget."""

MOST_LISTS = 4
"""Updates by `_foreach_` ops make fewer lists of temporaries, each as large as the parameters: 3 are the most that
PyTorch's optimizers make, Adadelta with weight decay and negated gradients."""


class UpdateGroups:
    """Replaces the `step` of those optimizers that can be grouped.

    Args:
        optimizers: of the job.
        find_budget: returns the budget in bytes; None to update all parameters at once.
        begin_update: as for `GroupedStep`.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        find_budget: Callable[[], int | None],
        begin_update: Begin,
    ) -> None:
        self._optimizers = optimizers
        self._find_budget = find_budget
        self._begin_update = begin_update
        self._steps: list[GroupedStep] = []

    def begin(self) -> None:
        """Update in groups from now on."""
        if not self._steps:
            self._steps = [
                GroupedStep(each, self._find_group_bytes, self._may_hold, self._begin_update)
                for each in find_groupable(self._optimizers)
            ]

    def end(self) -> None:
        """Give the optimizers their own steps back."""
        while self._steps:
            self._steps.pop().remove()

    def _find_group_bytes(self) -> int | None:
        budget_bytes = self._find_budget()
        return None if budget_bytes is None else budget_bytes // GROUPS

    def _may_hold(self, nbytes: int) -> bool:
        budget_bytes = self._find_budget()
        return budget_bytes is not None and nbytes <= budget_bytes // HELD


@contextlib.contextmanager
def grouping(optimizers: Sequence[Optimizer], budget_bytes: int) -> Iterator[None]:
    """Return a context in which optimizers step as they do within a budget that state may have to leave."""

    def begin(tensors: Sequence[torch.Tensor]) -> Sequence[object]:
        begin_update(tensors)
        return ()

    groups = UpdateGroups(optimizers, lambda: budget_bytes, begin)
    groups.begin()
    try:
        yield
    finally:
        groups.end()


def count_temporaries(optimizers: Sequence[Optimizer]) -> int:
    """Return the bytes that updates of all parameters at once take at most, beside one parameter at a time."""
    found = 0
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        parameters = [each for each in group["params"] if each.requires_grad]
        is_list = group.get("foreach")
        if is_list is None:  # the default of PyTorch
            is_list = not group.get("fused") and any(each.device.type != "cpu" for each in parameters)
        if is_list:
            found += MOST_LISTS * sum(each.nbytes for each in parameters)
    return found

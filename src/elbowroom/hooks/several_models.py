"""Several models as one: that which is trained, and those beside it, such as a frozen teacher."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch


class SeveralModels(torch.nn.Module):
    """Has what its first model has under the same names, and what others have under names of their classes.

    Only the first model is kept alive.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        first, *others = models
        self.__dict__["first"] = first  # no submodule
        held: Any = weakref.WeakValueDictionary({"": first})
        counts: Counter[str] = Counter()
        for each in others:
            name = type(each).__name__
            counts[name] += 1
            held[name if counts[name] == 1 else f"{name}_{counts[name]}"] = each
        self._modules = held


def list_models(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the models of `SeveralModels` that still exist; any other module alone."""
    return list(model.children()) if isinstance(model, SeveralModels) else [model]

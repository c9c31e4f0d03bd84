"""Marks a model that has a room."""

from __future__ import annotations

import weakref

import torch

_NAME = "_elbowroom_room"


class _Mark:
    """Mark on a model. A copied or unpickled model is another model and has no room."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = weakref.ref(model)

    def __reduce__(self) -> tuple[type[set[None]], tuple[()]]:
        return set, ()  # which `torch.load` reads with `weights_only`


def attach_mark(model: torch.nn.Module) -> None:
    """Mark a model as having a room."""
    model.__dict__[_NAME] = _Mark(model)


def remove_mark(model: torch.nn.Module) -> None:
    """Remove the mark, if there is one."""
    model.__dict__.pop(_NAME, None)


def is_marked(model: torch.nn.Module) -> bool:
    """Tell whether a model has a room."""
    found = model.__dict__.get(_NAME)
    return isinstance(found, _Mark) and found.model() is model

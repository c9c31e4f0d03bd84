"""Marks models that have a room."""

from __future__ import annotations

import weakref

import torch

from elbowroom.hooks.several_models import list_models

_NAME = "_elbowroom_room"


class _Mark:
    """Mark on a model. A copied or unpickled model is another model and has no room."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = weakref.ref(model)

    def __reduce__(self) -> tuple[type[set[None]], tuple[()]]:
        return set, ()  # which `torch.load` reads with `weights_only`


def attach_mark(model: torch.nn.Module) -> None:
    """Mark a model as having a room; of several, each."""
    for each in list_models(model):
        each.__dict__[_NAME] = _Mark(each)


def remove_mark(model: torch.nn.Module) -> None:
    """Remove the mark, if there is one."""
    for each in list_models(model):
        each.__dict__.pop(_NAME, None)


def is_marked(model: torch.nn.Module) -> bool:
    """Tell whether a model has a room; of several, whether one has."""
    marks = ((each, each.__dict__.get(_NAME)) for each in list_models(model))
    return any(isinstance(mark, _Mark) and mark.model() is each for each, mark in marks)

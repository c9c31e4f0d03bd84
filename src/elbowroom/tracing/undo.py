"""Puts back what a step changes in Python, when it was only looked at: attributes, counters, random generators."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_CONTAINERS = (
    dict,
    list,
    set,
    collections.OrderedDict,
    collections.defaultdict,
    collections.deque,
    collections.Counter,
)


@contextlib.contextmanager
def undone(model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Let a step run, and undo what it does to the attributes of modules, optimizers and their schedulers.

    So a counter counts no further, a table computed on fake tensors is not found by the next step, and a learning rate
    does not move on. Random generators of torch (the CPU's), Python and NumPy are where they were. What else a step
    changes, a list of losses of the program's own, say, stays.
    """
    owners = [*model.modules(), *optimizers, *_find_schedulers(optimizers)]
    attributes = [(owner, _remember(owner.__dict__)) for owner in owners]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        for owner, remembered in attributes:
            _put_back(owner.__dict__, remembered)


def _find_schedulers(optimizers: Sequence[Optimizer]) -> list[LRScheduler]:
    """An optimizer does not know who changes its learning rate; the garbage collector knows everybody."""
    found = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    known = {id(optimizer) for optimizer in optimizers}
    return [each for each in found if id(each.__dict__.get("optimizer")) in known]


def _remember(table: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (value, copy.copy(value) if type(value) in _CONTAINERS else None) for key, value in table.items()}


def _put_back(table: dict[str, Any], remembered: dict[str, tuple[Any, Any]]) -> None:
    table.clear()
    for key, (value, contents) in remembered.items():
        table[key] = value
        if contents is not None:
            value.clear()
            (value.extend if isinstance(value, (list, collections.deque)) else value.update)(contents)

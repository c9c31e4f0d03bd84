"""Puts back what a step changes in Python, when it was only looked at: attributes, counters, random generators."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from elbowroom.errors import TraceError
from elbowroom.tracing.reach import Reach


@contextlib.contextmanager
def undone(*roots: Any) -> Iterator[None]:
    """Let a step run, and undo what it does to all that is reached from `roots`: the step, its model, its optimizers.

    So a counter counts no further, a list does not grow, a loss scaler has no fake scale, a table computed on fake
    tensors is not found by the next step, and a learning rate does not move on. Random generators, those of torch (the
    CPU's), Python and NumPy too, are where they were. Files, other processes, and what only C code holds stay changed.

    Raises:
        TraceError: the step takes from an iterator, which is refused before an item is lost; or it can reach too much.
    """
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    reach = Reach(roots)
    try:
        reach.guard()
        yield
    finally:
        reach.put_back()
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
    if asked := [each for each in reach.stand_ins.values() if each.was_asked]:  # and went on all the same
        raise TraceError(f"it takes the next item of a {type(asked[0].iterator).__name__}, which could not be put back")

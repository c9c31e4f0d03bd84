"""Undoes the changes of a captured step to Python state: attributes, counters, random generators."""

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
    """Undo, at exit, all changes to objects reachable from `roots`: the step, its model, its optimizers.

    This restores counters, lists, the scale of a loss scaler, tables computed on fake tensors, learning rates, and the
    random generators of torch (CPU), Python and NumPy. Files, other processes, and state held only by C code stay
    changed.

    Raises:
        TraceError: the step advances an iterator, which is refused before an item is lost; or it reaches too many
            objects.
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
    if asked := [each for each in reach.stand_ins.values() if each.was_asked]:  # the step swallowed IteratorTaken
        raise TraceError(f"it takes the next item of a {type(asked[0].iterator).__name__}, which could not be undone")

"""Keeps a step from following into worker processes that are forked inside it, such as those of a DataLoader.

A forked process has the watchers and saved-tensor hooks of the thread that forked it. A worker never leaves the
parent's `with` block, so it would be watched, and its tensors counted, for as long as it lives. A process that
`os.fork()` makes may go on with the step, and keeps them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from multiprocessing import util
from typing import Any

import torch

from elbowroom.native import library

Hooks = tuple[Callable[..., Any], Callable[..., Any]]
"""What autograd calls for each tensor it saves, and for each it needs."""


@contextlib.contextmanager
def ended_in_workers(hooks: Hooks) -> Iterator[None]:
    """End a step in each process that multiprocessing forks meanwhile.

    Args:
        hooks: not called there, if they are the innermost ones.
    """
    step = _Step(hooks)
    util.register_after_fork(step, _Step.end)  # which holds it weakly
    yield
    del step


class _Step:
    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def end(self) -> None:
        library.load().set_watchers(())
        autograd = torch._C._autograd
        if autograd._top_saved_tensors_default_hooks(True) == self._hooks:
            autograd._pop_saved_tensors_default_hooks()

"""Sees what the ops of a running step write in place.

A copy or a replay has what a storage held when it was saved. Autograd without us would find what it holds when it is
needed, and a write through `x.data` between the two is no error. So a step that moves anything is watched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elbowroom.hooks.replayable import list_written, touches_tensors

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an op with its arguments."""


class Watcher(TorchDispatchMode):
    """Reports writes.

    Args:
        before_write: told of each tensor that an op is about to write to in place.
        on_write: told of the same tensor when it has been written to.

    Attributes:
        pauses: how many contexts there are in which ops are not part of the step.
        ops: seen so far, of those that a trace has.
        stand_in: runs each op instead, for as long as there is one.

    Cost: a few microseconds an op.
    """

    def __init__(self, before_write: Callable[[torch.Tensor], None], on_write: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before_write, self._on_write = before_write, on_write
        self.pauses = self.ops = 0
        self.stand_in: Run | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.pauses:
            return func(*args, **kwargs)
        self.ops += touches_tensors(func)
        run = self.stand_in or self.run
        written = list_written(func, args, kwargs)
        if not written:
            return run(func, args, kwargs)
        for tensor in written:
            self._before_write(tensor)
        result = run(func, args, kwargs)
        for tensor in written:
            self._on_write(tensor)
        return result

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op."""
        return func(*args, **kwargs)

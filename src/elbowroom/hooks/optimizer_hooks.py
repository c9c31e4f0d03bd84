"""Hooks after the steps of all optimizers that may be added and removed while such hooks run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

Hook = Callable[[Optimizer, Any, Any], None]


class _Hooks:
    """Calls hooks from one hook of PyTorch's.

    PyTorch iterates over its hooks, so that an error would end the program if one of them added or removed another.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._hooks: list[Hook] = []
        self._handle: Any = None
        self._running = 0

    def add(self, hook: Hook) -> None:
        """Add a hook."""
        with self._lock:
            self._hooks.append(hook)
            if self._handle is None:
                self._handle = register_optimizer_step_post_hook(self._run)

    def remove(self, hook: Hook) -> None:
        """Remove a hook, if it is there. The one of PyTorch's goes with the last, unless it runs: then it stays."""
        with self._lock:
            if hook in self._hooks:
                self._hooks.remove(hook)
            if not (self._hooks or self._running) and self._handle is not None:
                self._handle.remove()
                self._handle = None

    def _run(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with self._lock:
            self._running += 1
        try:
            for hook in list(self._hooks):
                if hook in self._hooks:  # no other has removed it
                    hook(optimizer, args, kwargs)
        finally:
            with self._lock:
                self._running -= 1


_all_steps = _Hooks()


def hook_all_steps(hook: Hook) -> Callable[[], None]:
    """Call a hook after each step of any optimizer. Return a function that ends this."""
    _all_steps.add(hook)
    return lambda: _all_steps.remove(hook)

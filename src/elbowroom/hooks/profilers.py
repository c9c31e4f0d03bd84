"""Lets PyTorch's profilers look at model state that is away.

They ask each tensor for its address, which raises an error while its bytes are away. Before ops the extension gives way
to that itself (`native/state_storages.cpp`), but with `with_stack=True` a profiler looks at the tensors of each module
and optimizer that is called, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from elbowroom.native import library


def show_state_to_profilers() -> None:
    """Have state that is away show a null address while a profiler runs. Permanent."""
    module: Any = torch.autograd.profiler
    start = getattr(module, "_run_on_profiler_start", None)
    if start is None or hasattr(start, "shows_state"):
        return
    show = library.load().show_addresses
    for name, shows in (("_run_on_profiler_start", True), ("_run_on_profiler_stop", False)):
        setattr(module, name, _wrap(getattr(module, name), functools.partial(show, shows)))
    if module._is_profiler_enabled:
        show(True)


def _wrap(function: Callable[[], None], first: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(function)
    def run() -> None:
        first()
        function()

    run.shows_state = True  # type: ignore[attr-defined]
    return run

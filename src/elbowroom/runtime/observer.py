"""Protocols by which the runtime tells a tracer what happens in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class OpRecorder(Protocol):
    """Records ops of the program."""

    def record_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any], least_bytes: int = 0
    ) -> Any:
        """Record an op, which `call` runs, and return its result."""
        ...


class Observer(OpRecorder, Protocol):
    """Watches what autograd does while a step is captured or measured."""

    def saved(self, tensor: torch.Tensor, index: int | None = None) -> int: ...
    def stays(self, save: int, is_held: Callable[[], bool]) -> None: ...
    def needed(self, save: int, given: torch.Tensor) -> None: ...
    def save_released(self, save: int) -> None: ...

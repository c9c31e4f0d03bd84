"""Sees what the ops of a running step write in place.

A copy or a replay has what a storage held when it was saved. Autograd without us would find what it holds when it is
needed, and a write through `x.data` between the two is no error. So a step that moves anything is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elbowroom.hooks.hidden import hide_from_compiler
from elbowroom.hooks.kinds import Kind, find_kind

Run = Callable[..., Any]
"""Runs an op: its kind, its arguments, and those of them that it writes to."""

NO_NAMES: dict[str, Any] = {}
"""Of an op without named arguments; nobody writes to it."""


class Watcher(TorchDispatchMode):
    """Reports writes.

    Args:
        before_write: told of each tensor that an op is about to write to in place.
        on_write: told of the same tensor when it has been written to.

    Attributes:
        pauses: how many contexts there are in which ops are not part of the step.
        ops: seen so far, of those that a trace has.
        stand_in: runs each op instead, for as long as there is one.

    Cost: about a microsecond an op.
    """

    def __init__(self, before_write: Callable[[torch.Tensor], None], on_write: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before_write, self._on_write = before_write, on_write
        self.pauses = self.ops = 0
        self.stand_in: Run | None = None
        self._kinds: dict[int, Kind] = {}  # that were seen, by the identity of their op

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            kwargs = NO_NAMES
        if self.pauses:
            return func(*args, **kwargs)
        kind = self._kinds.get(id(func))
        if kind is None:
            kind = self._kinds[id(func)] = find_kind(func)
        self.ops += kind.is_traced
        run = self.stand_in
        if run is None:
            if kind.is_idle:
                return kind.call(*args, **kwargs)
            run = self.run
        if not kind.may_write:
            return run(kind, args, kwargs)
        targets = kind.list_written(args, kwargs)
        for tensor in targets:
            self._before_write(tensor)
        result = run(kind, args, kwargs, targets)
        for tensor in targets:
            self._on_write(tensor)
        return result

    _is_hidden = hide_from_compiler(__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not cls._is_hidden  # whether PyTorch hides it, in its way

    def run(
        self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Sequence[torch.Tensor] = ()
    ) -> Any:
        """Call the op, which writes to `targets`."""
        return kind.call(*args, **kwargs)

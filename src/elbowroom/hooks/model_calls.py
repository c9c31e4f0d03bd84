"""ModelCalls: tells of calls of a model and its parts, outside of compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from elbowroom.hooks.input_guard import list_entries, replace_call


class CallListener(Protocol):
    """Is told of calls of modules."""

    def before_call(self, module: torch.nn.Module) -> bool:
        """Do what has to be done before a call. Return True if the module is to be called anew, with other hooks."""

    def note_failure(self) -> None:
        """Note that a call has raised an exception."""


class ModelCalls:
    """Tells a listener of the calls of a model and of all its parts, until `keep_only`.

    A forward hook would come too late for the room's own hooks to see the same call.

    Args:
        model: whose calls are observed.
        listener: is told.
    """

    def __init__(self, model: torch.nn.Module, listener: CallListener) -> None:
        self._listener = listener
        self._entries = list_entries(model)
        self._removals: list[Callable[[], None]] = []
        self._observe((*model.modules(), *self._entries))

    def keep_only(self, called: torch.nn.Module) -> None:
        """Observe no calls of parts any more but of this one, which the program calls itself."""
        if len(self._removals) > len(self._entries):
            self.close()
            self._observe((*self._entries, called))

    def close(self) -> None:
        """Observe no calls any more."""
        while self._removals:
            self._removals.pop()()

    def _observe(self, modules: Iterable[torch.nn.Module]) -> None:
        once = {id(each): each for each in modules}
        self._removals = [_observe(each, self._listener) for each in once.values()]


def _observe(module: torch.nn.Module, listener: CallListener) -> Callable[[], None]:
    """Tell of the calls of one module. Return a function that ends this."""
    inner: Callable[..., Any] = module._compiled_call_impl or module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            if listener.before_call(module):
                return module(*args, **kwargs)
            return inner(*args, **kwargs)
        except BaseException:
            listener.note_failure()
            raise

    return replace_call(module, call)

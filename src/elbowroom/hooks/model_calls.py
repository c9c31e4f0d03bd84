"""ModelCalls: what is called before the calls of a model and its parts, outside of compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from elbowroom.hooks.input_guard import list_entries, replace_call


class ModelCalls:
    """Calls functions before and after calls of a model and of all its parts, until `keep_only`.

    A forward hook would come too late for the room's own hooks to see the same call.

    Args:
        model: whose calls are observed.
        begin: called before each call of a module, with it. Returns True if the module is to be called once more, since
            its hooks have changed.
        fail: called when a call raises an exception.
    """

    def __init__(
        self, model: torch.nn.Module, begin: Callable[[torch.nn.Module], bool], fail: Callable[[], None]
    ) -> None:
        self._begin = begin
        self._fail = fail
        self._entries = list_entries(model)
        self._modules = list({id(each): each for each in (*model.modules(), *self._entries)}.values())
        self._removals = [self._observe(each) for each in self._modules]

    def keep_only(self, called: torch.nn.Module) -> None:
        """Observe no calls of parts any more but of this one, which the program calls itself."""
        if len(self._modules) > len(self._entries):
            self.close()
            self._modules = list({id(each): each for each in (*self._entries, called)}.values())
            self._removals = [self._observe(each) for each in self._modules]

    def close(self) -> None:
        """Observe no calls any more."""
        while self._removals:
            self._removals.pop()()

    def _observe(self, module: torch.nn.Module) -> Callable[[], None]:
        inner: Callable[..., Any] = module._compiled_call_impl or module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                if self._begin(module):
                    return module(*args, **kwargs)
                return inner(*args, **kwargs)
            except BaseException:
                self._fail()
                raise

        return replace_call(module, call)

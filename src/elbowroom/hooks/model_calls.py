"""ModelCalls: tells of calls of a model and its parts, outside of compiled code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from elbowroom.hooks.input_guard import Inner, list_entries, replace_call


class CallListener(Protocol):
    """Is told of calls of modules."""

    def before_call(self, module: torch.nn.Module) -> bool:
        """Do what has to be done before a call. Return True if the module is to be called anew, with other hooks."""

    def note_failure(self) -> None:
        """Note that a call has raised an exception."""


class ModelCalls:
    """Tells a listener of the calls of a model and of all its parts; after `keep`, only of that one and the model.

    A forward hook would come too late for the room's own hooks to see the same call.

    Args:
        model: whose calls are observed.
        listener: is told.
        others: modules whose calls are observed as well. They are not kept alive.
    """

    def __init__(self, model: torch.nn.Module, listener: CallListener, others: Iterable[torch.nn.Module] = ()) -> None:
        self._model = model
        self._listener = listener
        self._others = [weakref.ref(entry) for each in others for entry in list_entries(each)]
        self._called = list_entries(model)
        self._keeps_all = False
        self._removals: list[Callable[[], None]] = []
        self._observe((*model.modules(), *self._called))

    def keep_all(self) -> None:
        """Observe the calls of all parts from now on: the program calls several."""
        self._keeps_all = True
        self._observe((*self._model.modules(), *self._called))

    def keep(self, called: torch.nn.Module) -> None:
        """Observe no calls of parts any more but of this one, which the program calls itself."""
        if not self._keeps_all and len(self._removals) > len(self._called) + len(self._others):
            self._called.append(called)
            self._observe(self._called)

    def close(self) -> None:
        """Observe no calls any more."""
        while self._removals:
            self._removals[-1]()
            self._removals.pop()  # last, so that an interrupted call can be repeated

    def _observe(self, modules: Iterable[torch.nn.Module]) -> None:
        self.close()
        others = [each for ref in self._others if (each := ref()) is not None]
        once = {id(each): each for each in (*modules, *others)}
        self._removals = [_observe(each, self._listener) for each in once.values()]


def _observe(module: torch.nn.Module, listener: CallListener) -> Callable[[], None]:
    """Tell of the calls of one module. Return a function that ends this."""

    def call(module: torch.nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if listener.before_call(module):  # not `module(...)`: its class may have a `__call__` of its own
                return (module._compiled_call_impl or module._call_impl)(*args, **kwargs)
            return inner(*args, **kwargs)
        except BaseException:
            listener.note_failure()
            raise

    return replace_call(module, call)

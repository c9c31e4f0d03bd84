"""Tells listeners when the program calls a function that `torch.compile` has made.

Such a call runs the modules in it without calling them, and Dynamo compiles what it finds: a module whose call is
replaced would split the graph, and change its results in their last bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType, FunctionType
from typing import Any, Protocol

import torch


class Listener(Protocol):
    """Is told of calls of compiled functions in any thread."""

    def owns(self, modules: Iterable[torch.nn.Module]) -> bool:
        """Tell whether one of these modules is its own. If a call runs such a module, other listeners are not told."""

    def before_compiled_call(self, *, is_own: bool) -> None:
        """Do what has to be done before such a call. Exceptions propagate to the program. `is_own`: see `owns`."""

    def switch(self, is_compiled: bool) -> None:
        """Note that the calling thread runs compiled code from now on, or does no longer."""


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """A call of a compiled function.

    Attributes:
        frame: of Dynamo's wrapper.
        handled: exception that is handled where it was called; None if there is none.
        has_begun: whether its compiled code has begun.
    """

    frame: FrameType
    handled: BaseException | None
    has_begun: bool = False


class _Running(threading.local):
    """Calls that a thread runs, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


_running = _Running()
_listeners: list[Listener] = []


def listen(listener: Listener) -> Callable[[], None]:
    """Tell a listener of calls of compiled functions, once Dynamo is loaded. Return a function that ends this."""
    _listeners.append(listener)
    tell_listeners()

    def end() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return end


def _list_modules(call: FrameType) -> list[torch.nn.Module]:
    """Return modules that a compiled function may run: bound to it, in its arguments, its closure or its globals.

    Args:
        call: frame of Dynamo's wrapper.
    """
    variables = call.f_locals
    function = variables.get("fn")
    values = [getattr(function, "__self__", None), *variables.get("args", ()), *variables.get("kwargs", {}).values()]
    if isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                values.append(cell.cell_contents)
        values += [function.__globals__.get(name) for name in function.__code__.co_names]
    return [each for each in values if isinstance(each, torch.nn.Module)]


def tell_listeners() -> None:
    """Have Dynamo, if loaded, tell listeners. Permanent."""
    module: Any = sys.modules.get("torch._dynamo.eval_frame")
    if module is None or hasattr(module._is_skip_guard_eval_unsafe_stance, "tells_listeners"):
        return
    begin = module._is_skip_guard_eval_unsafe_stance  # called before the thread's dispatch keys are saved
    change = module._maybe_set_eval_frame  # called by the same frame where compiled code begins and ends

    @functools.wraps(begin)
    def tell_and_begin() -> Any:
        call, listeners = sys._getframe(1), tuple(_listeners)
        modules = _list_modules(call)
        owners = tuple(each for each in listeners if each.owns(modules))
        for each in owners or listeners:
            each.before_compiled_call(is_own=bool(owners))
        if call.f_code.co_name == "compile_wrapper":
            _running.calls.append(_Call(call, sys.exc_info()[1]))
        return begin()

    @functools.wraps(change)
    def change_and_tell(callback: Any) -> Any:
        calls = _running.calls
        if calls and calls[-1].frame is sys._getframe(1):  # else a function that Dynamo leaves alone
            if calls[-1].has_begun or sys.exc_info()[1] is not calls[-1].handled:  # an error has come before the code
                calls.pop()
            else:
                calls[-1].has_begun = True
        for each in tuple(_listeners):
            each.switch(bool(calls))
        return change(callback)

    tell_and_begin.tells_listeners = True  # type: ignore[attr-defined]
    module._is_skip_guard_eval_unsafe_stance = tell_and_begin
    module._maybe_set_eval_frame = change_and_tell

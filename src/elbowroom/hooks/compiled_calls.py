"""Tells listeners when the program calls a function that `torch.compile` has made.

Such a call runs the modules in it without calling them, and Dynamo compiles what it finds: a module whose call is
replaced would split the graph, and change its results in their last bits.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol

import torch

from elbowroom.hooks.reached_modules import find_modules


class Listener(Protocol):
    """Is told of calls of compiled functions in any thread."""

    @property
    def awaits_call(self) -> bool:
        """True if it is to be told of the next call."""

    @property
    def knows_calls(self) -> bool:
        """True if it has been called by modules of its own: a call of an unknown function is another listener's."""

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


def _tell(call: FrameType) -> None:
    """Tell the listeners whose modules a call runs; if that is unknown, those that it may concern.

    Args:
        call: frame of Dynamo's wrapper.
    """
    waiting = [each for each in _listeners if each.awaits_call]
    if not waiting:
        return
    known = call.f_locals
    modules = find_modules((known.get("fn"), known.get("args"), known.get("kwargs")))
    is_known = any(each.owns(modules) for each in _listeners)
    if is_known:
        waiting = [each for each in waiting if each.owns(modules)]
    elif any(not each.knows_calls for each in waiting):
        waiting = [each for each in waiting if not each.knows_calls]
    for each in waiting:
        each.before_compiled_call(is_own=is_known)


def tell_listeners() -> None:
    """Have Dynamo, if loaded, tell listeners. Permanent."""
    module: Any = sys.modules.get("torch._dynamo.eval_frame")
    if module is None or hasattr(module._is_skip_guard_eval_unsafe_stance, "tells_listeners"):
        return
    begin = module._is_skip_guard_eval_unsafe_stance  # called before the thread's dispatch keys are saved
    change = module._maybe_set_eval_frame  # called by the same frame where compiled code begins and ends

    @functools.wraps(begin)
    def tell_and_begin() -> Any:
        call = sys._getframe(1)
        _tell(call)
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

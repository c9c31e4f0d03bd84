"""Lets code that `torch.compile` makes run in steps as it does outside of them: each call of a kernel is one op.

Graphs that run op by op (`eager`, `aot_eager`) are seen as any ops are. Inductor's code reads and writes memory unseen,
so each call of it is told to whoever watches the step: what it reads, what it writes in place, what it returns.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from elbowroom.hooks.hidden import Unwatched
from elbowroom.native import library

Pause = Callable[[], contextlib.AbstractContextManager[None]]


def run_region(
    watchers: Sequence[Any], name: str, inputs: Sequence[Any], written: Sequence[torch.Tensor], call: Callable[[], Any]
) -> Any:
    """Return what compiled code returns, run as one op by some watchers, of which the last sees it first."""
    if not watchers:
        with Unwatched():  # some of its kernels are ops
            return call()
    rest = functools.partial(run_region, watchers[:-1], name, inputs, written, call)
    return watchers[-1].run_region(name, inputs, written, rest)


def show_regions() -> None:
    """Have calls of Inductor's code seen by watchers, from now on and for good; nothing where there is no such code."""
    module = sys.modules.get("torch._inductor.output_code")
    for kind in ("CompiledFxGraph", "CompiledAOTI"):
        code = getattr(module, kind, None)
        if code is not None and not hasattr(code.__call__, "shows_regions"):
            code.__call__ = _show(code.__call__)


def _show(call: Callable[[Any, Sequence[Any]], Any]) -> Callable[[Any, Sequence[Any]], Any]:
    native = library.load()

    @functools.wraps(call)
    def run(code: Any, inputs: Sequence[Any]) -> Any:
        watchers = native.get_active_watchers()
        if not watchers:
            return call(code, inputs)
        written = [inputs[index] for index in getattr(code, "mutated_input_idxs", ())]
        # No input is held here but those: the code frees each when it has read it.
        tensors = [each for each in written if isinstance(each, torch.Tensor)]
        options = getattr(code, "fx_kwargs", None) or {}
        name = "inductor.backward" if options.get("is_backward") else "inductor.forward"
        return run_region(watchers, name, inputs, tensors, functools.partial(call, code, inputs))

    run.shows_regions = True  # type: ignore[attr-defined]
    return run


def may_run_compiled() -> bool:
    """Tell whether the program has compiled anything, or has said that it will."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    return module is not None and any(map(callable, module.cached_backends.values()))


@contextlib.contextmanager
def hiding_from_guards() -> Iterator[None]:
    """Have Dynamo find code in this thread that it has compiled for steps that nobody watches, and the other way round.

    Its guards compare the thread's dispatch keys, of which the watchers' is one.
    """
    native = library.load()
    handle = native.hide_from_guards()
    try:
        yield
    finally:
        native.stop_hiding(handle)


@contextlib.contextmanager
def noticing_compiles(notice: Callable[[], None], ended: Callable[[float], None], pauses: Sequence[Pause]) -> Iterator[None]:
    """Have the compiler find everything as it is without us.

    Args:
        notice: called in this thread when compilation begins, before anything else.
        ended: told how many seconds a compilation took.
        pauses: contexts in which the compiler works.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        yield
        return
    thread, handler = threading.get_ident(), dynamo.callback.callback_handler
    compiling, hiding = contextlib.ExitStack(), contextlib.ExitStack()
    begin = 0.0

    def start(arguments: Any) -> None:
        nonlocal begin
        begin = time.perf_counter()
        if threading.get_ident() == thread:
            if arguments.callback_trigger is dynamo.callback.CallbackTrigger.DYNAMO:
                notice()
            hiding.enter_context(hiding_from_guards())
        for pause in (*pauses, Unwatched):
            compiling.enter_context(pause())

    def end(arguments: Any) -> None:
        compiling.close()
        show_regions()
        ended(time.perf_counter() - begin)

    handler.register_start_callback(start)
    handler.register_end_callback(end)
    try:
        yield
    finally:
        hiding.close()
        with contextlib.suppress(ValueError):  # `torch._dynamo.reset` forgets them
            handler.remove_start_callback(start)
        with contextlib.suppress(ValueError):
            handler.remove_end_callback(end)

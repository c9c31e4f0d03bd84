"""Makes code compiled by `torch.compile` run in steps as it does outside of them.

Graphs that run op by op (`eager`, `aot_eager`) are watched like any ops. Inductor's code bypasses the dispatcher, so
each call of it is reported to the step's watchers as one op, with its inputs, the inputs it mutates, and its results.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from elbowroom.hooks.compiled_calls import listen, tell_listeners
from elbowroom.hooks.dispatch_keys import Unwatched
from elbowroom.native import library

HERE = pathlib.Path(__file__).parents[1]

Pause = Callable[[], contextlib.AbstractContextManager[None]]

F = TypeVar("F", bound=Callable[..., Any])


_regions = threading.local()  # `depth`: compiled regions that the thread runs


class Timer(Protocol):
    """Adds up seconds that do not belong to the step."""

    own_seconds: float


def run_region(
    watchers: Sequence[Any], name: str, inputs: Sequence[Any], written: Sequence[torch.Tensor], call: Callable[[], Any]
) -> Any:
    """Run a call of compiled code as one op and return its result. The last watcher is called first, as with modes."""
    if not watchers:
        with Unwatched():  # it calls some kernels as ATen ops
            return call()
    rest = functools.partial(run_region, watchers[:-1], name, inputs, written, call)
    return watchers[-1].run_region(name, inputs, written, rest)


def show_regions() -> None:
    """Wrap the classes of Inductor's compiled code, if loaded, so that watchers see its calls. Permanent."""
    module = sys.modules.get("torch._inductor.output_code")
    for kind in ("CompiledFxGraph", "CompiledAOTI"):
        code = getattr(module, kind, None)
        if code is not None and not hasattr(code.__call__, "shows_regions"):
            code.__call__ = _show(code.__call__)


def _show(call: Callable[[Any, Sequence[Any]], Any]) -> Callable[[Any, Sequence[Any]], Any]:
    native = library.load()

    @functools.wraps(call)
    def run(code: Any, inputs: Sequence[Any]) -> Any:
        _regions.depth = getattr(_regions, "depth", 0) + 1
        try:
            if native.is_any_state_managed():
                written = [inputs[index] for index in getattr(code, "mutated_input_idxs", ())]
                return native.run_with_state(inputs, written, functools.partial(run_watched, code, inputs))
            return run_watched(code, inputs)
        finally:
            _regions.depth -= 1

    def run_watched(code: Any, inputs: Sequence[Any]) -> Any:
        watchers = native.get_active_watchers()
        if not watchers:
            return call(code, inputs)
        written = [inputs[index] for index in getattr(code, "mutated_input_idxs", ())]
        # Keep no reference to other inputs: the code frees each input after its last use.
        tensors = [each for each in written if isinstance(each, torch.Tensor)]
        options = getattr(code, "fx_kwargs", None) or {}
        name = "inductor.backward" if options.get("is_backward") else "inductor.forward"
        return run_region(watchers, name, inputs, tensors, functools.partial(call, code, inputs))

    run.shows_regions = True  # type: ignore[attr-defined]
    return run


def is_in_region() -> bool:
    """Tell whether this thread runs code that Inductor has compiled."""
    return getattr(_regions, "depth", 0) > 0


def may_run_compiled() -> bool:
    """Tell whether the program has compiled a frame, or has called `torch.compile`."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return False
    return dynamo.convert_frame.FRAME_COUNTER > 0 or any(map(callable, dynamo.eval_frame.cached_backends.values()))


@contextlib.contextmanager
def refusing_compiled(refuse: Callable[[], NoReturn]) -> Iterator[None]:
    """Call `refuse`, which raises, when a compiled function is called in this context.

    Called with fake tensors, Dynamo would mark the function as not compilable and run it eagerly from then on.
    """
    module: Any = sys.modules.get("torch._dynamo.eval_frame")
    if module is None:
        yield
        return
    thread, find = threading.get_ident(), module._callback_from_stance  # the first thing that such a call does

    def find_or_refuse(callback: Any) -> Any:
        return refuse() if callable(callback) and threading.get_ident() == thread else find(callback)

    module._callback_from_stance = find_or_refuse
    try:
        yield
    finally:
        module._callback_from_stance = find


class _StayWatched:
    """Keeps a thread watched, or not, after it returns from a compiled function.

    Each such call restores the dispatch keys that it found, and so undoes what began or ended inside of it.
    """

    def __init__(self) -> None:
        self._native = library.load()

    awaits_call = knows_calls = False

    def owns(self, modules: Iterable[torch.nn.Module]) -> bool:
        return False

    def before_compiled_call(self, *, is_own: bool) -> None:
        pass

    def switch(self, is_compiled: bool) -> None:
        self._native.update_key()


@functools.cache
def _keep_watched() -> None:
    listen(_StayWatched())


def stay_watched() -> None:
    """Keep threads watched, or not, after they return from compiled functions. Permanent."""
    _keep_watched()
    tell_listeners()  # Dynamo may have been loaded meanwhile


def undisturbed(made: F) -> F:
    """Have Dynamo compile nothing of what a function, or the methods of a class, call. A decorator.

    Of this package's own functions Dynamo compiles none. Where compiled functions call them, it would compile those of
    others that they call, such as the planner's numeric code.
    """
    frames: Any = torch._C._dynamo.eval_frame  # without the import of torch._dynamo, which takes seconds
    if not hasattr(frames, "_FrameAction"):
        return made  # a PyTorch so old that no room is made with it
    skip = frames._FrameAction.SKIP
    for each in vars(made).values() if isinstance(made, type) else (made,):
        if isinstance(each, types.FunctionType):
            frames.set_code_exec_strategy(each.__code__, frames._FrameExecStrategy(skip, skip))
    return made


def is_in_compiled_call() -> bool:
    """Tell whether Dynamo compiles what is called here: inside a compiled function, in code that it cannot compile."""
    is_loaded = "torch._dynamo" in sys.modules
    return is_loaded and callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def leave_package_uncompiled() -> None:
    """Keep Dynamo, if loaded, from compiling functions of this package. Permanent.

    It would, for those that are called inside a compiled function, and those that autograd and ops call.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and __file__ not in dynamo.trace_rules.FORCE_SKIP_FILES:
        dynamo.trace_rules.FORCE_SKIP_FILES.update(path.as_posix() for path in HERE.rglob("*.py"))


def compile_unwatched() -> None:
    """Hide the watchers' dispatch key from Dynamo while it compiles, in every thread and between steps. Permanent.

    A thread keeps the key after a step if model state has left memory. Guards made then would not hold in steps.
    """
    module: Any = sys.modules.get("torch._dynamo.convert_frame")
    if module is None or hasattr(module._compile, "is_unwatched"):
        return
    compile_frame = module._compile

    @functools.wraps(compile_frame)
    def compile_without_key(*args: Any, **options: Any) -> Any:
        with Unwatched():
            return compile_frame(*args, **options)

    compile_without_key.is_unwatched = True  # type: ignore[attr-defined]
    module._compile = compile_without_key


@contextlib.contextmanager
def hiding_from_guards() -> Iterator[None]:
    """Hide the watchers' dispatch key from Dynamo's guards in this thread.

    The guards compare the thread's dispatch keys: without this, watched and unwatched steps would compile separately.
    """
    native = library.load()
    native.hide_from_guards()
    try:
        yield
    finally:
        native.stop_hiding()


@contextlib.contextmanager
def noticing_compiles(notice: Callable[[], None], pause: Pause, timer: Timer | None) -> Iterator[None]:
    """Remove our hooks and watchers while the compiler works.

    Args:
        notice: called first when Dynamo begins to compile in this thread.
        pause: returns a context that is entered during compilation.
        timer: receives the seconds of compilation.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        yield
        compile_unwatched()  # the optimizer may have loaded it
        return
    leave_package_uncompiled()
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
        compiling.enter_context(pause())
        compiling.enter_context(Unwatched())

    def end(arguments: Any) -> None:
        compiling.close()
        show_regions()
        if timer is not None:
            timer.own_seconds += time.perf_counter() - begin

    handler.register_start_callback(start)
    handler.register_end_callback(end)
    compile_unwatched()
    try:
        yield
    finally:
        hiding.close()
        with contextlib.suppress(ValueError):  # `torch._dynamo.reset` has removed them
            handler.remove_start_callback(start)
        with contextlib.suppress(ValueError):
            handler.remove_end_callback(end)

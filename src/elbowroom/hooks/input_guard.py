"""Observes the inputs of a model, and enters watchers in the middle of a step.

A plain step, in which everything fits, has no watchers. New input shapes are the sign that a step may be larger than
those before it; by then the program may be inside contexts of its own.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from elbowroom.hooks.compiled_regions import Pause, stay_watched, undisturbed
from elbowroom.hooks.op_dispatch import dispatching_ops_to


class Inputs(NamedTuple):
    """Signature of one call of a model.

    Attributes:
        tensors: shapes and dtypes of all tensors in its arguments.
        has_gradients: whether autograd recorded the call. An evaluation takes less memory and time.
    """

    tensors: tuple[tuple[torch.Size, torch.dtype], ...]
    has_gradients: bool


Look = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None]

Inner = Callable[..., Any]
"""What a module would have called."""

Call = Callable[[torch.nn.Module, Inner, tuple[Any, ...], dict[str, Any]], Any]
"""Is called in place of a module's hooks and `forward`."""


def list_entries(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that the program calls: the model, or its children if it has no `forward` (a ModuleDict)."""
    forward = getattr(model.forward, "__func__", model.forward)
    if forward is not torch.nn.Module.forward:
        return [model]
    return [entry for child in model.children() for entry in list_entries(child)]


def _read_shape(tensor: torch.Tensor) -> torch.Size:
    """Return a tensor's shape; for a nested tensor, whose shape never equals another's, its number of elements."""
    return torch.Size((tensor.numel(),)) if tensor.is_nested else tensor.shape


def _list_tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """List the tensors in arguments. Avoids PyTorch's `tree_leaves`, which takes longer than some models, if it can."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) in (tuple, list):
            found += _list_tensors(value)
        elif value is not None and not isinstance(value, (int, float, str)):
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


@contextlib.contextmanager
def observe_inputs(
    model: torch.nn.Module,
    see: Callable[[Inputs], None],
    adopt: Callable[[list[torch.Tensor]], bool],
    most_calls: int | None = None,
) -> Iterator[Pause]:
    """Report the inputs of the model, or of the children that the program calls one by one.

    Args:
        see: receives the inputs of each call.
        adopt: receives the input tensors first, since they may be older than the step. Returns whether the ledger did
            not count one of them yet.
        most_calls: the hooks are removed after so many consecutive calls without such a tensor, since each costs some
            microseconds. None to keep them.

    Yields:
        A function that returns a context without our hooks: `torch.compile` would compile them into its code.
    """

    calls = 0

    @undisturbed
    def look(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal calls
        tensors = _list_tensors((*args, *kwargs.values()))
        if any(tensor._has_symbolic_sizes_strides and not tensor.is_nested for tensor in tensors):
            return  # the model is traced
        calls = 0 if adopt(tensors) else calls + 1
        if calls == most_calls:
            handles.close()
        see(Inputs(tuple((_read_shape(tensor), tensor.dtype) for tensor in tensors), torch.is_grad_enabled()))

    with contextlib.ExitStack() as handles:

        def attach() -> None:
            for entry in list_entries(model):
                handles.callback(_attach(entry, look))

        @contextlib.contextmanager
        def pause() -> Iterator[None]:
            handles.close()
            try:
                yield
            finally:
                if most_calls is None or calls < most_calls:
                    attach()

        attach()
        yield pause


def _attach(module: torch.nn.Module, look: Look) -> Callable[[], None]:
    """Call a function before each call of a module, outside of compiled code. Return a function that ends this.

    With a hook, PyTorch would call modules by a function that Dynamo compiles even where it leaves the module alone.
    """

    def call(module: torch.nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        look(module, args, kwargs)
        return inner(*args, **kwargs)

    return replace_call(module, call)


def leave_uncompiled(function: Callable[..., Any]) -> None:
    """Keep Dynamo from compiling calls of a function by itself, outside of what it compiles anyway.

    It would, for calls inside a compiled module that Dynamo does not compile as a whole.
    """
    frames: Any = torch._C._dynamo.eval_frame  # without the import of torch._dynamo, which takes seconds
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)


class _ReplacedCall:
    """Is a module's `_compiled_call_impl`. Copies and pickles of the module have None in its place.

    Of most modules PyTorch copies no `_compiled_call_impl`, but it does for those with a `__getstate__` of their own
    (LSTM), and for the replicas of `DataParallel`.
    """

    def __init__(self, module: torch.nn.Module, call: Call, before: Inner | None) -> None:
        self._module = weakref.ref(module)
        self._call = call
        self._before = before
        leave_uncompiled(call)
        leave_uncompiled(_ReplacedCall.__call__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        called = sys._getframe(1).f_locals.get("self")
        if isinstance(called, torch.nn.Module) and called is not module:
            return called._call_impl(*args, **kwargs)  # it has the attributes of the module
        return self._call(module, self._before or module._call_impl, args, kwargs)

    def is_of(self, module: torch.nn.Module) -> bool:
        """Tell whether this is a module's own."""
        return self._module() is module

    def drop(self, below: _ReplacedCall) -> bool:
        """Drop one that this one calls. Return whether it does."""
        if self._before is below:
            self._before = below._before
            return True
        return isinstance(self._before, _ReplacedCall) and self._before.drop(below)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def replace_call(module: torch.nn.Module, call: Call) -> Callable[[], None]:
    """Have PyTorch call a function in place of a module's hooks and `forward`. Return a function that ends this.

    Neither keeps the module alive.
    """
    name = "_compiled_call_impl"
    before = vars(module).get(name)
    if isinstance(before, _ReplacedCall) and not before.is_of(module):
        before = None  # a shallow copy has it
    vars(module)[name] = replaced = _ReplacedCall(module, call, before)
    reference = weakref.ref(module)

    def restore() -> None:
        attributes = {} if (module := reference()) is None else vars(module)
        top = attributes.get(name)
        if isinstance(top, _ReplacedCall) and top.drop(replaced):
            return
        if top is replaced:
            attributes[name] = before
            if before is None:
                del attributes[name]

    return restore


class CannotEnter(RuntimeError):
    """The program is at a point from which no context can be entered at the insertion point."""


class HookInsertionPoint:
    """Position in the nesting of contexts where a step begins, at which watchers can be entered later."""

    def __init__(self) -> None:
        self._thread, self._backward = threading.get_ident(), torch._C._current_graph_task_id()

    def _find_obstacle(self) -> str:
        """Return why no context can be entered now, or "". PyTorch keeps contexts per thread, and each backward node
        runs in copies of them that are dropped after it."""
        if threading.get_ident() != self._thread:
            return "it grows in another thread"
        if torch._C._current_graph_task_id() != self._backward:
            return "it grows inside a backward pass"
        return ""

    def enter(self, watcher: Any, stack: contextlib.ExitStack) -> None:
        """Enter a watcher here; closing `stack` leaves it.

        Raises:
            CannotEnter: the program is in another thread or in a backward pass.
        """
        if obstacle := self._find_obstacle():
            raise CannotEnter(obstacle)
        stack.enter_context(dispatching_ops_to(watcher))
        stay_watched()

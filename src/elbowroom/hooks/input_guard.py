"""Sees what a model is called with, and puts a step under watch in its middle.

Where everything fits, nothing is attached to a step. What tells that this one may be larger than those before it are
the shapes that the model is called with, and by then the program may be inside contexts of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from elbowroom.hooks.compiled_regions import Pause, may_run_compiled, stay_watched
from elbowroom.hooks.op_dispatch import dispatching_ops_to

Inputs = tuple[tuple[torch.Size, torch.dtype], ...]
"""Shapes and dtypes of all tensors in the arguments of one call."""

Look = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None]


def list_entries(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that a program calls: the model, or if it only holds others (a ModuleDict), those."""
    forward = getattr(model.forward, "__func__", model.forward)
    if forward is not torch.nn.Module.forward:
        return [model]
    return [entry for child in model.children() for entry in list_entries(child)]


def _read_shape(tensor: torch.Tensor) -> torch.Size:
    """Shape of a tensor; of a nested one, whose shape is like no other's, its number of elements."""
    return torch.Size((tensor.numel(),)) if tensor.is_nested else tensor.shape


def _list_tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """List the tensors in arguments. Flattening by PyTorch takes longer than some models, and few need it."""
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
    """Tell `see` what the model, or the parts that a program calls one by one, are called with.

    Args:
        adopt: told of the tensors before; they may have been there before anything was counted. Returns whether one was
            not counted yet.
        most_calls: calls in a row that bring no such tensor until no more are looked at, since each look takes some
            microseconds; None to look at all.

    Yields:
        What returns a context in which the model has no hooks of ours: the compiler would make them part of its code.
    """

    calls = 0

    def look(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal calls
        tensors = _list_tensors((*args, *kwargs.values()))
        calls = 0 if adopt(tensors) else calls + 1
        if calls == most_calls:
            handles.close()
        see(tuple((_read_shape(tensor), tensor.dtype) for tensor in tensors))

    # The compiler would compile what it is not told to leave alone, which costs some microseconds a call.
    hook = torch.compiler.disable(look) if may_run_compiled() else look
    with contextlib.ExitStack() as handles:

        def attach() -> None:
            for entry in list_entries(model):
                handles.callback(_attach(entry, hook, look))

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


def _attach(module: torch.nn.Module, hook: Look, look: Look) -> Callable[[], None]:
    """Call a hook whenever a module is called: of a compiled one (`module.compile()`) outside of its compiled code.
    Returns what undoes that."""
    compiled = module._compiled_call_impl
    if compiled is None:
        return module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove

    def call(*args: Any, **kwargs: Any) -> Any:
        look(module, args, kwargs)
        return compiled(*args, **kwargs)

    def detach() -> None:
        if module._compiled_call_impl is call:
            module._compiled_call_impl = compiled

    module._compiled_call_impl = call
    return detach


class CannotEnter(RuntimeError):
    """The program is at a point from which no context can be entered at the insertion point."""


class HookInsertionPoint:
    """A place among nested contexts: where a step begins. What is entered there later comes before what is inside."""

    def __init__(self) -> None:
        self._thread, self._backward = threading.get_ident(), torch._C._current_graph_task_id()

    def _find_obstacle(self) -> str:
        """Why nothing can be entered at this place for now; "" if it can be. PyTorch keeps contexts by thread, and each
        backward node runs in copies of them that are gone after it."""
        if threading.get_ident() != self._thread:
            return "it grows in another thread"
        if torch._C._current_graph_task_id() != self._backward:
            return "it grows inside a backward pass"
        return ""

    def enter(self, watcher: Any, stack: contextlib.ExitStack) -> None:
        """Enter a watcher at this place; `stack` leaves it.

        Raises:
            OutOfReach: it is in another thread, or in a backward pass.
        """
        if obstacle := self._find_obstacle():
            raise CannotEnter(obstacle)
        stack.enter_context(dispatching_ops_to(watcher))
        stay_watched()

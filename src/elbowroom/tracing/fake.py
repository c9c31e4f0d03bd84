"""Captures a step on fake tensors, which have shapes but no values: nothing is allocated, nothing changes."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from elbowroom.errors import TraceError, UsageError
from elbowroom.hooks.compiled_regions import refusing_compiled
from elbowroom.hooks.dispatch_keys import PausedWatchers
from elbowroom.hooks.storage_ids import get_plain_storage
from elbowroom.ir.trace import Trace
from elbowroom.progress import announcing
from elbowroom.tracing.gradients import telling_gradients
from elbowroom.tracing.iterators import IteratorTaken
from elbowroom.tracing.live import count_state
from elbowroom.tracing.residents import list_residents
from elbowroom.tracing.tracer import Tracer
from elbowroom.tracing.undo import undone

SETTLING_STEPS = 3
"""Limit on captured steps: the first differs from later ones, since optimizers create their state in it."""


def capture_fake(
    step: Callable[[], Any],
    model: torch.nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    name: str,
    device: torch.device,
) -> Trace:
    """Trace a settled step on fake tensors, without running it.

    The tensors of the model and the optimizers are replaced by fake ones, and restored afterwards. So are the Python
    objects reachable from the step that it changes (`undone`).

    Raises:
        UsageError: a FakeTensorMode is already active.
        TraceError: the step reads values (`.item()`, data-dependent shapes), uses ops without a fake implementation, or
            changes state that cannot be restored: it advances an iterator, or leaves fake tensors out of reach.
    """
    if any(isinstance(each, FakeTensorMode) for each in _get_current_dispatch_mode_stack()):
        raise UsageError("a FakeTensorMode is active; capture the step outside of it")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with (
            announcing("capturing a step on fake tensors", name),
            _quiet_log(),
            undone(step, model, *optimizers),
            _replaced_by_fakes(mode, model, optimizers),
            refusing_compiled(_refuse),
            mode,
        ):
            if not count_state(optimizers):
                step()  # creates the state; takes half as long untraced
            for _ in range(SETTLING_STEPS):
                before = count_state(optimizers)
                trace = _run(step, model, optimizers, name, device)
                if count_state(optimizers) == before:
                    break
        if left := _find_left(mode):
            raise TraceError(f"fake tensors of the step are still alive, {left}")
        return trace
    except (
        TraceError,
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        RuntimeError,  # GuardOnDataDependentSymNode, too
        NotImplementedError,
        AssertionError,
    ) as error:
        kind = "" if isinstance(error, (TraceError, IteratorTaken)) else f"{type(error).__name__}: "
        raise TraceError(
            f"the step cannot be captured on fake tensors ({kind}{str(error).splitlines()[0]}); "
            "`elbowroom.fit` goes on without: the first real step is captured instead, as `room.planned.trace`"
        ) from error


@contextlib.contextmanager
def _quiet_log() -> Iterator[None]:
    """Keep PyTorch from logging, with a traceback, what fails on fake tensors in this thread: the step runs without."""
    thread, log = threading.get_ident(), logging.getLogger(FakeTensorMode.__module__)

    def is_foreign(record: logging.LogRecord) -> bool:
        return threading.get_ident() != thread

    log.addFilter(is_foreign)
    try:
        yield
    finally:
        log.removeFilter(is_foreign)


def _refuse() -> NoReturn:
    raise TraceError("it calls a function compiled by `torch.compile`")


def _find_left(mode: FakeTensorMode) -> str:
    """Describe the fake tensors of a finished mode that are still alive, and their referrers; "" if there are none."""
    gc.collect()  # a graph may be part of a cycle
    left = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), FakeTensor) and getattr(each, "fake_mode", None) is mode
    ]
    if not left:
        return ""
    held = sorted({type(each).__name__ for each in gc.get_referrers(*left) if each is not left})
    return f"{len(left)} in all, held by a {' and a '.join(held) or 'global'}"


def _run(
    step: Callable[[], Any], model: torch.nn.Module, optimizers: Sequence[Optimizer], name: str, device: torch.device
) -> Trace:
    tracer = Tracer(name, device, model, list_residents(model, optimizers), fake=True)
    saved = _Hooks(tracer)
    with tracer, telling_gradients(tracer, model), torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        result = step()
    del result
    return tracer.finish(list_residents(model, optimizers))


class _Handle:
    """Placeholder for a saved tensor that does not keep it alive."""

    __slots__ = ("__weakref__", "geometry", "save")

    def __init__(self, save: int, geometry: tuple[Any, ...]) -> None:
        self.save, self.geometry = save, geometry


class _Hooks:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def pack(self, tensor: torch.Tensor) -> Any:
        with PausedWatchers((self._tracer,)):
            save = self._tracer.saved(tensor)
            storage = get_plain_storage(tensor, fake=True)
            if storage is None or isinstance(tensor, torch.nn.Parameter) or not isinstance(tensor, FakeTensor):
                handle = _Handle(save, (tensor.detach(),))
            else:
                lies = (tensor.shape, tensor.stride(), tensor.storage_offset())
                handle = _Handle(save, (storage.nbytes(), tensor.dtype, tensor.device, *lies))
            weakref.finalize(handle, self._tracer.save_released, save).atexit = False
            return handle

    def unpack(self, handle: _Handle) -> torch.Tensor:
        with PausedWatchers((self._tracer,)):
            if len(handle.geometry) == 1:
                tensor: torch.Tensor = handle.geometry[0]
            else:
                nbytes, dtype, device, shape, stride, offset = handle.geometry
                base = torch.empty(nbytes // dtype.itemsize, dtype=dtype, device=device)
                tensor = base.as_strided(shape, stride, offset)
            self._tracer.needed(handle.save, tensor)
            return tensor


@contextlib.contextmanager
def _replaced_by_fakes(mode: FakeTensorMode, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Replace every tensor of the job by a fake one, preserving sharing; restore all at exit."""
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            copy: torch.Tensor = mode.from_tensor(tensor.detach(), static_shapes=True)
            if isinstance(tensor, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
                if tensor.grad is not None:
                    copy.grad = mode.from_tensor(tensor.grad.detach(), static_shapes=True)
            fakes[id(tensor)] = copy
        return fakes[id(tensor)]

    def fake_state(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() == 0 and value.device.type == "cpu":
            number = value.item()  # optimizers read their step counter
            with mode:
                return torch.tensor(number, dtype=value.dtype)
        return fake(value)

    undo: list[Callable[[], None]] = []
    # Optimizers choose between the for-loop and the foreach implementation by the parameters' types.
    foreach_types = getattr(sys.modules[Optimizer.__module__], "_foreach_supported_types", None)
    try:
        if isinstance(foreach_types, list):
            foreach_types.append(FakeTensor)
            undo.append(lambda: foreach_types.remove(FakeTensor))
        for module in model.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for key, tensor in list(table.items()):
                    if tensor is not None:
                        undo.append(_putting_back(table, key, tensor))
                        table[key] = fake(tensor)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                # The learning rate too: a step may change it.
                undo.extend([_putting_back(group, key, value) for key, value in group.items()])
                group["params"] = [fake(parameter) for parameter in group["params"]]
            undo.append(_putting_back(optimizer.__dict__, "state", optimizer.state))
            optimizer.state = type(optimizer.state)(
                dict,
                {
                    fake(parameter): {key: fake_state(value) for key, value in state.items()}
                    for parameter, state in optimizer.state.items()
                },
            )
        yield
    finally:
        for put_back in reversed(undo):
            put_back()


def _putting_back(table: Any, key: str, value: Any) -> Callable[[], None]:
    def put_back() -> None:
        table[key] = value

    return put_back

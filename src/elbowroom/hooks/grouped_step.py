"""Runs an optimizer's step over a few parameters at a time, so that the state of all never has to be in memory at once.

Done for optimizers that update each parameter from its own gradient and state alone; others run whole. So do steps that
are compiled, as code for some of the parameters may give other bits, and those that the program has replaced, as its
code is to run once a step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import sys
import types
import typing
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as hooked
from torch.utils import _contextlib

from elbowroom.errors import ElbowroomError
from elbowroom.hooks.compiled_regions import is_in_compiled_call
from elbowroom.hooks.storage_ids import PLAIN_TENSORS, unwrap
from elbowroom.native import library
from elbowroom.ops.update_marks import end_update

PER_PARAMETER = frozenset(
    {f"torch.optim.{name}" for name in (
        "Adafactor", "Muon", "adadelta.Adadelta", "adagrad.Adagrad", "adam.Adam", "adamax.Adamax", "adamw.AdamW",
        "asgd.ASGD", "nadam.NAdam", "radam.RAdam", "rmsprop.RMSprop", "rprop.Rprop", "sgd.SGD",
        "sparse_adam.SparseAdam",
    )}
    | {"transformers.optimization.Adafactor"}
)  # fmt: skip
"""Optimizers that update a parameter from its gradient, its state and the options of its group alone."""

REPLACEABLE = frozenset(("step", "zero_grad"))
"""Methods that an optimizer may have of its own: the former is looked at, and the latter is not part of it."""

Slices = list[list[torch.nn.Parameter]]
"""Parameters to update together, by param group."""

Begin = Callable[[Sequence[torch.Tensor]], Sequence[object] | None]
"""Begins an update of tensors, and keeps them in memory as long as the result lives."""


def is_per_parameter(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer updates each parameter from its own gradient and state alone."""
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}" in PER_PARAMETER


def has_own_step(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer's `step` is that of its class, within nothing but PyTorch's own wrappers, and calls no
    function that the program has replaced.
    """
    kind = type(optimizer)
    folders = _find_folder(hooked), _find_folder(sys.modules[kind.__module__])
    own = frozenset((typing.__file__, _contextlib.__file__, __file__))
    step: Any = optimizer.step
    while (is_own := _is_defined_in(step, folders, own)) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    function = getattr(step, "__func__", step)
    if not is_own or function.__name__ != "step":
        return False
    if any(callable(each) and hasattr(kind, name) for name, each in vars(optimizer).items() if name not in REPLACEABLE):
        return False
    found = (function.__globals__.get(name) for name in function.__code__.co_names)
    if not all(_is_defined_in(each, folders, own) for each in found if isinstance(each, types.FunctionType)):
        return False
    group: Any = getattr(kind, "_init_group", None)  # which Dynamo wraps
    return group is None or _is_defined_in(group, (*folders, os.path.join(_find_folder(torch), "_dynamo")), own)


def _find_folder(module: Any) -> str:
    return os.path.dirname(str(module.__file__))


def _is_defined_in(function: Any, folders: Sequence[str], files: frozenset[str]) -> bool:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if not isinstance(code, types.CodeType):
        return False
    return code.co_filename in files or os.path.dirname(code.co_filename) in folders


def is_uniform(optimizer: Optimizer) -> bool:
    """Tell whether the way in which PyTorch updates parameters is the same for some of them as for all.

    By the types and devices of all it decides whether to update them by `_foreach_` ops.
    """
    return len({(type(each), each.device) for group in optimizer.param_groups for each in group["params"]}) == 1


PARTLY_UPDATED = (
    "an update had begun: some parameters may be updated, and one of them partly, so go on from a checkpoint"
)
"""Note on an error."""


class GroupedStep:
    """Replaces the `step` of one optimizer.

    Args:
        optimizer: one that `is_per_parameter` and `has_own_step`.
        find_group_bytes: returns the bytes of parameters to update together; None to update all at once.
        may_hold: tells whether so many bytes may be in memory at once.
        begin: begins an update of tensors, which it keeps in memory as long as the result lives; returns None if there
            is no room for all of them at once.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        find_group_bytes: Callable[[], int | None],
        may_hold: Callable[[int], bool],
        begin: Begin,
    ) -> None:
        self._optimizer = optimizer
        self._may_hold = may_hold
        self._begin = begin
        self._find_group_bytes = find_group_bytes
        self._before = vars(optimizer).get("step")  # of a learning-rate scheduler, for instance
        inner = optimizer.step
        of_class = inspect.getattr_static(type(optimizer), "step")

        @functools.wraps(inner.__func__ if isinstance(inner, types.MethodType) else inner)
        def step(optimizer: Optimizer, *args: Any, **options: Any) -> Any:
            is_inherited = self._before is None
            if is_inherited and inspect.getattr_static(type(optimizer), "step") is not of_class:  # replaced since
                return type(optimizer).step(optimizer, *args, **options)
            group_bytes = self._find_group_bytes()
            if group_bytes is None or not is_uniform(optimizer) or is_in_compiled_call():
                return inner(*args, **options)
            return self._run(inner, group_bytes, args, options)

        self._step: types.MethodType | None = types.MethodType(step, optimizer)
        optimizer.step = self._step  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give the optimizer its own step back."""
        if self._step is not None and vars(self._optimizer).get("step") is self._step:
            del self._optimizer.step
            if self._before is not None:
                self._optimizer.step = self._before  # type: ignore[method-assign]
        self._step = None  # else it keeps the optimizer until the garbage collector runs
        self._find_group_bytes = lambda: None  # a scheduler may have wrapped ours since

    def _run(self, step: Callable[..., Any], group_bytes: int, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        optimizer = self._optimizer
        args = (optimizer, *args)
        before = [*hooked._global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]
        for hook in before:
            args, options = hook(optimizer, args, options) or (args, options)
        with _without_hooks(hooked, "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"), \
                _without_hooks(optimizer, "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):  # fmt: skip
            result = self._run_unhooked(step, group_bytes, *args[1:], **options)
        for hook in [*optimizer._optimizer_step_post_hooks.values(), *hooked._global_optimizer_post_hooks.values()]:
            hook(optimizer, args, options)
        return result

    def _run_unhooked(
        self, step: Callable[..., Any], group_bytes: int, closure: Callable[[], Any] | None = None, **options: Any
    ) -> Any:
        result = None
        if closure is not None:
            whole = [group["params"] for group in self._optimizer.param_groups]

            def call() -> Any:
                with self._restricted(whole):
                    return closure()

            with self._restricted([[] for _ in whole]):  # so that the optimizer calls it, and updates nothing
                result = step(call, **options)
        has_begun = False
        try:
            for slices in cut(self._optimizer, group_bytes):
                with self._holding(slices), self._restricted(slices):
                    has_begun = True
                    step(**options)
        except (ElbowroomError, torch.OutOfMemoryError) as error:
            if has_begun:
                error.add_note(PARTLY_UPDATED)
            raise
        return result

    @contextlib.contextmanager
    def _holding(self, slices: Slices) -> Iterator[None]:
        """Have all that an update uses in memory throughout it, unless there is too much of that.

        So a tier that fails does so before anything is changed.
        """
        used = self._list_used(slices)
        if not self._may_hold(library.load().count_storage_bytes(used)):
            used = []
        held = self._begin(used)
        if held is None:  # no room beside what the program holds: the update's ops run in slices, or are refused
            used = []
            held = self._begin(used)
        try:
            yield
        finally:
            del held
        end_update(used)

    def _list_used(self, slices: Slices) -> list[torch.Tensor]:
        """List some parameters, their gradients and their state, as far as these are on the parameters' device.

        Empty if a gradient is sparse: its update makes copies of it and need not use all of the rest.
        """
        parameters = list(itertools.chain.from_iterable(slices))
        state = self._optimizer.state
        listed: list[torch.Tensor] = []
        for parameter in parameters:
            if state and (own := state.get(parameter)):
                listed += [each for each in own.values() if isinstance(each, torch.Tensor)]
            listed.append(parameter)
            if (gradient := parameter.grad) is not None:
                listed.append(gradient)
        if not PLAIN_TENSORS.issuperset(map(type, listed)):
            listed = [part for each in listed for part in unwrap(each)]
        if any(each.layout is not torch.strided for each in listed):
            return []
        device = parameters[0].device if parameters else None  # of all parameters (`is_uniform`)
        return [each for each in listed if each.device == device]

    @contextlib.contextmanager
    def _restricted(self, slices: Slices) -> Iterator[None]:
        """Have the optimizer's groups hold these parameters only."""
        groups = self._optimizer.param_groups
        kept = [group["params"] for group in groups]
        try:
            for group, parameters in zip(groups, slices, strict=True):
                group["params"] = parameters
            yield
        finally:
            for group, parameters in zip(groups, kept, strict=True):
                group["params"] = parameters


@contextlib.contextmanager
def _without_hooks(owner: Any, *names: str) -> Iterator[None]:
    """Have an object hold no hooks under these names."""
    kept = [getattr(owner, name) for name in names]
    try:
        for name in names:
            setattr(owner, name, OrderedDict())
        yield
    finally:
        for name, hooks in zip(names, kept, strict=True):
            setattr(owner, name, hooks)


def cut(optimizer: Optimizer, group_bytes: int) -> Iterator[Slices]:
    """Yield the parameters to update together: in order, at most `group_bytes` of them or a single one."""
    groups: Sequence[dict[str, Any]] = optimizer.param_groups
    slices: Slices = [[] for _ in groups]
    nbytes = 0
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if parameter.grad is None:
                continue  # the step would skip it
            if nbytes and nbytes + parameter.nbytes > group_bytes:
                yield slices
                slices = [[] for _ in groups]
                nbytes = 0
            slices[index].append(parameter)
            nbytes += parameter.nbytes
    if any(slices) or not nbytes:
        yield slices


def find_groupable(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """List the optimizers that can be grouped, those that others wrap included."""
    found = []
    for optimizer in optimizers:
        inner = optimizer
        for _ in itertools.repeat(None, 4):
            wrapped = vars(inner).get("optimizer")
            if not isinstance(wrapped, Optimizer):
                break
            inner = wrapped
        if is_per_parameter(inner) and has_own_step(inner):
            found.append(inner)
    return found

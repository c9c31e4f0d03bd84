"""Your own model: a function, named `package.module:function`, that returns (model, optimizer, step)."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from elbowroom.errors import UsageError
from elbowroom.workloads import Options, Workload, sources
from elbowroom.workloads._packages import unknown_name


def build_workload(spec: str, options: Options) -> Workload:
    """Call a function of the user's own and take what it returns as the workload.

    The options that were given are passed by keyword, except the seed, which torch's generators have when the function
    is called; it gets that too if it has a parameter for it. Errors inside the function are passed on as they are.

    Raises:
        UsageError: there is no such module or function, it has no parameter for an option that was given, or it
            returns something else.
    """
    module_name, _, function_name = spec.partition(":")
    with _current_folder_importable():
        module = _import_module(module_name, spec)
        function = _find_function(module, function_name)
        returned = function(**_keywords(function, spec, options))
    if isinstance(returned, Workload):
        return returned
    return _from_parts(returned, spec)


@contextlib.contextmanager
def _current_folder_importable() -> Iterator[None]:
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        # The function may have changed the path itself: take back our entry and no other.
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def _import_module(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ModuleNotFoundError, TypeError, ValueError) as error:
        missing = getattr(error, "name", None)
        # A package that the user's module needs and does not find is not this module missing.
        if isinstance(error, ModuleNotFoundError) and missing != name and not name.startswith(f"{missing}."):
            raise
        if not isinstance(error, ModuleNotFoundError) and all(part.isidentifier() for part in name.split(".")):
            raise
        raise UsageError(
            f"{spec!r} is neither of {', '.join(sources())} nor found as a module: "
            f"there is no {missing or name!r} in {os.getcwd()} or on Python's path"
        ) from error


def _find_function(module: ModuleType, name: str) -> Callable[..., Any]:
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        if own:
            raise unknown_name(f"module {module.__name__}", "function", name, own)
        raise UsageError(f"module {module.__name__} has no function {name!r}, nor any other")
    function: Callable[..., Any] = getattr(module, name)
    if not callable(function):
        raise UsageError(f"{module.__name__}:{name} is a {type(function).__name__}, not a function")
    return function


def _keywords(function: Callable[..., Any], spec: str, options: Options) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    demanded = {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    known = {field.name for field in dataclasses.fields(Options)} - {"given"}
    unanswered = sorted(demanded - (known & {p.name for p in named}))
    if unanswered:
        raise UsageError(f"{spec} demands {', '.join(unanswered)}, but options are: {', '.join(sorted(known))}")
    accepted = {p.name for p in named}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        accepted |= set(options.given)
    refused = tuple(name for name in options.given if name not in accepted and name != "seed")
    options.refuse(refused, spec, f"it takes {', '.join(sorted(accepted & known)) or 'no options'}")
    # What the function demands and nobody gave is answered with our default.
    passed = accepted & (set(options.given) | demanded)
    return {name: getattr(options, name) for name in sorted(passed)}


def _from_parts(returned: object, spec: str) -> Workload:
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise UsageError(f"{spec} returns (model, optimizer, step) or a Workload, not {type(returned).__name__}")
    model, optimizer, own_step = returned
    for value, kind in ((model, nn.Module), (optimizer, torch.optim.Optimizer)):
        if not isinstance(value, kind):
            raise UsageError(
                f"{spec} returns (model, optimizer, step), but where a torch {kind.__name__} belongs "
                f"there is a {type(value).__name__}"
            )
    if not callable(own_step):
        raise UsageError(f"{spec} returns (model, optimizer, step), but its step is a {type(own_step).__name__}")

    def step() -> torch.Tensor:
        loss = own_step()
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"the step of {spec} returns the loss as a tensor, not {type(loss).__name__}")
        return loss.detach()

    def forward() -> torch.Tensor:
        raise UsageError(f"{spec} gives a whole step only; return a Workload from it to run the forward pass alone")

    return Workload(name=spec, model=model, optimizer=optimizer, step=step, forward=forward, batch={})

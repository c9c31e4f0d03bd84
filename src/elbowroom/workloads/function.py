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
    """Call a user's function and build the workload from its result.

    The given options are passed by keyword. The seed, already set in torch's generators, is only passed if the function
    has a parameter for it. Errors inside the function propagate.

    Raises:
        UsageError: the module or function does not exist, the function has no parameter for a given option, or it
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
        # The function may have changed the path itself: remove only our entry.
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def _import_module(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ModuleNotFoundError, TypeError, ValueError) as error:
        missing = getattr(error, "name", None)
        # Another missing module is one that the user's module imports: pass that error on.
        if isinstance(error, ModuleNotFoundError) and missing != name and not name.startswith(f"{missing}."):
            raise
        if not isinstance(error, ModuleNotFoundError) and all(part.isidentifier() for part in name.split(".")):
            raise
        raise UsageError(
            f"{spec!r} is neither from {', '.join(sources())} nor a module: "
            f"there is no {missing or name!r} in {os.getcwd()} or on Python's path"
        ) from error


def _find_function(module: ModuleType, name: str) -> Callable[..., Any]:
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        if own:
            raise unknown_name(f"module {module.__name__}", "function", name, own)
        raise UsageError(f"module {module.__name__} has no functions, so no {name!r}")
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
        raise UsageError(f"{spec} requires {', '.join(unanswered)}, but the options are: {', '.join(sorted(known))}")
    accepted = {p.name for p in named}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        accepted |= set(options.given)
    refused = tuple(name for name in options.given if name not in accepted and name != "seed")
    options.refuse(refused, spec, f"it takes {', '.join(sorted(accepted & known)) or 'no options'}")
    # Required parameters that were not given get our defaults.
    passed = accepted & (set(options.given) | demanded)
    return {name: getattr(options, name) for name in sorted(passed)}


def _from_parts(returned: object, spec: str) -> Workload:
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise UsageError(f"{spec} must return (model, optimizer, step) or a Workload, not {type(returned).__name__}")
    model, optimizer, own_step = returned
    for value, kind in ((model, nn.Module), (optimizer, torch.optim.Optimizer)):
        if not isinstance(value, kind):
            raise UsageError(
                f"{spec} must return (model, optimizer, step), but returns a {type(value).__name__} instead of a torch "
                f"{kind.__name__}"
            )
    if not callable(own_step):
        raise UsageError(f"{spec} must return (model, optimizer, step), but its step is a {type(own_step).__name__}")

    def step() -> torch.Tensor:
        loss = own_step()
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"the step of {spec} must return the loss as a tensor, not {type(loss).__name__}")
        return loss.detach()

    def forward() -> torch.Tensor:
        raise UsageError(f"{spec} returns a whole step; to run the forward pass alone, it must return a Workload")

    return Workload(name=spec, model=model, optimizer=optimizer, step=step, forward=forward, batch={})

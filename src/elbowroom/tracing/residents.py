"""Lists the tensors that a job keeps between steps: parameters, buffers, gradients, optimizer state."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from elbowroom.hooks.module_paths import find_module_path
from elbowroom.hooks.sharded import list_bucketed
from elbowroom.hooks.storage_ids import PLAIN_TENSORS, get_gradient, get_plain_storage, is_on, unwrap
from elbowroom.ir.trace import Role


class Resident(NamedTuple):
    """A tensor that a job keeps between steps.

    Attributes:
        label: display name.
        module: path of the module that owns it or its parameter; None if no module does.
    """

    tensor: torch.Tensor
    role: Role
    label: str
    module: str | None


def list_residents(model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> list[Resident]:
    """Return every tensor that a job keeps between steps, possibly with repetitions.

    Wrapper subclasses are replaced by the tensors that they wrap (`unwrap`). Gradients in buckets stay, as inputs
    do.
    """
    parameters = [
        Resident(each, Role.PARAMETER, name, find_module_path(name)) for name, each in model.named_parameters()
    ]
    buffers = [Resident(each, Role.BUFFER, name, find_module_path(name)) for name, each in model.named_buffers()]
    owners = {id(each.tensor): each.module for each in parameters}
    states: list[Resident] = []
    for index, optimizer in enumerate(optimizers):
        strange = [each for each in _list_updated(optimizer) if id(each) not in owners]
        parameters += [Resident(each, Role.PARAMETER, f"optimizer {index} parameter", None) for each in strange]
        states += [
            Resident(each, Role.OPTIMIZER_STATE, key, owners.get(id(parameter)))
            for parameter, key, each in _iterate_state(optimizer)
        ]
    bucketed = {id(each) for each in list_bucketed(model)}
    gradients = [
        Resident(gradient, Role.INPUT if id(tensor) in bucketed else Role.GRADIENT, f"gradient of {name}", module)
        for tensor, _, name, module in parameters
        if (gradient := get_gradient(tensor)) is not None
    ]
    listed = [*parameters, *buffers, *states, *gradients]
    return [each._replace(tensor=part) for each in listed for part in unwrap(each.tensor)]


def list_resident_tensors(model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """Return the tensors of `list_residents` without their labels. Cost: less than a microsecond per tensor."""
    parameters, others = _list_kept(model, optimizers)
    gradients = [gradient for each in parameters if (gradient := get_gradient(each)) is not None]
    listed = [*parameters, *others, *gradients]
    if PLAIN_TENSORS.issuperset(map(type, listed)):
        return listed
    return [part for each in listed for part in unwrap(each)]


def list_attribute_tensors(model: torch.nn.Module, device: torch.device) -> list[torch.Tensor]:
    """Return plain tensors of a device that modules hold as attributes, such as pruned weights.

    Left out is memory that PyTorch has not allocated, such as NumPy's or a mapped file's.
    """
    held = (value for module in model.modules() for value in vars(module).values())
    return [
        each
        for each in held
        if type(each) is torch.Tensor
        and is_on(each, device)
        and (storage := get_plain_storage(each)) is not None
        and storage.resizable()
    ]


def list_kept_tensors(model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """Return parameters, buffers and optimizer state, as the job holds them: without gradients, and not unwrapped."""
    parameters, others = _list_kept(model, optimizers)
    return parameters + others


def _list_kept(
    model: torch.nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters, and the buffers and optimizer state.

    A room calls this in every step, so it traverses the modules itself: `Module.parameters()` takes several times as
    long.
    """
    kept: list[torch.Tensor | None] = []
    parameters: list[torch.Tensor | None] = []
    modules, seen = [model], set[int]()
    for module in modules:  # grows during the loop
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        has: Any = module.__dict__
        if "_parameters" not in has:  # what `torch.jit.trace` returns keeps them elsewhere
            has = {name: getattr(module, name) for name in ("_parameters", "_buffers", "_modules")}
        if own := has["_parameters"]:
            parameters += own.values()
        if own := has["_buffers"]:
            kept += own.values()
        if own := has["_modules"]:
            modules += own.values()
    known = set(map(id, parameters))
    for optimizer in optimizers:
        parameters += [each for each in _list_updated(optimizer) if id(each) not in known]
        for state in optimizer.state.values():
            for value in state.values():
                kept += (value,) if isinstance(value, torch.Tensor) else _iterate_tensors(value)
    return [each for each in parameters if each is not None], [each for each in kept if each is not None]


def _list_updated(optimizer: Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _iterate_state(optimizer: Optimizer) -> Iterator[tuple[object, str, torch.Tensor]]:
    """Yield the parameter, key and tensor of each entry."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            for each in _iterate_tensors(value):
                yield parameter, str(key), each


def _iterate_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of one entry: L-BFGS keeps lists of them, Shampoo dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, deque)):
        for each in value:
            yield from _iterate_tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _iterate_tensors(each)


class OptimizerStates:
    """Notices when optimizers have other parameters or state, as after `load_state_dict`.

    These may come from before `fit`.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._firsts: list[weakref.ref[torch.Tensor]] = []

    def were_replaced(self) -> bool:
        """Tell whether an optimizer's first tensors are others than at the last call."""
        found = [each for one in self._optimizers for each in _list_firsts(one)]
        known = [each() for each in self._firsts]
        self._firsts = [weakref.ref(each) for each in found]
        return len(found) != len(known) or any(map(operator.is_not, found, known))


def _list_firsts(optimizer: Optimizer) -> list[torch.Tensor]:
    states = (each for _, _, each in _iterate_state(optimizer))
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    return [*itertools.islice(parameters, 1), *itertools.islice(states, 1)]


class FirstUpdates:
    """Notices the first update of each optimizer, with which its state comes.

    A program may call backward in several steps before that.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._waiting = {each: _read_versions(each) for each in optimizers}

    def are_over(self) -> bool:
        """Tell whether all optimizers have state, or have changed a parameter."""
        if self._waiting:
            self._waiting = {each: before for each, before in self._waiting.items() if not _has_updated(each, before)}
        return not self._waiting


def _has_updated(optimizer: Optimizer, before: dict[int, int]) -> bool:
    after = _read_versions(optimizer)
    return bool(optimizer.state) or any(before.get(key, version) != version for key, version in after.items())


def _read_versions(optimizer: Optimizer) -> dict[int, int]:
    return {id(each): each._version for each in _list_updated(optimizer) if not each.is_inference()}

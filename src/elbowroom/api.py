"""The public functions: `fit`, `capture` and `smallest_budget`."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from elbowroom._family import get
from elbowroom.advice import advise
from elbowroom.config import BUDGET_VARIABLE, Config, read_budget_variable, read_config
from elbowroom.cost.price import price
from elbowroom.errors import Infeasible, TraceError, UsageError
from elbowroom.hardware.memory import parse_budget
from elbowroom.hardware.past_times import PastTimes
from elbowroom.hardware.profile_store import load_or_probe
from elbowroom.hooks.several_models import SeveralModels, list_models
from elbowroom.hooks.sharded import find_sharded, find_wrapper, is_sharded
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.trace import Trace
from elbowroom.ir.unused_state import leave_out_unused_state
from elbowroom.native import library
from elbowroom.planner.comparison.smallest_budget import find_smallest
from elbowroom.planner.options import Manages, find_managed, find_strategy
from elbowroom.planner.problem import pose
from elbowroom.residency import policies
from elbowroom.room import Room
from elbowroom.runtime.state_pager import COMING, may_leave
from elbowroom.runtime.update_groups import grouping
from elbowroom.shared_lease import SharedLease, run_within_lease
from elbowroom.tracing.fake import capture_fake
from elbowroom.tracing.residents import list_resident_tensors

Models = torch.nn.Module | Sequence[torch.nn.Module]
"""One model, or several that a step uses, the trained one first."""

MOST_GROUPINGS = 4
"""Captures with ever smaller groups of the optimizer's step, until the smallest budget no longer depends on them."""


def fit(
    model: Models,
    optimizer: Optimizer | Iterable[Optimizer],
    memory_budget: int | float | str | SharedLease | None = None,
    *,
    step: Callable[[], Any] | None = None,
    profile: HardwareProfile | None = None,
    **options: Any,
) -> Room:
    """Fit a training job into a memory budget.

        room = elbowroom.fit(model, optimizer, memory_budget="8GiB")
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    Losses, gradients and parameters are bit for bit those of the same loop without Elbowroom.

    A training step begins when the loop calls the model, or a part of it, in training mode with gradients on, and ends
    with the optimizer's step; with several, when each has stepped. A loop that knows better says so: `with
    room.step():` around one whole step, from the first step on.

    Args:
        model: any module with all of its parameters on one device; or a list of the modules that a step uses, such as a
            GAN's two, or a model with a frozen teacher and an average of its weights. All of them may leave the device.
        optimizer: one or several.
        memory_budget: bytes the job may hold on that device: a number, "8GiB" or "8G" (1024), "8GB" (1000), or "60%"
            of the device's memory; or "shared": a lease of the device's broker (`elbowroom share`), which may change
            between steps, and which the job awaits; or one of `wait_for_lease`. By default $ELBOWROOM_MEMORY_BUDGET.
        step: function that does one whole training step, captured ahead on fake tensors (nothing runs or changes), so
            that the first step follows a plan. Without it, and where that fails, the first steps run capacity-first.
        profile: profile of this machine from `probe`; by default one that it measured within a day, or one that is
            measured now, within the budget, in some seconds.
        **options: fields of `elbowroom.config.Config`, such as strategy, spill_folder, host_bytes and manages.

    Raises:
        UnknownMember: the policy or strategy does not exist.
        UsageError: the budget or an argument is malformed; the model has no parameters, is on two devices, is sharded
            otherwise than by fully_shard, or has a room; the spill folder is not writable; ranks have other models.
        RankLost, RanksDiffer: another rank does not come, or differs.
        Infeasible: no plan of `step` fits the budget, and it would not fit with ops in slices either.
    """
    return open_room(model, optimizer, memory_budget, step=step, profile=profile, finds_steps=True, **options)


def open_room(
    model: Models,
    optimizer: Optimizer | Iterable[Optimizer],
    memory_budget: int | float | str | SharedLease | None = None,
    *,
    step: Callable[[], Any] | None = None,
    profile: HardwareProfile | None = None,
    finds_steps: bool = False,
    **options: Any,
) -> Room:
    """Fit a training job. Arguments and errors: as for `fit`.

    Args:
        finds_steps: whether steps begin and end at the loop's calls, until the program begins one.
    """
    wrappers = [find_wrapper(each) for each in list_models(gather_models(model))]  # whose gradient buckets count
    optimizers = list_optimizers(optimizer)
    config = check_arguments(memory_budget, step=step, profile=profile, **options)
    model = gather_models(wrappers)
    device = find_device(model)
    budget = _read_budget(memory_budget)

    def make(nbytes: int, lease: SharedLease | None = None) -> Room:
        return Room(
            model, optimizers, nbytes, config, device=device, step=step, profile=profile, shared=lease,
            finds_steps=finds_steps,
        )  # fmt: skip

    try:
        if isinstance(budget, SharedLease) or budget == "shared":
            lease = budget if isinstance(budget, SharedLease) else None
            return run_within_lease(model, optimizers, config, device, make, lease)
        return make(parse_budget(budget, device))
    except Infeasible as error:
        advise(error, model, optimizers, moves_state=config.manages == "everything")
        raise


def check_arguments(
    memory_budget: int | float | str | SharedLease | None,
    *,
    step: Callable[[], Any] | None = None,
    profile: HardwareProfile | None = None,
    **options: Any,
) -> Config:
    """Check the arguments of `fit` without a model, and return its options.

    Raises:
        UsageError: as for `fit`.
    """
    config = read_config(**options)
    get(policies, config.policy, "Policy")
    find_strategy(config.strategy)
    _check_options(step, profile)
    budget = _read_budget(memory_budget)
    if not isinstance(budget, SharedLease) and budget != "shared":
        parse_budget(budget, None)
    return config


def _read_budget(memory_budget: int | float | str | SharedLease | None) -> int | float | str | SharedLease:
    """Return the budget as given, or that of the environment."""
    if memory_budget is None:
        memory_budget = read_budget_variable()
    if memory_budget is None:
        raise UsageError(f"fit needs a memory_budget, or the variable {BUDGET_VARIABLE}")
    return memory_budget


def smallest_budget(
    model: Models,
    optimizer: Optimizer | Iterable[Optimizer],
    step: Callable[[], Any],
    *,
    profile: HardwareProfile | None = None,
    **options: Any,
) -> int:
    """Find the smallest `memory_budget`, in bytes, with which this training step has a plan. Ops in slices need less.

    The step is captured on fake tensors (nothing runs or changes) and planned. Workspace inside ops is estimated; a
    few ops (oneDNN's LSTM) take more than estimated. The result is for mode="auto".

    Args:
        model, optimizer, step, profile, **options: as for `fit`. Strategy, `host_bytes` and `min_offload_bytes` count.

    Raises:
        UsageError: as for `fit`; or mode="dynamic", which makes no plan.
        TraceError: the step reads tensor values, uses something that cannot be faked, or never calls backward. Run one
            step in a room with a large budget instead, and plan `room.planned.trace`.
        Infeasible: `host_bytes` is too small for any budget.
    """
    config, model = read_config(**options), gather_models(model)
    device = find_device(model)
    if config.mode == "dynamic":
        raise UsageError('smallest_budget plans the step, but mode="dynamic" makes no plan: leave out mode')
    managed = find_managed(config.strategy, config.manages)

    def capture_used(memory_budget: int | None = None) -> Trace:
        trace = capture(step, model, optimizer, memory_budget=memory_budget)
        return leave_out_unused_state(trace, config.min_offload_bytes) if managed is Manages.EVERYTHING else trace

    trace = capture_used()
    if profile is None:
        profile = load_or_probe(str(device), spill_folder=config.spill_folder, is_enabled=config.profile_store)
    past = PastTimes(profile, is_enabled=config.op_time_store).load()
    floor_bytes = sys.maxsize
    for _ in range(MOST_GROUPINGS if managed is Manages.EVERYTHING else 0):
        costs = price(trace, profile, past=past)
        problem = pose(trace, costs, 1, min_offload_bytes=config.min_offload_bytes, manages=managed)
        if problem.floor.peak_bytes >= floor_bytes:
            break  # smaller groups of the optimizer's step change nothing
        floor_bytes = problem.floor.peak_bytes
        trace = capture_used(floor_bytes)
    return find_smallest(
        trace, price(trace, profile, past=past), strategy=config.strategy, min_offload_bytes=config.min_offload_bytes,
        host_bytes=config.host_bytes, manages=config.manages,
    )  # fmt: skip


def capture(
    step: Callable[[], Any],
    model: Models,
    optimizer: Optimizer | Iterable[Optimizer],
    *,
    name: str | None = None,
    memory_budget: int | float | str | None = None,
) -> Trace:
    """Capture one training step on fake tensors: nothing is allocated, run or changed.

    Args:
        memory_budget: capture the step as a room with this budget runs it if the model's state may leave: optimizers
            update a few parameters at a time. By default the step is captured as it is without a room.

    Raises:
        UsageError: the model has no parameters, is on two devices or is sharded; an argument has the wrong type.
        TraceError: the step reads tensor values, uses something that cannot be faked, or never calls backward.
    """
    model, optimizers = gather_models(model), list_optimizers(optimizer)
    device = find_device(model)
    _check_step(step)
    if is_sharded(model):
        raise UsageError(
            "the model is sharded by fully_shard, whose collectives cannot run ahead: capture a step in a room instead"
        )
    with contextlib.nullcontext() if memory_budget is None else _grouping(model, optimizers, memory_budget, device):
        trace = capture_fake(step, model, optimizers, name=name or type(list_models(model)[0]).__name__, device=device)
    if not trace.needs:
        raise TraceError("the step never calls backward, so there is nothing to plan")
    return trace


def _grouping(
    model: torch.nn.Module, optimizers: tuple[Optimizer, ...], memory_budget: int | float | str, device: torch.device
) -> contextlib.AbstractContextManager[None]:
    budget_bytes = parse_budget(memory_budget, device)
    held_bytes = library.load().count_storage_bytes(list_resident_tensors(model, optimizers))
    if not may_leave(COMING * held_bytes, budget_bytes):
        return contextlib.nullcontext()
    return grouping(optimizers, budget_bytes)


def gather_models(model: Models) -> torch.nn.Module:
    """Return one or several models as one.

    Raises:
        UsageError: `model` is not a module, or the list is empty or has something else in it.
    """
    if isinstance(model, torch.nn.Module):
        return model
    if not isinstance(model, (list, tuple)):
        raise UsageError(f"expected a torch.nn.Module as the model, or a list of them, not {_name_type(model)}")
    for each in model:
        if not isinstance(each, torch.nn.Module):
            raise UsageError(f"expected torch.nn.Modules as the models; this list has {_name_type(each)} in it")
    if not model:
        raise UsageError("the list of models is empty, so there is nothing to train")
    return SeveralModels(model) if len(model) > 1 else model[0]


def find_device(model: torch.nn.Module) -> torch.device:
    """Return the one device of a model's parameters.

    Raises:
        UsageError: `model` has no parameters or some without a shape, is on several devices or on one that is neither
            CPU nor CUDA, or is sharded.
    """
    if sharded := find_sharded(model):
        raise UsageError(
            f"the model is spread over several devices ({sharded}); Elbowroom manages models on one device, and those "
            "of DistributedDataParallel and fully_shard"
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1:
        raise UsageError(
            f"the model is on {devices}; Elbowroom manages one device: move it there with model.to(...)"
            if devices
            else "the model has no parameters, so there is nothing to train"
        )
    if any(
        isinstance(each, (UninitializedParameter, UninitializedBuffer))
        for each in itertools.chain(model.parameters(), model.buffers())
    ):
        raise UsageError("the model has parameters without a shape (lazy modules): run one forward pass before fit")
    device = torch.device(devices[0])
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"the model is on {device}; Elbowroom manages the memory of CPUs and CUDA devices")
    return device


def list_optimizers(optimizer: Optimizer | Iterable[Optimizer]) -> tuple[Optimizer, ...]:
    """Return one or several optimizers as a tuple.

    Raises:
        UsageError: one of them is not an optimizer.
    """
    expected = "expected a torch.optim.Optimizer, or a list of them, as the optimizer"
    if isinstance(optimizer, Optimizer):
        return (_unwrap(optimizer),)
    if isinstance(optimizer, (torch.nn.Module, str)) or not isinstance(optimizer, Iterable):
        raise UsageError(f"{expected}, not {_name_type(optimizer)}")
    found = tuple(optimizer)
    for item in found:
        if not isinstance(item, Optimizer):
            raise UsageError(f"{expected}; this list has {_name_type(item)} in it")
    return tuple(map(_unwrap, found))


def _unwrap(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside another one, which keeps it in its attribute `optimizer`, as Accelerate's does.

    `PostLocalSGDOptimizer` takes no hooks, as it does not call `Optimizer.__init__`, and has it in `optim`.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    takes_hooks = hasattr(optimizer, "_optimizer_step_post_hooks")
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) and not takes_hooks else optimizer


def _check_options(step: object, profile: object) -> None:
    if step is not None:
        _check_step(step)
    if profile is not None and not isinstance(profile, HardwareProfile):
        raise UsageError(f"profile is a HardwareProfile, as `elbowroom.probe` returns it, not {_name_type(profile)}")


def _check_step(step: object) -> None:
    if not callable(step):
        raise UsageError(f"step must be a function that does one training step, not {_name_type(step)}")


def _name_type(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else type(value).__name__

"""Finds the training jobs of a program: its optimizers as they are made, and the modules that they train."""

from __future__ import annotations

import dataclasses
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elbowroom.hooks.attachment import is_marked
from elbowroom.hooks.compiled_calls import listen
from elbowroom.hooks.compiled_regions import leave_package_uncompiled, undisturbed
from elbowroom.hooks.input_guard import leave_uncompiled
from elbowroom.hooks.optimizer_hooks import hook_all_steps
from elbowroom.hooks.storage_ids import PLAIN_TENSORS, get_gradient
from elbowroom.optimizer_steps import is_in_backward, starts_training


@dataclasses.dataclass(frozen=True)
class FoundJob:
    """Modules and optimizers that a program trains.

    Attributes:
        model: owns all parameters of the optimizers. A module without `forward` if the program calls several.
        optimizers: none if the program updates the parameters itself.
        called: the module that the program is about to call; None if an optimizer's step, or a backward pass without
            any optimizer, was seen first.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    called: nn.Module | None


class JobFinder:
    """Watches for the first training call of a module whose parameters an optimizer holds.

    Args:
        found: called with a job before that call, or after an optimizer's step if no call was seen.
        is_over: called with another optimizer that is made after a job was found. Returns True if a new job begins.
        went_back: called after each `Tensor.backward` while a job without an optimizer runs.
        failed: called when `Tensor.backward` raises an error.

    `Optimizer.__init__` and `Tensor.backward` are replaced, and `nn.Module.__call__` from the first optimizer to its
    job, but not in compiled functions. The first call of one that may train begins a job, too.
    """

    def __init__(
        self,
        found: Callable[[FoundJob], None],
        is_over: Callable[[Optimizer], bool],
        went_back: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        self._found = found
        self._is_over = is_over
        self._went_back = went_back
        self._failed = failed
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._init = Optimizer.__init__
        self._call = nn.Module.__call__
        self._backward = torch.Tensor.backward
        self._watched_call: Callable[..., Any] = self._call
        self._is_searching = False
        self._lock = threading.Lock()
        self._stop_listening: Callable[[], None] = lambda: None
        self._has_bare_job = False  # without an optimizer
        self._stop_looking: Callable[[], None] = lambda: None

    def open(self) -> None:
        """Begin to watch."""
        init: Any = self._init

        @functools.wraps(init)
        def watched_init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self._note(optimizer)

        Optimizer.__init__ = watched_init  # type: ignore
        backward: Any = self._backward

        @functools.wraps(backward)
        def watched_backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            try:
                backward(tensor, *args, **kwargs)
            except BaseException:
                self._failed()
                raise
            if self._has_bare_job:
                self._went_back()
            elif not self._optimizers:
                self._look_after_backward()

        torch.Tensor.backward = watched_backward  # type: ignore
        self._stop_looking = hook_all_steps(self._look_after)

    def close(self) -> None:
        """Watch no more."""
        self._stop_search()
        Optimizer.__init__ = self._init  # type: ignore[method-assign]
        torch.Tensor.backward = self._backward  # type: ignore[method-assign]
        self._stop_looking()

    @undisturbed
    def _note(self, optimizer: Optimizer) -> None:
        if self._has_bare_job or (self._optimizers and not self._is_searching):
            if not self._is_over(optimizer):
                return
            # The former job's optimizers may be garbage that the collector has not found yet. One that steps again
            # is noticed then.
            self._optimizers.clear()
            self._has_bare_job = False
        self._optimizers.append(weakref.ref(optimizer))
        self._search()

    def _search(self) -> None:
        if self._is_searching:
            return
        self._is_searching = True
        call = self._call

        def watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._is_searching and starts_training(module):
                self._look_at(module)
            # If a job was found, this module may have been prepared for it.
            return (call if self._is_searching else nn.Module.__call__)(module, *args, **kwargs)

        leave_package_uncompiled()  # optimizers load Dynamo
        leave_uncompiled(watched_call)
        self._watched_call = nn.Module.__call__ = watched_call  # type: ignore[method-assign]
        self._stop_listening = listen(self)

    def _stop_search(self) -> None:
        if self._is_searching:
            self._is_searching = False
            nn.Module.__call__ = self._call  # type: ignore[method-assign]
            self._stop_listening()

    @property
    def awaits_call(self) -> bool:
        """True while a job is searched for."""
        return self._is_searching

    @property
    def knows_calls(self) -> bool:
        """False: the job is not known yet."""
        return False

    def owns(self, modules: Iterable[nn.Module]) -> bool:
        """Return False: the job is not known yet."""
        return False

    def before_compiled_call(self, *, is_own: bool) -> None:
        """Report a job if the compiled function may train what an optimizer holds. It calls no module."""
        optimizers = self._list_optimizers()
        if not self._is_searching or not torch.is_grad_enabled() or is_in_backward():
            return
        trained = _list_trained(optimizers)
        if any(
            getattr(each, "training", False) and any(id(own) in trained for own in each.parameters(False))
            for each in _list_modules()
        ):
            self._report(None, optimizers, trained)

    def switch(self, is_compiled: bool) -> None:
        """Leave modules as they are in compiled code, whose graphs would be split by a replaced call."""
        if self._is_searching:
            nn.Module.__call__ = self._call if is_compiled else self._watched_call  # type: ignore[method-assign]

    def _list_optimizers(self) -> list[Optimizer]:
        """Return the optimizers that still exist."""
        self._optimizers = [each for each in self._optimizers if each() is not None]
        return [each for ref in self._optimizers if (each := ref()) is not None]

    def _look_at(self, module: nn.Module) -> None:
        """Report a job if an optimizer holds parameters of this module."""
        optimizers = self._list_optimizers()
        trained = _list_trained(optimizers)
        if not any(id(each) in trained for each in module.parameters()):
            return
        self._report(module, optimizers, trained)

    @undisturbed
    def _look_after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Report a job if no call began it: the program calls no module in training mode."""
        if is_in_backward():
            return
        optimizers = self._list_optimizers()
        is_known = any(optimizer is each for each in optimizers)
        if self._is_searching and is_known:
            self._report(None, optimizers, _list_trained(optimizers))
        elif not is_known and self._is_over(optimizer):  # of a former job
            self._optimizers.append(weakref.ref(optimizer))
            self._search()

    @undisturbed
    def _look_after_backward(self) -> None:
        """Report the modules that have gradients now as a job that has no optimizer."""
        trained: dict[int, torch.Tensor] = {
            id(each): each
            for one in _list_modules()
            for each in one.parameters(False)
            if get_gradient(each) is not None
        }
        if trained and not is_in_backward():
            self._has_bare_job = True
            try:
                self._found(FoundJob(_gather(None, trained), (), None))
            except BaseException:
                self._has_bare_job = False
                raise

    @undisturbed
    def _report(self, module: nn.Module | None, optimizers: list[Optimizer], trained: dict[int, torch.Tensor]) -> None:
        model = module
        if module is None or not trained.keys() <= {id(each) for each in module.parameters()}:
            model = _gather(module, trained)
        assert model is not None
        with self._lock:
            if not self._is_searching:
                return  # another thread has found it
            self._stop_search()
        try:
            self._found(FoundJob(model, tuple(optimizers), module))
        except BaseException:
            self._search()  # a program that goes on after the error must not train without a budget
            raise


def list_other_models(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules on a model's devices that share no module with it, such as a frozen teacher."""
    own = {id(each) for each in model.modules()}
    devices = {each.device for each in model.parameters()}
    apart = [each for each in _list_modules() if not any(id(part) in own for part in each.modules())]
    inner = {id(part) for each in apart for part in each.modules() if part is not each}
    found = []
    for each in apart:
        tensors = [*each.parameters(), *each.buffers()]
        if id(each) not in inner and tensors and all(type(one) in PLAIN_TENSORS for one in tensors):
            found += [each] if {one.device for one in tensors} <= devices and not is_marked(each) else []
    return found


def list_other_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of modules that are no part of a model, on its devices, such as a teacher's."""
    own = {id(each) for each in model.modules()}
    devices = {each.device for each in model.parameters()}
    others = [each for each in _list_modules() if id(each) not in own]
    tensors = [each for one in others for each in (*one.parameters(recurse=False), *one.buffers(recurse=False))]
    return [each for each in tensors if each.device in devices]


def _list_trained(optimizers: Iterable[Optimizer]) -> dict[int, torch.Tensor]:
    """Return the parameters of optimizers by their Python ids."""
    return {id(each): each for one in optimizers for group in one.param_groups for each in group["params"]}


def _list_modules() -> list[nn.Module]:
    """Return all modules of this process, but for those whose `__init__` has not run."""
    # By their type alone: proxies that load packages on their first use pretend to have other classes.
    return [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in vars(each)]


def _gather(called: nn.Module | None, trained: dict[int, torch.Tensor]) -> nn.Module:
    """Return a module of the outermost modules that own these parameters.

    Parameters that no module owns are added as they are. The module has no `forward`.
    """
    modules = [*_list_modules(), *(() if called is None else called.modules())]
    parents: dict[int, list[nn.Module]] = {}
    for each in modules:
        for child in vars(each).get("_modules", {}).values():
            if child is not None:
                parents.setdefault(id(child), []).append(each)
    queue = [each for each in modules if any(id(own) in trained for own in each.parameters(recurse=False))]
    seen: set[int] = set()
    outermost: list[nn.Module] = []
    for each in queue:  # grows during the loop
        if id(each) in seen:
            continue
        seen.add(id(each))
        queue += parents.get(id(each), ())
        if id(each) not in parents:
            outermost.append(each)
    owned = {id(each) for one in outermost for each in one.parameters()}
    loose = [each for key, each in trained.items() if key not in owned]
    whole = nn.ModuleList(outermost)
    if loose:
        whole.append(nn.ParameterList(loose))
    return whole[0] if len(whole) == 1 else whole

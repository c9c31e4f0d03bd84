"""Finds the training steps of a loop from its optimizers, and runs each in a room."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from elbowroom.errors import UsageError
from elbowroom.hooks.calls_before import CallsBefore
from elbowroom.hooks.compiled_calls import listen
from elbowroom.hooks.compiled_regions import stay_watched, undisturbed
from elbowroom.hooks.model_calls import ModelCalls
from elbowroom.hooks.open_steps import beginning_early, runs_step
from elbowroom.hooks.optimizer_hooks import hook_all_steps
from elbowroom.hooks.several_models import list_models
from elbowroom.runtime.ending_step import StepAborted

logger = logging.getLogger(__name__)

LATE = (
    "the calls of the model do not tell where training steps begin, so the first ones were not within the budget. From "
    "now on each step begins where the last one ended. `with room.step():` around each tells it from the first one on"
)

OTHER = (
    "the model is updated by an optimizer that elbowroom.fit was not given: its state stays in memory. Its class is "
    "%s. Call detach(), and pass it to fit; if another optimizer wraps it, pass both"
)


def is_in_backward() -> bool:
    """Tell whether this thread runs a node of a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def starts_training(module: torch.nn.Module) -> bool:
    """Tell whether a call of this module now may begin a training step: no evaluation, no recomputation, no capture.

    Within a transform of `torch.func` the module may have tensors of the transform.
    """
    is_training = getattr(module, "training", False)  # modules that `torch.jit.freeze` returns do not have it
    if not is_training or not torch.is_grad_enabled() or is_in_backward() or is_captured():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def is_captured() -> bool:
    """Tell whether this thread runs on fake tensors."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


class Steps(Protocol):
    """Steps of a room, which begin and end as they are told."""

    @property
    def was_refused(self) -> bool:
        """True if the running or last step was refused memory."""

    def begin_step(self) -> None:
        """Begin a step."""

    def end_step(self, error: BaseException | None = None) -> None:
        """End the running step. `error`: the exception that aborted it, if any."""


class _CompiledCalls:
    """Begins steps at calls of compiled functions.

    Args:
        steps: begins the steps.
        before: knows the models of the job.
    """

    def __init__(self, steps: OptimizerSteps, before: CallsBefore) -> None:
        self._steps = steps
        self._before = before
        self._modules = weakref.WeakSet(part for each in before.models for part in each.modules())

    @property
    def awaits_call(self) -> bool:
        return not self._steps.is_running or self._steps.ends_at_next_call

    @property
    def knows_calls(self) -> bool:
        return self._before.knows_steps

    def owns(self, modules: Iterable[torch.nn.Module]) -> bool:
        return any(each in self._modules for each in modules)

    def before_compiled_call(self, *, is_own: bool) -> None:
        self._steps.begin_in_compiled_call(is_own=is_own)

    def switch(self, is_compiled: bool) -> None:
        """Do nothing: Dynamo compiles a module's own call, not the one that replaces it."""


class OptimizerSteps:
    """Runs the steps of a training loop in a room without a `with room.step():` in the loop.

    A step begins when the model is called in training mode with gradients on, and ends when the optimizer has made its
    step. So it covers all micro-batches of gradient accumulation, and no evaluation or checkpoint between steps. If the
    loop's first call is that of a part of the model, later calls of this part begin steps, too.

    With several optimizers a step ends when each has stepped, as in the training of a GAN. If one steps again before
    the others have, each step of any optimizer ends one. If no call is seen, as the loop calls a compiled function,
    each step begins where the last one ended. If optimizers step inside the backward pass, or there are none, a step
    ends at the next call of the model after the backward pass. All of these give the same results.

    Args:
        steps: of the loop's room.
        model: as given to `elbowroom.fit`.
        optimizers: as given to `elbowroom.fit`, without the wrappers of frameworks.
        after_step: called after each step.
        others: other modules that the steps use.

    Attributes:
        ends_at_next_call: whether the next call of the model ends the running step.
    """

    def __init__(
        self,
        steps: Steps,
        model: torch.nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        after_step: Callable[[], None] | None = None,
        others: Iterable[torch.nn.Module] = (),
    ) -> None:
        self._steps = steps
        self._optimizers = tuple(optimizers)
        self._after_step = after_step
        self._stepped: set[int] = set()
        self._is_in_rounds = True  # each optimizer steps once before any steps again
        self.ends_at_next_call = False
        self._begins_at_end = False
        self._is_running = False
        self._thread: threading.Thread | None = None  # of the running step, until its end is over
        self._last_thread = threading.current_thread()
        self._lock = threading.Lock()
        self._has_failed = False
        self._is_updating = False
        self._is_closed = False
        self._missed: set[int] = set()
        self._before = CallsBefore(list_models(model), others, self._optimizers)
        self._calls: ModelCalls | None = None
        self._removals: list[Callable[[], None]] = []
        with contextlib.ExitStack() as undoing:
            undoing.callback(self.close)
            self._calls = ModelCalls(model, self, others)
            for each in self._optimizers:
                self._removals.append(each.register_step_pre_hook(self._begin_update).remove)
                self._removals.append(each.register_step_post_hook(self._end_after).remove)
            self._removals.append(hook_all_steps(self._end_after_other))
            self._removals.append(listen(_CompiledCalls(self, self._before)))
            stay_watched()  # steps may begin and end in compiled functions
            undoing.pop_all()

    @property
    def is_running(self) -> bool:
        """True inside a step."""
        return self._is_running

    @property
    def has_failed(self) -> bool:
        """True inside a step that was refused memory, or whose call, backward pass or update raised an error.

        The program may have caught that, to go on with this step or with another training.
        """
        return self._is_running and (self._has_failed or self._is_updating or self._steps.was_refused)

    @property
    def begins_at_ends(self) -> bool:
        """True if each step begins where the last one ended."""
        return self._begins_at_end

    def begin_at_ends(self) -> None:
        """Begin a step now, and each later one where the last one ended, whatever the program calls."""
        self._begins_at_end = True
        if self._calls is not None:
            self._calls.close()
        self.begin()

    @undisturbed
    def begin(self) -> None:
        """Begin a step now."""
        with self._lock:
            self.require_own_thread()
            self._thread = self._last_thread = threading.current_thread()
        self._has_failed = self._is_updating = False
        self._is_running = True  # before the step is open, as an interrupt may come right after
        try:
            with beginning_early() if self._begins_at_end else contextlib.nullcontext():
                self._steps.begin_step()
        except BaseException:
            self._is_running = False
            self._thread = None
            raise

    @undisturbed
    def end(self, error: BaseException | None = None) -> None:
        """End the running step, if there is one. `error`: the exception that aborted it."""
        if not self._is_running:
            return
        if error is None:
            self.require_own_thread()
        self.ends_at_next_call = False
        try:
            self._steps.end_step(error)
        except BaseException:
            with contextlib.suppress(UsageError):  # unless an interrupt has left it open, none runs any more
                self._steps.end_step(StepAborted())
            raise
        finally:
            self._is_running = False
            self._stepped.clear()
            self._thread = None
        if self._after_step is not None and error is None:
            self._after_step()

    def require_own_thread(self) -> None:
        """Check that no step of another thread runs.

        Raises:
            UsageError: one does, and may go on.
        """
        other, own = self._thread, threading.current_thread()
        has_failed = self._has_failed or self._steps.was_refused
        if other is not None and other is not own and other.is_alive() and not has_failed:
            raise UsageError(
                f"thread {own.name!r} trains while a training step of thread {other.name!r} runs, and the budget is "
                "that of one training at a time. Train one after the other; or call elbowroom.fit in each thread, with "
                "a part of the budget, and run the program without `elbowroom run`"
            )

    def end_at_next_call(self) -> None:
        """End the running step at the next call of the model: all that is left of it is the update."""
        self.ends_at_next_call = self._is_running

    def note_failure(self) -> None:
        """Note that this thread's part of the running step has raised an error."""
        if self._thread is threading.current_thread():
            self._has_failed = True

    def finish(self, error: BaseException | None = None) -> None:
        """End the running step if the program that has ended has done it, or with the error that has ended it."""
        if error is not None or self.ends_at_next_call:
            self.end(error)

    def close(self) -> None:
        """Watch the loop no more. A running step goes on; see `end`."""
        self._is_closed = True
        self._is_running = False
        if self._calls is not None:
            self._calls.close()
            self._calls = None  # which refers to this object, and so keeps what it holds
        while self._removals:
            self._removals[-1]()
            self._removals.pop()  # last, so that an interrupted call can be repeated

    def begin_in_compiled_call(self, *, is_own: bool) -> None:
        """Begin a step if the compiled function may train the model, which it does not call.

        Args:
            is_own: whether it is known to run a module of the job. If not, none begins in a step of another room, nor
                in another thread than the last one.
        """
        if self._is_closed or not any(map(starts_training, self._before.models)):
            return
        if not is_own and not self._is_running and (runs_step() or threading.current_thread() is not self._last_thread):
            return
        if self.ends_at_next_call:
            self.end()
        if self._is_running:
            return
        if is_own and not self._begins_at_end:
            self._missed.clear()
            self.begin()
            self._before.note_step(is_open=False)
        else:
            self.begin_at_ends()

    def before_call(self, module: torch.nn.Module) -> bool:
        """Begin a step if a call of this module begins one. Return True if it does."""
        if self._is_closed or is_in_backward():
            return False
        if self.ends_at_next_call and self._thread is threading.current_thread():
            self.end()
        may_begin = starts_training(module) and not self._before.is_other(module)
        if self._before.is_open and self._is_running and self._before.is_trained(module):
            self._before.is_open = False
            if not may_begin and not is_captured():
                self.end(StepAborted())  # an evaluation
        if not may_begin and (self._is_running or is_captured() or not self._before.begins_step(module)):
            return False
        if self.ends_at_next_call:
            self.end()
        if self._is_running and self._steps.was_refused:
            self.end(StepAborted())
        if self._is_running:
            return False
        if self._calls is not None:
            self._calls.keep(module)
        self._missed.clear()
        self.begin()
        self._before.note_step(is_open=not may_begin)
        return True

    def _begin_update(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_closed or is_captured():
            return
        if not is_in_backward():
            self.require_own_thread()
        self._is_updating = True

    def _end_after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._is_updating = False
        if self._is_closed or is_captured():
            return
        if is_in_backward():
            self.ends_at_next_call = True
            return
        if not self._is_running:
            if getattr(getattr(optimizer, "_join_config", None), "enable", False):
                return  # `torch.distributed.algorithms.Join` has it step for ranks that still have batches
            if id(optimizer) not in self._missed:  # torch.distributed.checkpoint has optimizers make their state so
                self._missed.add(id(optimizer))
                if self._calls is not None:
                    self._calls.keep_all()
                return
            if not self._begins_at_end:
                logger.warning(LATE)
            self._begins_at_end = True
        is_again = id(optimizer) in self._stepped
        self._stepped.add(id(optimizer))
        is_whole = len(self._stepped) == len(self._optimizers)
        if is_again and not is_whole:
            self._is_in_rounds = False
        if is_whole or not self._is_in_rounds or not self._is_running:
            self._stepped.clear()
            self.end()
            if self._begins_at_end:
                self.begin_at_ends()

    def _end_after_other(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """End a step after an optimizer that was made later has updated the model, unless one of ours calls it."""
        if not self._is_running or self._is_updating or optimizer in self._optimizers:
            return
        if is_captured() or is_in_backward():
            return
        own = {id(each) for model in self._before.models for each in model.parameters()}
        if any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
            logger.warning(OTHER, type(optimizer).__name__)
            self._removals.append(optimizer.register_step_post_hook(self._end_after).remove)
            self._optimizers = (*self._optimizers, optimizer)
            self.end()
            if self._begins_at_end:
                self.begin_at_ends()

"""Errors that Elbowroom raises.

    ElbowroomError
      UsageError (ValueError)   the call is invalid: a malformed budget, two rooms on one model
        UnknownMember           no such strategy, policy, format, ...; lists the existing ones
      TraceError (ValueError)   a file or value is corrupt or inconsistent; names the place
      Infeasible                no plan fits; names a budget that would
        ArenaTooSmall           no layout of these buffers fits
      MemoryRefused (MemoryError)  the system refuses memory that the budget allows
      Thrashing                 a step spends its time on reloads and recomputation
      TierError                 a tier failed
        TierFull                it has no room left
        TransferFailed          a transfer failed; the source is intact
      BrokerLost                the broker of a shared device is gone, and the job is to stop then
      RankLost                  another process of a distributed job has ended, failed or hangs; names it
      RanksDiffer               the ranks of a distributed job differ, and the job is to stop then; names them
      InternalError             a bug in Elbowroom

Each message gives the numbers and the next step. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar

from elbowroom.units import format_bytes


class ElbowroomError(Exception):
    """Base class of all errors of Elbowroom. They can be pickled, as the results of worker processes are."""

    left_out_of_pickles: ClassVar[Mapping[str, object]] = MappingProxyType({})
    """Attributes that hold parts of the job, and their values in an unpickled error."""

    def __reduce__(self) -> tuple[Callable[..., ElbowroomError], tuple[object, ...]]:
        return _unpickle, (type(self), str(self), {**vars(self), **self.left_out_of_pickles})


def _unpickle(kind: type[ElbowroomError], message: str, attributes: dict[str, object]) -> ElbowroomError:
    """Return an error without calling its `__init__`, which composes the message."""
    error = kind.__new__(kind, message)
    vars(error).update(attributes)
    return error


class UsageError(ElbowroomError, ValueError):
    """The request is invalid; the message says what to do instead."""


class UnknownMember(UsageError):
    """A family has no member of this name."""

    def __init__(self, family: str, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"no {family} is called {name!r}; there are: {', '.join(known)}")
        self.family = family
        self.name = name
        self.known = known


class TraceError(ElbowroomError, ValueError):
    """A trace, plan, profile or other value is corrupt, inconsistent, or of a newer format."""


UPDATE_MARKS = ("elbowroom.begin_update.default", "elbowroom.end_update.default")
"""Names of the ops between which an optimizer updates some parameters, see `ir.updates`."""


class Infeasible(ElbowroomError):
    """No plan fits the budget, or the limit on the tier below.

    Attributes:
        needed_bytes: with `is_whole_step`, the smallest budget with which this step works (with the given strategy);
            otherwise a lower bound: the need of the op at which the step was aborted. At most `budget_bytes` if only
            the tier below is too small.
        is_whole_step: whether `needed_bytes` comes from a plan of the whole step.
        is_estimated: whether the workspace of ops in that plan is estimated, because no step has run yet.
        budget_bytes: the given budget.
        op: name of the op at the peak of that plan, or at which the step was aborted.
        module: path of the op's module, as in `torch.nn.Module.named_modules`; None if unknown. If the error ends a
            step that `begin_step` began, this, `line` and `advice` are known from `complete` on.
        line: `file:line` of the program that calls the op; "" if unknown.
        in_the_way: (description, bytes) of the largest things that must be on the device at that op.
        host_bytes: limit on the tier below; None for no limit.
        needed_host_bytes: bytes that the nearest plan needs there; 0 if the tier below was not the limit.
        state_bytes: bytes of parameters, buffers, gradients and optimizer state that are on the device at that op; 0 if
            unknown.
        advice: further advice, a sentence each.
        note: a sentence about the step, or "".
        evidence: data from which `module` and `line` are determined later.
        completion: adds `module`, `line` and `advice`; None if there is nothing to add.
    """

    completion: Callable[[Infeasible], None] | None = None
    left_out_of_pickles = MappingProxyType({"evidence": None, "completion": None})

    def __init__(
        self,
        *,
        needed_bytes: int,
        budget_bytes: int,
        op: str,
        is_whole_step: bool,
        in_the_way: tuple[tuple[str, int], ...] = (),
        host_bytes: int | None = None,
        needed_host_bytes: int = 0,
        state_bytes: int = 0,
        is_estimated: bool = False,
        module: str | None = None,
        line: str = "",
        note: str = "",
    ) -> None:
        super().__init__()
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.op = op
        self.in_the_way = in_the_way
        self.host_bytes = host_bytes
        self.needed_host_bytes = needed_host_bytes
        self.is_whole_step = is_whole_step
        self.state_bytes = state_bytes
        self.is_estimated = is_estimated
        self.advice: tuple[str, ...] = ()
        self.note = note
        self.evidence: object = None
        self.locate(module, line)

    def __str__(self) -> str:
        self.complete()
        return super().__str__()

    def complete(self) -> None:
        """Add what the traceback tells. It is complete only where the error is handled, or printed at last."""
        completion, self.completion = self.completion, None
        if completion is not None:
            completion(self)

    def locate(self, module: str | None, line: str, *, is_near: bool = False) -> None:
        """Set where the op runs. `is_near`: in the backward pass of this module or of the one after it."""
        self.module = module
        self.line = line
        place = "the optimizer updates some parameters" if self.op in UPDATE_MARKS else f"{self.op} runs"
        if module is not None:
            place += f" in{' the backward pass of' if is_near else ''} {module or 'the model itself'}"
        if is_near:
            place += " or of what follows it"
        if line:
            place += f" ({line})"
        self.args = (" ".join((self._describe(place), *self.advice)),)

    def add(self, note: str) -> None:
        """Add a sentence about the step, unless it is there already."""
        if note not in self.note:
            self.note = f"{self.note} {note}".strip()
        self.locate(self.module, self.line)

    def _describe(self, place: str) -> str:
        budget = f"{format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes)"
        if self.needed_bytes <= self.budget_bytes:
            return f"the step cannot run within {budget}{self._describe_below()}"
        needed = f"{format_bytes(self.needed_bytes)} ({self.needed_bytes} bytes)"
        bound = "" if self.is_whole_step else "at least "
        things = "; ".join(f"{what} {format_bytes(nbytes)}" for what, nbytes in self.in_the_way)
        message = f"the step cannot run within {budget}: {bound}{needed} are needed at once when {place}"
        message += f": {things}." if things else "."
        if self.note:
            message += f" {self.note}"
        if self.is_whole_step:
            message += f" Set the memory budget to at least {self.needed_bytes}, or make the batch smaller."
            if self.is_estimated:
                message += " No step has run yet, so the workspace of ops is estimated."
        else:
            message += (
                " This is the need of that op; the rest of the step may need more. "
                "Set the memory budget to what elbowroom.smallest_budget(model, optimizer, step) finds, with which "
                "there is a plan for the whole step, or make the batch smaller. Less may do where ops run in slices."
            )
        if self.host_bytes is not None and self.needed_host_bytes > self.host_bytes:
            message += (
                f" Or raise host_bytes={self.host_bytes}, the limit on the tier below, to {self.needed_host_bytes}."
            )
        return message

    def _describe_below(self) -> str:
        """Describe the case that only the tier below the device is too small."""
        return (
            f" with at most {format_bytes(self.host_bytes or 0)} ({self.host_bytes} bytes) in the tier below the "
            f"device: the plan needs {format_bytes(self.needed_host_bytes)} ({self.needed_host_bytes} bytes) there. "
            f"Set host_bytes to {self.needed_host_bytes}, raise the budget, use hardware with a disk behind that "
            "tier, or make the batch smaller."
        )

    def advise(self, advice: Iterable[str]) -> None:
        """Add sentences to the message."""
        added = tuple(advice)
        self.advice += added
        self.args = (" ".join((str(self.args[0]), *added)),)


class ArenaTooSmall(Infeasible):
    """No layout of the buffers fits the capacity, or none was found.

    Attributes:
        needed_bytes, budget_bytes: as for every `Infeasible`; the budget is the capacity.
        in_the_way: (description, bytes) of the largest buffers that are live at the peak.
        is_proven: whether no layout can fit; otherwise `needed_bytes` is the smallest arena found.
    """

    def __init__(
        self, capacity_bytes: int, needed_bytes: int, in_the_way: tuple[tuple[str, int], ...], *, is_proven: bool
    ) -> None:
        things = ", ".join(f"{what} with {nbytes} bytes" for what, nbytes in in_the_way)
        why = "are needed, whatever the layout" if is_proven else "is the smallest arena that was found"
        ElbowroomError.__init__(
            self,
            f"the buffers do not fit {capacity_bytes} bytes: {needed_bytes} bytes {why}; the largest live buffers at "
            f"the peak: {things}. Give them at least {needed_bytes} bytes.",
        )
        self.needed_bytes = needed_bytes
        self.budget_bytes = capacity_bytes
        self.op = ""
        self.in_the_way = in_the_way
        self.host_bytes = None
        self.needed_host_bytes = 0
        self.is_whole_step = True
        self.is_proven = is_proven
        self.is_estimated = False
        self.state_bytes = 0
        self.advice = ()
        self.module = None
        self.line = ""
        self.note = ""
        self.evidence = None


class Thrashing(ElbowroomError):
    """A step spends its time on reloads and recomputation.

    Attributes:
        replay_seconds: seconds of recomputation so far.
        move_seconds: seconds of waiting for transfers.
        busy_seconds: seconds of the rest of the step.
        budget_bytes: the budget.
    """

    def __init__(self, replay_seconds: float, move_seconds: float, busy_seconds: float, budget_bytes: int) -> None:
        advice = (
            'set policy="lru", which only offloads' if replay_seconds > move_seconds else "use a faster spill_folder"
        )
        super().__init__(
            f"the step is thrashing: it has spent {replay_seconds:.1f} s on recomputing and {move_seconds:.1f} s on "
            f"waiting for transfers, for {busy_seconds:.1f} s of its own. {format_bytes(budget_bytes)} ({budget_bytes} "
            f"bytes) are too few. Raise the memory budget, or {advice}."
        )
        self.replay_seconds, self.move_seconds = replay_seconds, move_seconds
        self.busy_seconds, self.budget_bytes = busy_seconds, budget_bytes


class MemoryRefused(ElbowroomError, MemoryError):
    """The system refuses memory that the budget allows, and no further storage may leave.

    Attributes:
        requested_bytes: bytes requested.
        held_bytes: bytes that the room holds.
        budget_bytes: the budget.
    """

    def __init__(
        self, requested_bytes: int, held_bytes: int, budget_bytes: int, system_limits: Iterable[tuple[str, int, int]]
    ) -> None:
        limits = [
            f"{name} is {limit_bytes} bytes, of which the process uses {taken_bytes}"
            for name, limit_bytes, taken_bytes in system_limits
        ]
        super().__init__(
            f"the system refuses {format_bytes(requested_bytes)} ({requested_bytes} bytes) of memory, but the step "
            f"holds only {held_bytes} of its budget of {budget_bytes} bytes"
            + "".join(f"; {each}" for each in limits)
            + f". Set the memory budget to at most {held_bytes}, make the batch smaller, or give the process more "
            "memory."
        )
        self.requested_bytes = requested_bytes
        self.held_bytes = held_bytes
        self.budget_bytes = budget_bytes


NO_ROOM = (Infeasible, MemoryRefused)
"""Errors of a request of memory for which nothing more may leave."""


def find_nearer(
    former: Infeasible | MemoryRefused | None, last: Infeasible | MemoryRefused
) -> Infeasible | MemoryRefused:
    """Return the refusal of one of two attempts to run an op: the one that needs the smaller budget, if both say it."""
    if isinstance(former, Infeasible) and isinstance(last, Infeasible) and former.needed_bytes <= last.needed_bytes:
        return former
    return last


class TierError(ElbowroomError):
    """A tier of memory or disk failed."""


class TierFull(TierError):
    """A tier has no room for a block; nothing was moved.

    Attributes:
        tier: name of the tier.
        needed_bytes, free_bytes: bytes requested, and bytes free.
    """

    def __init__(self, tier: str, needed_bytes: int, free_bytes: int, advice: str) -> None:
        pieces = ", in smaller pieces" if free_bytes >= needed_bytes else ""
        needed, free = format_bytes(needed_bytes), format_bytes(free_bytes)
        super().__init__(f"{tier} has no room for {needed}: {free} are free{pieces}. {advice}")
        self.tier = tier
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class TransferFailed(TierError):
    """A transfer failed. The source is intact."""


class DeviceFull(TransferFailed):
    """The device has no memory for what comes back. Nothing was begun."""


class BrokerLost(ElbowroomError):
    """The broker of a shared device is gone, and the job was told to stop in that case."""


class RankLost(ElbowroomError):
    """Another process of a distributed job has ended, has failed, or does not answer."""


class SavedTensorLost(ElbowroomError):
    """A saved tensor cannot be computed again: the weights that this takes are not gathered or have changed, another
    thread has written to a tensor that this takes, or it was given up when its step ended."""


class RanksDiffer(ElbowroomError):
    """The ranks of a distributed job have different budgets or steps, and the job was told to stop in that case."""


class InternalError(ElbowroomError):
    """A bug in Elbowroom: please report it."""

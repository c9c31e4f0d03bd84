"""Every error Elbowroom raises on purpose.

    ElbowroomError
      UsageError (ValueError)   the call cannot mean anything: a malformed budget, two rooms on one model
        UnknownMember           no such strategy, policy, format, ...; lists the ones there are
      TraceError (ValueError)   a file or value is not what it claims to be; names the place
      Infeasible                no plan fits; says what would
        ArenaTooSmall           no layout of these buffers does
      MemoryRefused (MemoryError)  the system gives no memory that the budget allows
      Thrashing                 a step spends its time bringing back what it has given up
      TierError                 a place for bytes failed
        TierFull                it has no room left
        TransferFailed          a move did not complete; the source is intact
      InternalError             a bug in Elbowroom

Each message gives the numbers and the next step. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from elbowroom.units import format_bytes


class ElbowroomError(Exception):
    """The root of the tree: `except ElbowroomError` catches all of them and nothing else."""


class UsageError(ElbowroomError, ValueError):
    """The request can never be met; the message says what can be done instead."""


class UnknownMember(UsageError):
    """A family has no member of this name."""

    def __init__(self, family: str, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"no {family} is called {name!r}; there are: {', '.join(known)}")
        self.family = family
        self.name = name
        self.known = known


class TraceError(ElbowroomError, ValueError):
    """A trace, plan, profile or other value is corrupt, inconsistent, or of a newer format."""


class Infeasible(ElbowroomError):
    """No plan fits into the budget, or none also into what the tier below may hold.

    Attributes:
        needed_bytes: with `is_whole_step`, the smallest budget with which this step works (for the strategy that was
            asked for); otherwise a lower bound: the op at which the step broke off needs at least this. At most
            `budget_bytes` where the device is not what is too small.
        is_whole_step: whether `needed_bytes` comes from a plan of the whole step.
        is_estimated: whether that plan rests on estimates of what ops allocate inside themselves: no step has run.
        budget_bytes: the budget that was asked for.
        op: the name of the op at the peak of that plan, or at which the step broke off.
        module: path of the module that it runs in, as in `torch.nn.Module.named_modules`; None if that is not known.
        line: "file:line" of the program that calls it; "" if that is not known.
        in_the_way: (what, bytes) of the largest things that must be there at that op.
        host_bytes: what the tier below may hold; None for any amount.
        needed_host_bytes: what it would have to hold for the plan that comes nearest; 0 where that was not the limit.
        state_bytes: of them parameters, buffers, gradients and optimizer state, which never leave; 0 if not known.
        advice: what else would help, a sentence each.
        note: a sentence on the step, or "".
        evidence: what tells where the op runs, until that is known.
    """

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

    def locate(self, module: str | None, line: str, *, is_near: bool = False) -> None:
        """Say where the op runs. `is_near`: in a backward pass, in this module or in what follows it."""
        self.module = module
        self.line = line
        place = f"{self.op} runs"
        if module is not None:
            place += f" in{' the backward pass of' if is_near else ''} {module or 'the model itself'}"
        if is_near:
            place += " or of what follows it"
        if line:
            place += f" ({line})"
        self.args = (" ".join((self._describe(place), *self.advice)),)

    def _describe(self, place: str) -> str:
        budget = f"{format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes)"
        if self.needed_bytes <= self.budget_bytes:
            return f"the step cannot run within {budget}{self._describe_below()}"
        needed = f"{format_bytes(self.needed_bytes)} ({self.needed_bytes} bytes)"
        bound = "" if self.is_whole_step else "at least "
        things = "; ".join(f"{what} {format_bytes(nbytes)}" for what, nbytes in self.in_the_way)
        message = f"the step cannot run within {budget}: {bound}{needed} have to be there at once when {place}"
        message += f": {things}." if things else "."
        if self.note:
            message += f" {self.note}"
        if self.is_whole_step:
            message += f" Set memory_budget to at least {self.needed_bytes}, or make the batch smaller."
            if self.is_estimated:
                message += " No step has run yet: what ops allocate inside themselves is estimated."
        else:
            message += (
                " That is what this op needs; the rest of the step may need more. "
                "elbowroom.smallest_budget(model, optimizer, step) finds what the whole step needs. "
                "Set memory_budget to that, or make the batch smaller."
            )
        if self.host_bytes is not None and self.needed_host_bytes > self.host_bytes:
            message += (
                f" Or let the tier below hold more than host_bytes={self.host_bytes}: {self.needed_host_bytes} is "
                "enough."
            )
        return message

    def _describe_below(self) -> str:
        """Where the tier below the device is what is too small."""
        return (
            f" with at most {format_bytes(self.host_bytes or 0)} ({self.host_bytes} bytes) in the tier below the "
            f"device: the plan has {format_bytes(self.needed_host_bytes)} ({self.needed_host_bytes} bytes) there at "
            f"once. Set host_bytes to {self.needed_host_bytes}, which is enough; raise memory_budget; name hardware "
            "with a disk behind that tier; or make the batch smaller."
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
        in_the_way: (what, bytes) of the largest buffers that are there at the time with the most bytes.
        is_proven: whether no layout can fit; otherwise `needed_bytes` is the smallest that was found.
    """

    def __init__(
        self, capacity_bytes: int, needed_bytes: int, in_the_way: tuple[tuple[str, int], ...], *, is_proven: bool
    ) -> None:
        things = ", ".join(f"{what} with {nbytes} bytes" for what, nbytes in in_the_way)
        why = "are needed, whatever the layout" if is_proven else "is the smallest arena that was found"
        ElbowroomError.__init__(
            self,
            f"the buffers do not fit {capacity_bytes} bytes: {needed_bytes} bytes {why}; the largest of those that are "
            f"there at once when the most is: {things}. Give them at least {needed_bytes} bytes.",
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
    """A step spends its time bringing back what it has given up.

    Attributes:
        replay_seconds: computing it again took so long so far.
        move_seconds: waiting for moves did.
        busy_seconds: the rest of the step took so long.
        budget_bytes: what it was to fit into.
    """

    def __init__(self, replay_seconds: float, move_seconds: float, busy_seconds: float, budget_bytes: int) -> None:
        advice = (
            'choose policy="lru", which only moves' if replay_seconds > move_seconds else "name a faster spill_folder"
        )
        super().__init__(
            f"the step has spent {replay_seconds:.1f} s on computing again what it gave up and {move_seconds:.1f} s on "
            f"waiting for moves, for {busy_seconds:.1f} s of its own: {format_bytes(budget_bytes)} ({budget_bytes} "
            f"bytes) are too few for it to get on. Give it more, or {advice}."
        )
        self.replay_seconds, self.move_seconds = replay_seconds, move_seconds
        self.busy_seconds, self.budget_bytes = busy_seconds, budget_bytes


class MemoryRefused(ElbowroomError, MemoryError):
    """The system refuses memory that the budget allows, and nothing more may leave.

    Attributes:
        requested_bytes: were asked for.
        held_bytes: the room holds.
        budget_bytes: it may hold.
    """

    def __init__(
        self, requested_bytes: int, held_bytes: int, budget_bytes: int, system_limits: Iterable[tuple[str, int, int]]
    ) -> None:
        limits = [
            f"{name} is {limit_bytes} bytes, of which the process has {taken_bytes}"
            for name, limit_bytes, taken_bytes in system_limits
        ]
        super().__init__(
            f"the system refuses {format_bytes(requested_bytes)} ({requested_bytes} bytes) of memory, though the step "
            f"holds only {held_bytes} of its budget of {budget_bytes} bytes"
            + "".join(f"; {each}" for each in limits)
            + f". Set memory_budget to at most {held_bytes}, make the batch smaller, or give the process more memory."
        )
        self.requested_bytes = requested_bytes
        self.held_bytes = held_bytes
        self.budget_bytes = budget_bytes


class TierError(ElbowroomError):
    """A place where bytes live failed."""


class TierFull(TierError):
    """A tier has no room for a block; nothing was moved.

    Attributes:
        tier: its name.  needed_bytes, free_bytes: what was asked for and what is there.
    """

    def __init__(self, tier: str, needed_bytes: int, free_bytes: int, advice: str) -> None:
        super().__init__(
            f"{tier} has no room for {format_bytes(needed_bytes)}: {format_bytes(free_bytes)} are free. {advice}"
        )
        self.tier = tier
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class TransferFailed(TierError):
    """A move of bytes did not complete. The source is intact."""


class InternalError(ElbowroomError):
    """Elbowroom broke one of its own rules: please report it."""

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
    """What was asked for cannot be done in any circumstances; the message says what can."""


class UnknownMember(UsageError):
    """A family has no member of this name."""

    def __init__(self, family: str, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"no {family} is called {name!r}; there are: {', '.join(known)}")
        self.family, self.name, self.known = family, name, known


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
        in_the_way: (what, bytes) of the largest things that must be there at that op.
        host_bytes: what the tier below may hold; None for any amount.
        needed_host_bytes: what it would have to hold for the plan that comes nearest; 0 where that was not the limit.
        state_bytes: of them parameters, buffers, gradients and optimizer state, which never leave; 0 if not known.
        advice: what else would help, a sentence each.
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
    ) -> None:
        things = ", ".join(f"{what} {format_bytes(nbytes)}" for what, nbytes in in_the_way)
        needed = f"{format_bytes(needed_bytes)} ({needed_bytes} bytes)"
        message = f"the step cannot run within {format_bytes(budget_bytes)} ({budget_bytes} bytes)"
        if needed_bytes > budget_bytes:
            bound = "" if is_whole_step else "at least "
            message += f": {bound}{needed} have to be there at once when {op} runs" + (f" ({things})" if things else "")
            if is_whole_step:
                message += f". Set memory_budget to at least {needed_bytes}, or make the batch smaller."
                if is_estimated:
                    message += " No step has run yet: what ops allocate inside themselves is estimated."
            else:
                message += (
                    ". That is what this op needs; the rest of the step may need more. "
                    "elbowroom.smallest_budget(model, optimizer, step) finds what the whole step needs. "
                    "Set memory_budget to that, or make the batch smaller."
                )
            if host_bytes is not None and needed_host_bytes > host_bytes:
                message += (
                    f" Or let the tier below hold more than host_bytes={host_bytes}: {needed_host_bytes} is enough."
                )
        else:
            message += (
                f" with at most {format_bytes(host_bytes or 0)} ({host_bytes} bytes) in the tier below the device: the "
                f"plan has {format_bytes(needed_host_bytes)} ({needed_host_bytes} bytes) there at once. Set host_bytes "
                f"to {needed_host_bytes}, which is enough; raise memory_budget; name hardware with a disk behind that "
                "tier; or make the batch smaller."
            )
        super().__init__(message)
        self.needed_bytes, self.budget_bytes, self.op, self.in_the_way = needed_bytes, budget_bytes, op, in_the_way
        self.host_bytes, self.needed_host_bytes, self.is_whole_step = host_bytes, needed_host_bytes, is_whole_step
        self.state_bytes, self.is_estimated = state_bytes, is_estimated
        self.advice: tuple[str, ...] = ()

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
        self.needed_bytes, self.budget_bytes, self.op, self.in_the_way = needed_bytes, capacity_bytes, "", in_the_way
        self.host_bytes, self.needed_host_bytes, self.is_proven = None, 0, is_proven
        self.is_whole_step, self.is_estimated, self.state_bytes, self.advice = True, False, 0, ()


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
        self.requested_bytes, self.held_bytes, self.budget_bytes = requested_bytes, held_bytes, budget_bytes


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
        self.tier, self.needed_bytes, self.free_bytes = tier, needed_bytes, free_bytes


class TransferFailed(TierError):
    """A move of bytes did not complete. The source is intact."""


class InternalError(ElbowroomError):
    """Elbowroom broke one of its own rules: please report it."""

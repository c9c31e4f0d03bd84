"""Agreement of the ranks of a job: pure functions of what each of them says, so that every rank computes the same."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

from elbowroom.errors import RanksDiffer, UsageError
from elbowroom.ir.trace import Trace
from elbowroom.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """Greeting of a rank, when its room is made.

    Attributes:
        versions: of Elbowroom and PyTorch.
        model: digest of the names, shapes and dtypes of parameters and buffers.
        options: names and values of the options that all ranks must share.
        budget_bytes: its own budget.
        host, process: name of its machine, and its process id there.
    """

    versions: str
    model: str
    options: tuple[tuple[str, str], ...]
    budget_bytes: int
    host: str
    process: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The step that a rank would plan.

    Attributes:
        step: what a plan of the step depends on, from `digest_step`; "" if the rank has no step to plan.
        text: the step in a few words, or why there is none.
        floor_bytes, plain_bytes: forecast peaks, with as little as can be on the device, and with everything.
        op_seconds, workspace_bytes: of each op, as in `Costs`.
        budget_bytes: budget of the rank.
        goes_without: whether the rank can run its steps without a plan if none fits.
    """

    step: str
    text: str
    budget_bytes: int
    floor_bytes: int = 0
    plain_bytes: int = 0
    op_seconds: tuple[float, ...] = ()
    workspace_bytes: tuple[int, ...] = ()
    goes_without: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Terms of one plan for all ranks.

    Attributes:
        leader: rank that plans: the one whose step needs most, so that its plan fits all others.
        budget_bytes: the least of all budgets.
        op_seconds, workspace_bytes: the most that any rank measured.
        goes_without: whether all ranks can run without a plan.
    """

    leader: int
    budget_bytes: int
    op_seconds: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    goes_without: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Why there is no plan for all ranks.

    Attributes:
        text: names the ranks, and what they have instead.
        is_early: whether some ranks have no step to plan yet.
    """

    text: str
    is_early: bool


def digest_step(trace: Trace) -> str:
    """Return the SHA-256 of what a running step is compared with: its ops, what it saves, and when it needs that.

    Lifetimes and what else is in memory may differ between ranks: a plan holds them within the budget either way.
    """
    found = hashlib.sha256(trace.device.encode())
    for op in trace.ops:
        found.update(f"{op.tick} {op.name.replace('_.', '.', 1)};".encode())
    for save in trace.saves:
        found.update(f"{save.tick} {save.storage} {trace.storages[save.storage].nbytes};".encode())
    for need in trace.needs:
        found.update(f"{need.tick} {need.save};".encode())
    return found.hexdigest()


def check_greetings(greetings: Sequence[Greeting], *, stops: bool) -> str:
    """Compare what the ranks are.

    Args:
        stops: whether different budgets are an error.

    Returns:
        A note on budgets that differ; "" if all are equal.

    Raises:
        UsageError: they are not of one job; names the ranks.
    """
    _check_alike([each.versions for each in greetings])
    _check_alike([f"a model with digest {each.model[:12]}" for each in greetings])
    for index, (name, _) in enumerate(greetings[0].options):
        _check_alike([f"{name}={each.options[index][1]}" for each in greetings])
    budgets = [each.budget_bytes for each in greetings]
    if len(set(budgets)) == 1:
        return ""
    least, most = budgets.index(min(budgets)), budgets.index(max(budgets))
    note = (
        f"rank {least} has the smallest budget, {format_bytes(budgets[least])} ({budgets[least]} bytes), "
        f"and rank {most} the largest, {format_bytes(budgets[most])} ({budgets[most]} bytes)"
    )
    if stops:
        raise RanksDiffer(f"{note}: pass the same memory_budget on all ranks")
    return note


def merge_offers(offers: Sequence[Offer]) -> Terms | Difference:
    """Return what one plan for all ranks is made from, or why there is none."""
    if missing := [rank for rank, each in enumerate(offers) if not each.step]:
        what = "; ".join(f"rank {rank}: {offers[rank].text}" for rank in missing)
        return Difference(text=f"there is no step to plan on {_name(missing)} ({what})", is_early=True)
    steps = [each.step for each in offers]
    if strange := _list_strange(steps):
        other, usual = strange[0], _find_usual(steps)
        return Difference(
            text=(
                f"the step of {_name(strange)} ({offers[other].text}, digest {steps[other][:12]}) differs from that of "
                f"rank {usual} ({offers[usual].text}, digest {steps[usual][:12]})"
            ),
            is_early=False,
        )
    return Terms(
        leader=max(range(len(offers)), key=lambda rank: (offers[rank].floor_bytes, offers[rank].plain_bytes, -rank)),
        budget_bytes=min(each.budget_bytes for each in offers),
        op_seconds=tuple(map(max, zip(*(each.op_seconds for each in offers), strict=True))),
        workspace_bytes=tuple(map(max, zip(*(each.workspace_bytes for each in offers), strict=True))),
        goes_without=all(each.goes_without for each in offers),
    )


def _check_alike(values: Sequence[str]) -> None:
    if strange := _list_strange(values):
        usual = _find_usual(values)
        raise UsageError(
            f"{_name(strange)} of the job came with {values[strange[0]]}, and rank {usual} with {values[usual]}: all "
            "ranks must have the same model, options and versions"
        )


def _find_usual(values: Sequence[str]) -> int:
    """Return the first rank with the value that most ranks have; of values that are equally frequent, the first."""
    counts = Counter(values)
    return max(range(len(values)), key=lambda rank: (counts[values[rank]], -rank))


def _list_strange(values: Sequence[str]) -> list[int]:
    """Return the ranks that have another value than most."""
    usual = values[_find_usual(values)]
    return [rank for rank, value in enumerate(values) if value != usual]


def _name(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    return f"rank {listed[0]}" if len(listed) == 1 else f"ranks {', '.join(map(str, listed))}"

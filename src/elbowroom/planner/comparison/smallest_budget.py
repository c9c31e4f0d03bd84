"""Finds the smallest budget within which a step can be planned."""

from __future__ import annotations

from elbowroom.errors import Infeasible
from elbowroom.ir.arguments import check_amounts
from elbowroom.ir.check import check_trace
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.planner.options import Manages, find_managed
from elbowroom.planner.problem import MIN_OFFLOAD_BYTES, plan, pose
from elbowroom.planner.slicing.choice import Slices

MOST_TRIES = 12
"""Plans made if the lower tier is limited; each halves the remaining range."""


def find_smallest(
    trace: Trace,
    costs: Costs,
    *,
    strategy: str = "auto",
    min_offload_bytes: int = MIN_OFFLOAD_BYTES,
    host_bytes: int | None = None,
    manages: str = Manages.ACTIVATIONS,
    slices: Slices = Slices.NONE,
) -> int:
    """Return the bytes of the smallest budget for which the strategy has a plan.

    Exact if the lower tier is unlimited. If it is limited, bisection between that and the plain peak finds a budget
    that works, at most 1/4096 of the range above one that failed.

    Args:
        strategy, min_offload_bytes, host_bytes, manages, slices: as for `plan`.

    Raises:
        UnknownMember, UsageError, TraceError: as `plan` does.
        Infeasible: the strategy has no plan at the plain peak either.

    Cost: two plans, up to 14 if the lower tier is limited. None for "auto", whole ops and an unlimited lower tier: its
    smallest budget is the lowest peak there is.
    """

    def refuse(budget_bytes: int) -> Infeasible | None:
        try:
            plan(
                trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=min_offload_bytes,
                host_bytes=host_bytes, manages=manages, slices=slices,
            )  # fmt: skip
        except Infeasible as error:
            return error
        return None

    check_amounts(min_offload_bytes=min_offload_bytes, host_bytes=host_bytes)
    check_trace(trace)
    problem = pose(
        trace, costs, 1, min_offload_bytes=min_offload_bytes, host_bytes=host_bytes,
        manages=find_managed(strategy, manages),
    )  # fmt: skip
    least = problem.floor.peak_bytes
    if strategy == "auto" and problem.host_bytes is None and slices is Slices.NONE:
        return least  # `plan` guarantees it
    first = refuse(1)
    if first is not None and problem.host_bytes is None:
        least = first.needed_bytes
    if refuse(least) is None:
        return least
    most = problem.plain.peak_bytes
    if (error := refuse(most)) is not None:
        raise error
    for _ in range(MOST_TRIES):
        middle = (least + most) // 2
        if refuse(middle) is None:
            most = middle
        else:
            least = middle
    return most

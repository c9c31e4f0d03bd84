"""The function `simulate`: forecasts a step under a plan or an online policy."""

from __future__ import annotations

from elbowroom.errors import UnknownMember, UsageError
from elbowroom.ir.arguments import check_amounts, check_kinds
from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.placement import Placement
from elbowroom.ir.plan import Plan
from elbowroom.ir.sliced_trace import apply_cuts
from elbowroom.ir.trace import Trace
from elbowroom.simulator.allocator_model import Allocator
from elbowroom.simulator.online import simulate_policy
from elbowroom.simulator.planned import PreparedTrace


def simulate(
    trace: Trace,
    costs: Costs,
    plan: Plan | None = None,
    *,
    policy: str | None = None,
    budget_bytes: int | None = None,
    host_bytes: int | None = None,
    allocator: Allocator | str = Allocator.EXACT,
    placement: Placement | None = None,
) -> Forecast:
    """Forecast one step of `trace` under `plan`, or under a policy within a budget.

    Args:
        policy: online policy that decides during the step, instead of a plan.
        budget_bytes: bytes that the step may hold under a policy. A plan has its own budget.
        host_bytes: capacity of the tier below; further copies go to the disk, if the costs have a link to one. None for
            unlimited.
        allocator: "caching" also models the memory that PyTorch's allocator reserves (`layout.caching`); "planned" adds
            the sizes of the arenas if blocks and copies are laid out, and needs a plan.
        placement: of the plan's copies, if known; "planned" computes it otherwise.

    Raises:
        UsageError: both a plan and a policy are given, or neither; or an argument that belongs to the other one, or is
            of another type.
        Infeasible: the policy finds no room within the budget.
        TraceError: costs or plan belong to another trace, or a link has no bandwidth.
        UnknownMember: there is no such policy or allocator.
    """
    if allocator not in list(Allocator):
        raise UnknownMember("allocator", str(allocator), tuple(Allocator))
    if (plan is None) == (policy is None):
        raise UsageError("simulate takes a plan or a policy: give one of them")
    if (policy is None) != (budget_bytes is None):
        raise UsageError("budget_bytes belongs to a policy: give both, or a plan, which has its own budget")
    check_kinds(trace=(trace, Trace), costs=(costs, Costs))
    check_amounts(budget_bytes=budget_bytes, host_bytes=host_bytes)
    if policy is not None and budget_bytes is not None:
        if placement is not None:
            raise UsageError("placement belongs to a plan")
        return simulate_policy(
            trace, costs, budget_bytes, policy=policy, host_bytes=host_bytes, allocator=Allocator(allocator)
        )
    assert plan is not None
    check_kinds(plan=(plan, Plan))
    trace, costs, plan = apply_cuts(trace, costs, plan)
    prepared = PreparedTrace(trace, costs, host_bytes=host_bytes)
    return prepared.run(plan, allocator=Allocator(allocator), placement=placement)

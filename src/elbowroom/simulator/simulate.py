"""The verb `simulate`: what a step will do under a plan, or under a policy that decides as the step goes on."""

from __future__ import annotations

from elbowroom.errors import UnknownMember, UsageError
from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.placement import Placement
from elbowroom.ir.plan import Plan
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
        policy: decides what leaves as the step goes on; in place of a plan.
        budget_bytes: bytes that the step may hold under a policy. A plan has its own budget.
        host_bytes: what the tier below may hold before copies go on to the disk behind it, where the costs have a
            link to one; None for any amount.
        allocator: "caching" to know besides what PyTorch's allocator would take from the device (`layout.caching`);
            "planned" for that, and the arenas that blocks and copies take if they are laid out; it needs a plan.
        placement: of the plan's copies, where it is known; made for "planned" where not.

    Raises:
        UsageError: both a plan and a policy are given, or neither; or what belongs to the other one.
        Infeasible: the policy finds no room within the budget.
        TraceError: costs or plan belong to another trace, or a link moves nothing.
        UnknownMember: there is no such policy or allocator.
    """
    if allocator not in list(Allocator):
        raise UnknownMember("allocator", str(allocator), tuple(Allocator))
    if (plan is None) == (policy is None):
        raise UsageError("simulate takes a plan or a policy: give one of them")
    if (policy is None) != (budget_bytes is None):
        raise UsageError("budget_bytes belongs to a policy: give both, or a plan, which has its own budget")
    if policy is not None and budget_bytes is not None:
        if placement is not None:
            raise UsageError("placement belongs to a plan")
        return simulate_policy(
            trace, costs, budget_bytes, policy=policy, host_bytes=host_bytes, allocator=Allocator(allocator)
        )
    assert plan is not None
    prepared = PreparedTrace(trace, costs, host_bytes=host_bytes)
    return prepared.run(plan, allocator=Allocator(allocator), placement=placement)

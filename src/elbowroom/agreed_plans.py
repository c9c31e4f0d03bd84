"""Has all ranks of a distributed job follow one plan.

Nobody can wait for a rank that never comes, so ranks only meet where all of them are: when their rooms are made, at the
end of the step with a number that all know (`settling_steps`), and where the program changes the budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from elbowroom.capture_schedule import explain_no_plan
from elbowroom.config import Config
from elbowroom.errors import Infeasible, RanksDiffer
from elbowroom.hooks.input_guard import Inputs
from elbowroom.ir.codec import from_json, to_json
from elbowroom.ir.costs import Costs, Measurements
from elbowroom.ir.digest import digest
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace
from elbowroom.plan_cache import PlanCache
from elbowroom.planned_step import PlannedStep, forecast_plan
from elbowroom.planner.options import Manages
from elbowroom.planner.problem import pose
from elbowroom.ranks.agreement import Difference, Offer, Terms, digest_step, merge_offers
from elbowroom.ranks.ranks import Ranks

logger = logging.getLogger(__name__)

DESTROYED = (
    "the process group that elbowroom.fit has used is destroyed, so this rank plans alone: call detach() before "
    "destroy_process_group(), and fit again after init_process_group()"
)


class CapturedStep(NamedTuple):
    """A step that this rank has captured. `calls`: of the model during the step."""

    trace: Trace
    measurements: Measurements | None
    calls: Counter[Inputs]


class AgreedPlans:
    """Agrees on plans with the other ranks.

    Args:
        ranks: of the job.
        cache: receives the plan.
        config: of the room.

    Attributes:
        is_open: whether there may still be a plan for all ranks.
        is_dynamic: whether all ranks go on without plans, because their steps differ.
        captured: the last captured step; None if the last step was not captured.
        digest: SHA-256 of the plan that all ranks follow; "" if there is none.
    """

    def __init__(self, ranks: Ranks, cache: PlanCache, config: Config) -> None:
        self._ranks = ranks
        self._cache = cache
        self._config = config
        self._begun = 0
        self._due = config.settling_steps
        self._is_awaited = False  # whether the others may wait for this rank at the end of the step
        self.is_open = config.mode != "dynamic"
        self.is_dynamic = False
        self.captured: CapturedStep | None = None
        self.digest = ""

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Return a context in which a step runs, and this rank may wait for others."""
        with self._ranks.step():
            self._meet_late()
            self._begun += 1
            self.captured = None
            self._is_awaited = self.is_due
            yield

    def close(self) -> None:
        """Leave the other ranks."""
        self._ranks.close()

    @property
    def is_due(self) -> bool:
        """True if the ranks meet at the end of this step."""
        return self.is_open and self._begun == self._due

    def settle(self, *, goes_without: bool) -> bool:
        """Agree on a plan at the end of a step. All ranks call it at the end of the same step.

        Args:
            goes_without: whether this rank can run its steps without a plan.

        Returns:
            Whether there is a plan now. If not, a warning says why; the same on all ranks.

        Raises:
            Infeasible: no plan fits. On all ranks.
            RanksDiffer: their steps differ, and the job is to stop then. On all ranks.
            RankLost: some rank has ended, or does not come.
        """
        self._is_awaited = False
        if self._ranks.may_run_alone():
            self.is_open = False
            logger.info("some ranks may have run out of batches (join), so each plans alone")
            return False
        if self._ranks.group.is_destroyed:
            self.is_open = False
            logger.warning("%s", DESTROYED)
            return False
        step = self.captured or self._find_expected()
        trace, costs = (None, None) if step is None else (step.trace, self._price(step))
        offer = self._make_offer(trace, costs, self._cache.lease.device_bytes, goes_without=goes_without)
        calls: Counter[Inputs] = Counter() if step is None else step.calls
        if why := self._agree(offer, trace, costs, calls):
            logger.warning("%s", why)
        return not why

    def set_budget(self, budget_bytes: int, error: Infeasible | None) -> None:
        """Change the budget of all ranks to the least that one asks for, and plan the expected step again.

        Args:
            error: why this rank cannot have the budget; None if it can.

        Raises:
            Infeasible: some rank cannot have the budget, or no plan fits. On all ranks; the old budget stays in force.
        """
        if self._ranks.group.is_destroyed:
            if error is not None:
                raise error
            logger.warning("%s", DESTROYED)
            self._cache.set_budget(budget_bytes)
            return
        self._meet_late()
        entry = next((each for each in self._cache.entries if each.is_agreed), None)  # not always that of the last step
        own = budget_bytes, None if error is None else _pack(error), entry is not None
        wishes = self._ranks.group.gather("room.set_budget", own)
        refused = next(((rank, each) for rank, (_, each, _) in enumerate(wishes) if each is not None), None)
        if refused is not None:
            raise error or _unpack(refused[1], f"Rank {refused[0]} cannot have this budget.")
        least_bytes = min(nbytes for nbytes, _, _ in wishes)
        if entry is None or not all(has_agreed for _, _, has_agreed in wishes):
            self._cache.set_budget(least_bytes)
            return
        planned = entry.planned
        offer = self._make_offer(planned.trace, planned.costs, least_bytes, goes_without=True)
        if why := self._agree(offer, planned.trace, planned.costs, entry.calls):
            logger.warning("%s", why)
            self._cache.set_budget(least_bytes)

    def _meet_late(self) -> None:
        """Meet the others, if this rank's last step failed before it came to that."""
        if self._is_awaited:
            self.captured = None
            self.settle(goes_without=False)

    def _find_expected(self) -> CapturedStep | None:
        """Return the step that is expected next, which another room may have learned; None if there is none."""
        entry = self._cache.current
        return None if entry is None else CapturedStep(entry.planned.trace, None, entry.calls)

    def _price(self, step: CapturedStep) -> Costs:
        entry = self._cache.current
        if step.measurements is None and entry is not None and entry.planned.trace is step.trace:
            return entry.planned.costs
        return self._cache.planner.price(step.trace, digest(step.trace), step.measurements)

    def _make_offer(self, trace: Trace | None, costs: Costs | None, budget_bytes: int, *, goes_without: bool) -> Offer:
        if trace is None or costs is None:
            return Offer(step="", text="no step with a backward pass was captured", budget_bytes=budget_bytes)
        problem = pose(
            trace, costs, budget_bytes, min_offload_bytes=self._config.min_offload_bytes,
            host_bytes=self._cache.lease.host_bytes, manages=Manages(self._config.manages),
        )  # fmt: skip
        return Offer(
            step=digest_step(trace),
            text=f"{len(trace.ops)} ops, {len(trace.saves)} saved tensors",
            budget_bytes=budget_bytes,
            floor_bytes=problem.floor.peak_bytes,
            plain_bytes=problem.plain.peak_bytes,
            op_seconds=costs.op_seconds,
            workspace_bytes=costs.workspace_bytes,
            goes_without=goes_without,
        )

    def _agree(self, offer: Offer, trace: Trace | None, costs: Costs | None, calls: Counter[Inputs]) -> str:
        offers = self._ranks.group.gather("the first plan", offer)
        terms = merge_offers(offers)
        if isinstance(terms, Difference):
            return self._differ(terms)
        assert trace is not None and costs is not None  # all ranks have offered a step
        costs = dataclasses.replace(costs, op_seconds=terms.op_seconds, workspace_bytes=terms.workspace_bytes)
        answer = self._ranks.group.make_once("planning", terms.leader, lambda: self._answer(terms, trace, costs))
        self.is_open = False
        if (why := answer.get("why")) is not None:
            return str(why)
        if (packed := answer.get("infeasible")) is not None:
            raise _unpack(packed, f"Rank {terms.leader} needs most of {self._ranks.group.size} ranks.")
        planned = self._read(answer)
        self._cache.adopt_agreed(planned, calls, terms.budget_bytes)
        logger.info("%d ranks follow the plan %s of rank %d", self._ranks.group.size, self.digest[:12], terms.leader)
        return ""

    def _differ(self, difference: Difference) -> str:
        if difference.is_early:
            self._due = 2 * self._begun
            return f"{difference.text}; the ranks try again after step {self._due - 1}"
        self.is_open = False
        if self._config.if_ranks_differ == "stop":
            raise RanksDiffer(f"{difference.text}, and if_ranks_differ is 'stop'")
        self.is_dynamic = self._config.if_ranks_differ == "dynamic"
        how = "all ranks go on without plans" if self.is_dynamic else "each rank makes its own plans"
        return f"{difference.text}; {how}"

    def _answer(self, terms: Terms, trace: Trace, costs: Costs) -> dict[str, Any]:
        """Plan for all ranks. Failures are answers, too."""
        planner, lease = self._cache.planner, self._cache.lease.replace(terms.budget_bytes)
        try:
            planned = planner.plan(trace, costs, lease)
        except Infeasible as error:
            obstacle = None
            if not terms.goes_without:
                obstacle = planner.find_obstacle(trace, costs.trace_digest, None, lease)
            if obstacle is None:
                return {"why": explain_no_plan(error)}
            error.add(obstacle)
            return {"infeasible": _pack(error)}
        step = {"trace": to_json(trace), "costs": to_json(planned.costs), "plan": to_json(planned.plan)}
        return {"step": step, "digest": _digest_plan(planned.plan)}

    def _read(self, answer: dict[str, Any]) -> PlannedStep:
        step = answer["step"]
        trace, costs = from_json(Trace, step["trace"]), from_json(Costs, step["costs"])
        plan = from_json(Plan, step["plan"])
        if (found := _digest_plan(plan)) != answer["digest"]:
            raise RanksDiffer(f"this rank reads the plan {answer['digest'][:12]} as {found[:12]}")
        self.digest = found
        return forecast_plan(trace, costs, plan, self._cache.lease.host_bytes)


_FIELDS = (
    *("needed_bytes", "budget_bytes", "op", "is_whole_step", "in_the_way", "host_bytes", "needed_host_bytes"),
    *("state_bytes", "is_estimated", "module", "line", "note"),
)


def _pack(error: Infeasible) -> dict[str, Any]:
    return {name: getattr(error, name) for name in _FIELDS}


def _unpack(packed: dict[str, Any], note: str) -> Infeasible:
    error = Infeasible(**packed)
    error.add(note)
    return error


def _digest_plan(plan: Plan) -> str:
    return hashlib.sha256(json.dumps(to_json(plan), sort_keys=True).encode()).hexdigest()

"""Front of a job on a shared device: seconds per step within several budgets, and the least bytes that it needs."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from elbowroom.config import Config
from elbowroom.planner.bounds.bound import find_bound
from elbowroom.planner.comparison.strategies_compared import attempt
from elbowroom.planner.options import find_managed
from elbowroom.planner.problem import pose
from elbowroom.sharing.demand import FrontPoint, make_front
from elbowroom.sharing.messages import Triples

if TYPE_CHECKING:
    from elbowroom.planned_step import PlannedStep

FRONT_POINTS = 8
"""Budgets of a front, from the smallest to the plain peak. Each is planned once when a step is known or has changed."""

QUICK_STRATEGIES = ("tensile", "capuchin", "vdnn", "superneurons")
"""Strategies that plan a front in place of `auto`, which takes seconds a budget. The best plan of them counts."""

MARGIN = 64
"""Share of a budget, as a divisor, by which a lease exceeds it: steps may take a little more than their plan."""

MOST_KINDS = 16
"""Kinds of step whose floors a job keeps."""


class JobFront:
    """Fronts of a job's kinds of step: the points are those of the expected kind, the floor is the highest of all.

    A lease that shrank to what the smaller ones of several kinds need would end the job at the next larger one.

    Args:
        config: options of the room.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._known: OrderedDict[str, tuple[int, Triples]] = OrderedDict()  # by trace digest; the expected one last
        self._unplanned_bytes = 0

    def expect(self, planned: PlannedStep, budget_bytes: int) -> bool:
        """Note the step that is expected next, which runs within a budget. Return whether it is of another kind.

        Cost: as for `find_step_front`, for a kind that is not known.
        """
        digest = planned.costs.trace_digest
        if digest in self._known:
            is_new = digest != next(reversed(self._known))
            self._known.move_to_end(digest)
            return is_new
        floor_bytes, front = find_step_front(planned, self._config)
        points = tuple((point.nbytes, point.step_seconds, point.busy_seconds) for point in front)
        self._known[digest] = min(floor_bytes, budget_bytes), points
        if len(self._known) > MOST_KINDS:
            self._known.popitem(last=False)
        return True

    def note_unplanned(self, budget_bytes: int) -> None:
        """Note a step that no plan fits, but that has run within a budget. It may not within a smaller one."""
        self._unplanned_bytes = min(self._unplanned_bytes or budget_bytes, budget_bytes)

    def combine(self) -> tuple[int, Triples]:
        """Return floor and points of the job."""
        floor_bytes = max(self._unplanned_bytes, *(nbytes for nbytes, _ in self._known.values()))
        _, points = next(reversed(self._known.values()))
        kept = tuple(each for each in points if each[0] >= floor_bytes)
        if points and not kept:
            kept = ((floor_bytes, *points[-1][1:]),)
        return floor_bytes, kept

    def raise_floor(self, nbytes: int) -> None:
        """Raise the floor of the expected kind."""
        for digest in list(self._known)[-1:]:
            floor_bytes, points = self._known[digest]
            self._known[digest] = max(floor_bytes, nbytes), points

    def forget(self) -> None:
        """Forget the expected kind, so that the next step has its front found anew."""
        if self._known:
            self._known.popitem()


def find_step_front(planned: PlannedStep, config: Config) -> tuple[int, tuple[FrontPoint, ...]]:
    """Return the floor of a step in bytes, and its front.

    For `auto`, if none of the quick strategies has a plan within a budget, the lower bound on the seconds takes its
    place, so such a point is optimistic.

    Cost: `FRONT_POINTS` plans of each quick strategy.
    """
    trace, costs = planned.trace, planned.costs
    managed = find_managed(config.strategy, config.manages)
    problem = pose(trace, costs, 1, min_offload_bytes=config.min_offload_bytes, manages=managed)
    least_bytes = problem.floor.peak_bytes
    most_bytes = max(least_bytes, problem.plain.peak_bytes)
    strategies = QUICK_STRATEGIES if config.strategy == "auto" else (config.strategy,)
    points = []
    for place in range(FRONT_POINTS):
        budget_bytes = least_bytes + (most_bytes - least_bytes) * place // (FRONT_POINTS - 1)
        found = [
            attempt(trace, costs, budget_bytes, each, host_bytes=config.host_bytes, manages=config.manages).outcome
            for each in strategies
        ]
        planned_seconds = [(each.step_seconds, each.stall_seconds) for each in found if each is not None]
        if not planned_seconds and config.strategy == "auto":
            bounded = pose(
                trace, costs, budget_bytes, min_offload_bytes=config.min_offload_bytes, manages=managed
            )  # fmt: skip
            planned_seconds = [(find_bound(bounded).seconds, 0.0)]
        if not planned_seconds:
            continue
        step_seconds, stall_seconds = min(planned_seconds)
        points.append(
            FrontPoint(
                nbytes=budget_bytes + budget_bytes // MARGIN,
                step_seconds=step_seconds,
                busy_seconds=max(0.0, step_seconds - stall_seconds),
            )
        )
    front = make_front(points)
    return front[0].nbytes if front else most_bytes, front

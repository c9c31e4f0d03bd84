"""tvDNN: the schedule of swaps as an integer program over stretches of time, solved by HiGHS within limits.

For each bundle of storages j and each stretch of time k: whether it is away (0 or 1), and which part of it is copied
out, and which back, in that stretch.

    away[j,k] <= out[j] before k             it leaves once it is copied, for this gap or an earlier one of its claim
    away[j,k] <= back[j] after k             it is copied back later, into memory that is taken from then on
    held[k] - sum bytes[j] away[j,k] <= budget
    t[k] >= ops in k, copies out in k, copies back in k
    minimise sum t[k]

Source: J. Park, H. Cho, W. Jung, J. Lee, "Transparent GPU memory management for DNNs" (tvDNN), poster, PPoPP 2018: an
optimal schedule of swaps by integer linear programming; sections of buffers, not buffers, are moved. Only its abstract
was available. Inferred: the program above. The copies are divisible, as those of many small sections are; whether a
storage is away is one decision, since here whole storages are released.

Four programs are solved in turn: the relaxation, which gives a bound; then the variables that it leaves fractional,
with the rest fixed; then with only the storages fixed that it has away; then the whole program. Each search stops after
`nodes` nodes, and no further one begins once the best solution is within half a percent of the bound. The best solution
is used, and the log states its gap (`planner.ilp.solver_limits`). `seconds` is a last resort: a plan that it cut short
may differ from run to run.

Coarse (`planner.ilp.coarsening`): `steps` stretches instead of every event, each with its maximum, and storages in
bundles. So a solution is not optimal for the real step. It decides which storages leave; the sweep of `tvdnn_heuristic`
over the real events, which evicts these before others and counts exact bytes, decides when they leave and return. A
stretch can exceed the budget although every event in it could be made to fit; that costs the program more than any
wait, and the sweep evicts the missing bytes. The sweep's plan without the program is returned if the solver finds
nothing within its limits, and if it is faster; the log says so.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from elbowroom.errors import UsageError
from elbowroom.ir.hardware import Link
from elbowroom.ir.plan import Plan
from elbowroom.planner.heuristics.eviction import (
    EvictableGap,
    EvictionSweep,
    draft_offloads,
    farthest_next_use,
    list_evictable_gaps,
)
from elbowroom.planner.ilp.coarsening import Bundle, Stretch, cut_stretches, make_bundles
from elbowroom.planner.ilp.solver_limits import LAST_RESORT_SECONDS, SolverLimits
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.draft import Key
from elbowroom.planner.schedule.memory_curve import MemoryCurve

Array = npt.NDArray[np.float64]

log = logging.getLogger(__name__)

GAP = 5e-3
"""Relative gap at which the solver stops: stretches are coarser than that."""

OVER_BUDGET = 100.0
"""Cost in steps of exceeding the budget by all of it in one stretch."""

SHARES = 1000.0
"""Units of time in a step with all its copies, one after the other."""

INTEGRAL = 1e-6
"""Distance from an integer within which a variable counts as integral."""

COPYING = 1e-4
"""Cost in seconds of a second of copying: of equal schedules, the one with fewer copies is preferred."""


def make_plan(problem: Problem, *, steps: int = 40, nodes: int = 20, seconds: float = LAST_RESORT_SECONDS) -> Plan:
    """Return the plan of the program's best solution found within these limits.

    Args:
        steps: stretches of time that the program distinguishes.
        nodes: nodes of the solver's search tree, after which its best solution so far is used.
        seconds: time limit of the solver, as a last resort.

    Raises:
        UsageError: `steps` is less than 2, or `nodes` or `seconds` is not positive.
    """
    if steps < 2:
        raise UsageError(f"tvdnn_ilp needs steps >= 2, not {steps}")
    limits = SolverLimits(gap=GAP, nodes=nodes, seconds=seconds)
    swept = _sweep(problem, frozenset())
    if not problem.floor.peak_bytes <= problem.budget_bytes < problem.plain.peak_bytes:
        return swept  # nothing has to leave, or evicting everything does not suffice
    drafter = problem.drafter
    load = MemoryCurve(drafter, problem.plain.live_bytes)
    stretches = cut_stretches(drafter, load, steps)
    program = _Program(
        stretches, make_bundles(drafter, load, stretches), drafter.replay.costs.link, problem.budget_bytes
    )
    chosen = program.solve(limits)
    if chosen is None:
        return swept
    solved = _sweep(problem, chosen)
    with_it, without = (drafter.replay.run(plan).step_seconds for plan in (solved, swept))
    if with_it <= without:
        return solved
    log.info("tvdnn_ilp: the heuristic's plan is faster: %.6g s instead of %.6g s", without, with_it)
    return swept


def _sweep(problem: Problem, chosen: frozenset[Key]) -> Plan:
    """Return the plan of a sweep over the real events that evicts the chosen gaps before all others."""
    drafter = problem.drafter
    farthest = farthest_next_use(drafter)

    def rank(gap: EvictableGap, tick: int, is_clean: bool) -> tuple[float, ...]:
        return (float(gap.key in chosen), *farthest(gap, tick, is_clean))

    load = MemoryCurve(drafter, problem.plain.live_bytes)
    times = EvictionSweep(drafter, load, problem.budget_bytes, list_evictable_gaps(drafter), rank).run()
    plan = drafter.finish(draft_offloads(times), "tvdnn_ilp", problem.budget_bytes)
    assert plan is not None  # it drops nothing
    return plan


@dataclasses.dataclass(frozen=True, slots=True)
class _Columns:
    """The variables of one bundle, by stretch."""

    bundle: Bundle
    away: dict[int, int]
    out: dict[int, int]
    back: dict[int, int]


class _Program:
    """The integer program: variables by index, and rows of coefficients with their lower bounds."""

    def __init__(
        self, stretches: tuple[Stretch, ...], bundles: tuple[Bundle, ...], link: Link, budget_bytes: int
    ) -> None:
        self._stretches = stretches
        self._link = link
        self._budget = budget_bytes
        self._costs: list[float] = []
        self._bounds: list[tuple[float, float]] = []
        self._whole: list[bool] = []
        self._rows: list[tuple[dict[int, float], float]] = []
        over = [k for k, stretch in enumerate(stretches) if stretch.live_bytes > budget_bytes]
        # Solvers have absolute tolerances, so time is in shares of the longest possible step.
        copies = sum(bundle.out_seconds + bundle.back_seconds for bundle in bundles)
        self._unit = (sum(stretch.seconds for stretch in stretches) + copies) / SHARES or 1.0
        self._time = [self._add(1.0, (stretch.seconds / self._unit, np.inf)) for stretch in stretches]
        excess = {k: self._add(OVER_BUDGET * SHARES, (0.0, np.inf)) for k in over}
        self._columns: list[_Columns] = []
        for bundle in bundles:
            away = [k for k in over if bundle.first <= k <= bundle.last]
            if away:
                self._columns.append(self._add_bundle(bundle, away))
        self._constrain_away()
        self._constrain_memory(excess)
        self._constrain_link()
        self._constrain_ends()

    def _add(self, cost: float, bounds: tuple[float, float] = (0.0, 1.0), *, whole: bool = False) -> int:
        self._costs.append(cost)
        self._bounds.append(bounds)
        self._whole.append(whole)
        return len(self._costs) - 1

    def _add_bundle(self, bundle: Bundle, away: list[int]) -> _Columns:
        out, back = COPYING * bundle.out_seconds / self._unit, COPYING * bundle.back_seconds / self._unit
        return _Columns(
            bundle,
            {k: self._add(0.0, whole=True) for k in away},
            {k: self._add(out) for k in range(bundle.copied, away[-1])},
            {k: self._add(back) for k in range(away[0] + 1, bundle.last + 2)},
        )

    def _constrain_away(self) -> None:
        """Require that a bundle is away only after its copy out, and before its copy back."""
        by_key = {columns.bundle.keys[0]: columns for columns in self._columns}
        for columns in self._columns:
            copied: list[int] = []  # copies of earlier gaps of the claim
            before = columns.bundle.before
            while before in by_key:
                copied += by_key[before].out.values()
                before = by_key[before].bundle.before
            for k, away in columns.away.items():
                earlier = [variable for each, variable in columns.out.items() if each < k]
                later = [variable for each, variable in columns.back.items() if each > k]
                self._rows.append(({**dict.fromkeys([*copied, *earlier], 1.0), away: -1.0}, 0.0))
                self._rows.append(({**dict.fromkeys(later, 1.0), away: -1.0}, 0.0))

    def _constrain_memory(self, excess: dict[int, int]) -> None:
        for k, variable in excess.items():
            row = {
                columns.away[k]: columns.bundle.nbytes / self._budget for columns in self._columns if k in columns.away
            }
            self._rows.append(({variable: 1.0, **row}, self._stretches[k].live_bytes / self._budget - 1.0))

    def _constrain_link(self) -> None:
        """Bound the time of a stretch below: by its ops with the drag of copies, and by its copies."""
        for k, stretch in enumerate(self._stretches):
            out = {each.out[k]: -each.bundle.out_seconds / self._unit for each in self._columns if k in each.out}
            back = {each.back[k]: -each.bundle.back_seconds / self._unit for each in self._columns if k in each.back}
            for lane in [{**out, **back}] if self._link.half_duplex else [out, back]:
                if lane:
                    self._rows.append(({self._time[k]: 1.0, **lane}, 0.0))
            if self._link.drag_seconds_per_byte and (out or back):
                sizes = {moved[k]: each.bundle.nbytes for each in self._columns for moved in (each.out, each.back)
                         if k in moved}  # fmt: skip
                slow = self._link.drag_seconds_per_byte / self._unit
                drag = {variable: -slow * size for variable, size in sizes.items()}
                self._rows.append(({self._time[k]: 1.0, **drag}, stretch.seconds / self._unit))

    def _constrain_ends(self) -> None:
        """Allow no copy of a gap before it opens, in its first stretch, and none after it closes, in its last one."""
        outward = sorted(self._columns, key=lambda each: (each.bundle.copied, -each.bundle.early_seconds))
        homeward = sorted(self._columns, key=lambda each: (each.bundle.last, -each.bundle.late_seconds))
        for place, columns in enumerate(outward):
            k = columns.bundle.copied
            row = {
                each.out[k]: -each.bundle.out_seconds / self._unit
                for each in outward[: place + 1]
                if each.bundle.copied == k
            }
            self._rows.append(({self._time[k]: 1.0, **row}, columns.bundle.early_seconds / self._unit))
        for place, columns in enumerate(homeward):
            k = columns.bundle.last + 1
            row = {
                each.back[k]: -each.bundle.back_seconds / self._unit
                for each in homeward[: place + 1]
                if each.bundle.last + 1 == k
            }
            self._rows.append(({self._time[k]: 1.0, **row}, columns.bundle.late_seconds / self._unit))

    def solve(self, limits: SolverLimits) -> frozenset[Key] | None:
        """Return the gaps that leave in the best solution found within the limits; None if there is none."""
        if not self._columns:
            return frozenset()
        deadline = time.monotonic() + limits.seconds
        whole, bounds = np.array(self._whole, dtype=float), np.array(self._bounds)
        constraint = self._constrain()
        relaxed = self._optimise(constraint, 0 * whole, bounds, limits.options(limits.seconds))
        best, bound = None, relaxed.fun
        if relaxed.x is not None:
            rounded = np.round(relaxed.x)
            settled = (whole > 0) & (np.abs(relaxed.x - rounded) < INTEGRAL)
            for fixed in (settled, settled & (rounded > 0), np.zeros_like(settled)):
                left = deadline - time.monotonic()
                if left <= 0 or (best is not None and best.fun <= bound * (1 + GAP)):
                    break
                narrowed = np.where(fixed[:, None], rounded[:, None], bounds)
                found = self._optimise(constraint, whole, narrowed, limits.options(left))
                if not fixed.any():
                    bound = max(bound, found.mip_dual_bound or bound)
                if found.x is not None and (best is None or found.fun < best.fun):
                    best = found
        if best is None:
            log.warning("tvdnn_ilp: no solution within %d nodes and %g s: using the heuristic's plan",
                        limits.nodes, limits.seconds)  # fmt: skip
            return None
        size = f"{len(whole)} variables, {int(whole.sum())} of them integer, {len(self._rows)} rows"
        limits.log_gap("tvdnn_ilp", (best.fun - bound) / max(bound, INTEGRAL), size)
        return frozenset(
            key
            for columns in self._columns
            if any(best.x[variable] > 0.5 for variable in columns.away.values())
            for key in columns.bundle.keys
        )

    def _constrain(self) -> Any:
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_array

        indices = [variable for row, _ in self._rows for variable in row]
        values = [value for row, _ in self._rows for value in row.values()]
        starts = np.cumsum([0, *(len(row) for row, _ in self._rows)])
        matrix = csr_array((values, indices, starts), shape=(len(self._rows), len(self._costs)))
        return LinearConstraint(matrix, lb=np.array([least for _, least in self._rows]))

    def _optimise(self, constraint: Any, whole: Array, bounds: Array, options: dict[str, Any]) -> Any:
        from scipy.optimize import Bounds, milp

        return milp(
            np.array(self._costs),
            integrality=whole,
            bounds=Bounds(bounds[:, 0], bounds[:, 1]),
            constraints=constraint,
            options=options,
        )

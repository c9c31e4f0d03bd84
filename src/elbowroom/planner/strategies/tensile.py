"""TENSILE: swap the largest block at the memory peak that the link has time for; otherwise recompute one.

    peak analysis -> of the blocks on the device, largest first:
                       copy out  as early as the channel is free, done by the peak
                       copy back as late as the channel is free, before its next use
                       and again for its later uses: a block that has a copy is just released
                     -> analyse again
    no block can be swapped -> of those never swapped, drop the one with the most bytes per second of recomputation

If everything is managed, blocks are activations and the model's state. A parameter or optimizer state that leaves after
the update returns in the next step; a block that has not changed since its last copy is just released. State is never
recomputed.

The channel is one for both directions. The planner stops when memory use is within the budget, when nothing can be
scheduled, or when after 100 rounds the last three have not lowered the peak by 0.05 %.

Source: K. Zhang, H. Wang, H. Hu, S. Zou, J. Qiu, T. Li, Z. Wang, "TENSILE: A tensor granularity dynamic GPU memory
scheduling method toward multiple dynamic workloads system", 2021 (arXiv 2105.13336), and the authors' code: its planner
for one job. Not carried over: several jobs, the prediction of op times, replanning as they drift. Inferred: a copy out
must be done by the peak. Recomputation reads blocks that stay: as published, a block with an evicted source is not
recomputed; in addition, a source of a recomputed block is not evicted later. Sources that autograd did not save are
replayed along with the block. Gradients wait between their last use and the release by the program as any other block.
Ours: without a budget the published planner goes on as long as it can; here it stops once the plan fits, and returns
the plan with the lowest peak so far if none does. With the state, its plan for activations alone is a candidate too:
the state's blocks can use up the rounds.

Cost: for each block chosen, linear in ticks and in the gaps at the peak.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.ir.plan import Decision, Plan
from elbowroom.planner.heuristics.state_swaps import StateSwaps
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.assembly import ReplayStep, assemble, list_replays
from elbowroom.planner.schedule.draft import Key
from elbowroom.planner.schedule.link_timetable import LinkTimetable
from elbowroom.planner.schedule.memory_curve import MemoryCurve
from elbowroom.planner.schedule.timing import CopyTimetable, Times
from elbowroom.planner.state.windows import Window
from elbowroom.replays.closure import Closure

PATIENT_ROUNDS = 100
"""Rounds made however little they gain."""

LEAST_GAIN = 0.0005
"""Share of the peak that one of the last rounds must gain after that."""

ROUNDS_COMPARED = 3
"""Number of last rounds compared."""

LEAST_SECONDS = 1e-12
"""Stands for a recomputation time of zero, to keep ratios finite."""


def make_plan(problem: Problem) -> Plan:
    """Return the plan after the first round that fits; otherwise the one with the lowest peak."""
    return _make_plan(problem, _Schedule(problem))


def make_joint_plan(problem: Problem) -> Plan:
    """Return the plan after the first round that fits, the model's state included; or `make_plan`'s if that is better.

    The faster plan is better, or the one with the lower peak if none fits.
    """
    plans = [_make_plan(problem, _Schedule(problem, swaps_state=True)), make_plan(problem)]
    return min(plans, key=functools.partial(_rank, problem))


def _rank(problem: Problem, plan: Plan) -> tuple[bool, float]:
    forecast = problem.drafter.replay.run(plan)
    fits = problem.fits(forecast)
    return not fits, forecast.step_seconds if fits else float(forecast.peak_bytes)


def _make_plan(problem: Problem, schedule: _Schedule) -> Plan:
    peaks = [schedule.load.peak_bytes]
    chosen = schedule.chosen
    while peaks[-1] > problem.budget_bytes and not _stalls(peaks) and schedule.advance():
        peaks.append(schedule.load.peak_bytes)
        if peaks[-1] < min(peaks[:-1]):
            chosen = schedule.chosen
    replays: list[ReplayStep] = []
    for replay in list_replays(problem.drafter, chosen.dropped, keeps=lambda key, tick: False):
        assert isinstance(replay, ReplayStep)  # its leaves stay on the device
        replays.append(replay)
    plan = assemble(problem.drafter, "tensile", problem.budget_bytes, offloads=chosen.times, replays=replays)
    return dataclasses.replace(plan, state=chosen.state)


@dataclasses.dataclass(frozen=True, slots=True)
class _Chosen:
    """Swaps of activations with their times, dropped gaps, and swaps of the state."""

    times: dict[Key, Times]
    dropped: frozenset[Key]
    state: tuple[Decision, ...]


def _stalls(peaks: list[int]) -> bool:
    recent = peaks[-1 - ROUNDS_COMPARED :]
    gains = [before - after for before, after in itertools.pairwise(recent)]
    return len(peaks) > PATIENT_ROUNDS and max(gains) < LEAST_GAIN * peaks[-1]


class _Schedule:
    """The swaps and recomputations so far, and memory use with them."""

    def __init__(self, problem: Problem, *, swaps_state: bool = False) -> None:
        drafter = problem.drafter
        self._drafter = drafter
        self._gaps = drafter.gaps
        self._begins = drafter.begins
        self._link, self._storages = drafter.replay.costs.link, drafter.replay.trace.storages
        self._most_bytes = problem.host_bytes
        self._timetable, self._channel = CopyTimetable(drafter), LinkTimetable()
        self.load = MemoryCurve(drafter, problem.plain.live_bytes)
        self._claim_of = {
            key: (key[0], drafter.graph.claim_at(key[0], self._gaps[key].closes)) for key in self.load.keys
        }
        self._gaps_of: dict[tuple[int, int], list[Key]] = {}
        for key, claim in self._claim_of.items():
            self._gaps_of.setdefault(claim, []).append(key)
        self._times: dict[Key, Times] = {}
        self._copied: set[tuple[int, int]] = set()  # by storage and claim
        self._read: dict[int, list[int]] = {}  # when replays read a storage
        self._closures: dict[Key, Closure | None] = {}
        self._dropped: set[Key] = set()
        self._state = StateSwaps(problem, self.load, self._channel) if swaps_state else None

    @property
    def chosen(self) -> _Chosen:
        """The decisions so far."""
        state = () if self._state is None else self._state.decide(self._state.chosen)
        return _Chosen(dict(self._times), frozenset(self._dropped), state)

    def advance(self) -> bool:
        """Swap or recompute one block; return whether any was possible."""
        tick = self.load.peak_tick
        present = [key for key in self.load.spanning(tick) if key not in self._times and key not in self._dropped]
        blocks: list[tuple[int, Key, Window | None]] = [(-self.load.nbytes[key], key, None) for key in present]
        if self._state is not None:
            blocks += [(-window.nbytes, window.key, window) for window in self._state.spanning(tick)]
        blocks.sort(key=lambda block: block[:2])
        swapped = (
            self._swap(key, tick) if window is None else self._swap_state(window, tick) for _, key, window in blocks
        )
        return any(swapped) or self._recompute(present)

    # -- swaps ----------------------------------------------------------------------------------------------------

    def _swap(self, key: Key, peak_tick: int) -> bool:
        """Swap a block after its first use before the peak for which the channel is free; then after later uses."""
        placed = False
        for each in self._gaps_of[self._claim_of[key]]:
            if each in self._times or each in self._dropped or self._is_read(each):
                continue
            if self._claim_of[each] not in self._copied and self._gaps[each].opens >= peak_tick:
                break
            placed |= self._place(each, peak_tick)
        return placed

    def _swap_state(self, window: Window, peak_tick: int) -> bool:
        """Swap a storage of the state, if the channel is free and no replay reads it meanwhile."""
        assert self._state is not None
        has_room = self._most_bytes is None or self._count_below() + window.nbytes <= self._most_bytes
        return has_room and self._state.swap(window, peak_tick, self._read.get(window.key[0], ()))

    def _place(self, key: Key, peak_tick: int) -> bool:
        gap, nbytes = self._gaps[key], self._storages[key[0]].nbytes
        leave, gone_at = gap.opens, self._begins[gap.opens]
        is_first = self._claim_of[key] not in self._copied
        out_seconds, back_seconds = offload_seconds(self._link, nbytes), reload_seconds(self._link, nbytes)
        if is_first:
            if not self._has_room_below(key):
                return False
            out_begin = self._channel.earliest(gone_at, out_seconds)
            leave, gone_at = max(leave, self._timetable.moment_before(out_begin)), out_begin + out_seconds
            if gone_at > self._begins[min(peak_tick, gap.closes)]:
                return False
        back_begin = self._channel.latest(self._begins[gap.closes], back_seconds)
        release = self._timetable.moment_at(gone_at, leave)
        back = self._timetable.moment_before(back_begin)
        if back_begin < gone_at or back < self._timetable.earliest_back(key, release):
            return False
        if is_first:
            self._channel.take(out_begin, out_seconds)
            self._copied.add(self._claim_of[key])
        self._channel.take(back_begin, back_seconds)
        self._times[key] = Times(release, back, leave)
        self.load.take(key, release, back)
        return True

    def _is_read(self, key: Key) -> bool:
        """Return whether a replay reads the block while it would be away."""
        gap = self._gaps[key]
        return any(gap.opens < tick <= gap.closes for tick in self._read.get(key[0], ()))

    def _has_room_below(self, key: Key) -> bool:
        if self._most_bytes is None:
            return True
        return self._count_below() + self.load.nbytes[key] <= self._most_bytes

    def _count_below(self) -> int:
        below = sum(int(self._drafter.replay.rounded[storage]) for storage, _ in self._copied)
        return below + (0 if self._state is None else self._state.count_below())

    # -- recomputation --------------------------------------------------------------------------------------------

    def _recompute(self, present: list[Key]) -> bool:
        """Drop the block that saves most per second, among those present that never leave and whose sources stay."""
        found: list[tuple[float, Key, Closure]] = []
        for key in present:
            closure = self._find_closure(key)
            if closure is not None and self._claim_of[key] not in self._copied and not self._is_read(key):
                seconds = self._drafter.replay.footprints.count_seconds(closure.ops)
                found.append((-self.load.nbytes[key] / max(seconds, LEAST_SECONDS), key, closure))
        for _, key, closure in sorted(found, key=lambda each: each[:2]):
            if not any(self._is_away(leaf, self._gaps[key].closes) for leaf in closure.leaves):
                self._drop(key, closure)
                return True
        return False

    def _find_closure(self, key: Key) -> Closure | None:
        if key not in self._closures:
            closes = self._gaps[key].closes
            self._closures[key] = self._drafter.find_closure(key[0], closes, lambda storage: storage == key[0])
        return self._closures[key]

    def _is_away(self, storage: int, tick: int) -> bool:
        """Return whether a chosen gap of a storage spans a tick."""
        if self._state is not None and self._state.is_away(storage, tick):
            return True
        chosen = (key for key in (*self._times, *self._dropped) if key[0] == storage)
        return any(self._gaps[key].opens < tick <= self._gaps[key].closes for key in chosen)

    def _drop(self, key: Key, closure: Closure) -> None:
        gap, load = self._gaps[key], self.load
        self._dropped.add(key)
        load.take_all(key)
        replay = next(iter(list_replays(self._drafter, [key], keeps=lambda key, tick: False)))
        assert isinstance(replay, ReplayStep)
        load.put(key, gap.opens, replay.leaves[0] + 1)
        load.live[gap.closes] += self._drafter.replay.footprints.measure(
            replay.segment, replay.segment.outputs
        ).extra_bytes
        for leaf in closure.leaves:
            self._read.setdefault(leaf, []).append(gap.closes)

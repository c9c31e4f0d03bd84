"""Greedy descent from the peak, and local improvement, over drafts scored by forecasts."""

from __future__ import annotations

import dataclasses

from elbowroom.cost.transfers import drag_seconds, offload_seconds, reload_seconds
from elbowroom.errors import InternalError
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.plan import Choice, Plan
from elbowroom.planner.draft import Draft, Drafter, Key, Option

MOST_REFINEMENTS = 400
"""Forecasts spent on improving a plan that fits. A count and not a time, so that plans repeat."""

SHARE_PER_ROUND = 0.25
"""Of the bytes that are too many, how much is removed before forecasting again."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Candidate:
    key: Key
    option: Option
    seconds: float
    nbytes: int

    def sort_key(self) -> tuple[float, Key, str]:
        return (self.seconds / self.nbytes, self.key, self.option.choice)


class Search:
    """One search; `plan` and `forecast` are always of the current draft."""

    def __init__(self, drafter: Drafter, budget_bytes: int, strategy: str) -> None:
        self._drafter, self._budget, self._strategy = drafter, budget_bytes, strategy
        self._storages = drafter.replay.trace.storages
        self._link = drafter.replay.costs.link
        self._refused: set[tuple[Key, Option]] = set()
        self.restart({})

    def restart(self, draft: Draft) -> None:
        """Go on from another draft, one that drops nothing."""
        self._draft = draft
        plan = self._drafter.finish(draft, self._strategy, self._budget)
        if plan is None:
            raise InternalError("a search must start from a draft that can be carried out")
        self.plan: Plan = plan
        self.forecast: Forecast = self._drafter.replay.run(plan)

    def _try(self, draft: Draft) -> tuple[Plan, Forecast] | None:
        plan = self._drafter.finish(draft, self._strategy, self._budget)
        return None if plan is None else (plan, self._drafter.replay.run(plan))

    def _accept(self, draft: Draft, plan: Plan, forecast: Forecast) -> None:
        self._draft, self.plan, self.forecast = draft, plan, forecast

    # -- descent --------------------------------------------------------------------------------------------------

    def descend(self) -> bool:
        """Make choices until the forecast fits the budget. Returns whether it does."""
        while self.forecast.peak_bytes > self._budget:
            excess = self.forecast.peak_bytes - self._budget
            candidates = sorted(self._list_candidates(self.forecast.peak_tick), key=_Candidate.sort_key)
            draft, freed = dict(self._draft), 0
            taken: list[_Candidate] = []
            for candidate in candidates:
                if candidate.key not in draft or draft[candidate.key] == self._draft.get(candidate.key):
                    draft[candidate.key] = candidate.option
                    taken.append(candidate)
                    freed += candidate.nbytes
                    if freed >= SHARE_PER_ROUND * excess:
                        break
            if not taken:
                return False
            tried = self._try(draft)
            if tried is None:
                self._take_one_by_one(taken)
            else:
                self._accept(draft, *tried)
                # What did not lower this tick's count is of no use; do not offer it for ever.
                self._refused.update((candidate.key, candidate.option) for candidate in taken)
        return True

    def _take_one_by_one(self, taken: list[_Candidate]) -> None:
        """Together they could not be carried out: take those that can."""
        for candidate in taken:
            draft = {**self._draft, candidate.key: candidate.option}
            tried = self._try(draft)
            self._refused.add((candidate.key, candidate.option))
            if tried is not None:
                self._accept(draft, *tried)

    def _list_candidates(self, tick: int) -> list[_Candidate]:
        """Every change that would lower the count of bytes at `tick`."""
        found: list[_Candidate] = []
        decided = {(decision.storage, decision.gap): decision for decision in self.plan.decisions}
        busy_out = sum(
            offload_seconds(self._link, self._storages[storage].nbytes)
            for storage, index in decided
            if decided[storage, index].choice is Choice.OFFLOAD and index == 0
        )
        for key, gap in self._drafter.gaps.items():
            if not gap.opens < tick < gap.closes or self._storages[key[0]].released > tick:
                continue
            option = self._draft.get(key)
            nbytes = self._storages[key[0]].nbytes
            if option is None:
                found.append(self._offload(key, nbytes, tick, busy_out))
                recompute = self._recompute(key, nbytes)
                if recompute is not None:
                    found.append(recompute)
            elif option.choice is Choice.OFFLOAD:
                found += self._tighten(key, option, decided.get(key), tick, nbytes)
        return [item for item in found if (item.key, item.option) not in self._refused]

    def _offload(self, key: Key, nbytes: int, tick: int, busy_out: float) -> _Candidate:
        begins, gap = self._drafter.begins, self._drafter.gaps[key]
        out, back = offload_seconds(self._link, nbytes), reload_seconds(self._link, nbytes)
        exposed = max(0.0, busy_out + out - begins[tick])
        exposed += max(0.0, back - (begins[gap.closes] - begins[tick]))
        return _Candidate(key, Option(Choice.OFFLOAD), exposed + 2 * drag_seconds(self._link, nbytes), nbytes)

    def _recompute(self, key: Key, nbytes: int) -> _Candidate | None:
        gap = self._drafter.gaps[key]
        closure = self._drafter.closures.find(key[0], gap.closes, lambda storage: self._is_dropped(storage, gap.closes))
        if closure is None:
            return None
        seconds = self._drafter.replay.transients.seconds(closure.ops)
        return _Candidate(key, Option(Choice.RECOMPUTE), seconds, nbytes)

    def _is_dropped(self, storage: int, tick: int) -> bool:
        index = 0
        while (gap := self._drafter.gaps.get((storage, index))) is not None:
            if gap.opens < tick <= gap.closes:
                option = self._draft.get((storage, index))
                return option is not None and option.choice is Choice.RECOMPUTE
            index += 1
        return False

    def _tighten(self, key: Key, option: Option, decision: object, tick: int, nbytes: int) -> list[_Candidate]:
        """An offloaded storage that is still, or already, there at `tick`."""
        release = getattr(decision, "release", tick + 1)
        back = getattr(decision, "back", tick + 1)
        if tick <= release and not option.hurry:
            hurried = dataclasses.replace(option, hurry=True)
            return [_Candidate(key, hurried, offload_seconds(self._link, nbytes), nbytes)]
        if tick >= back and not option.late:
            late = dataclasses.replace(option, late=True)
            return [_Candidate(key, late, reload_seconds(self._link, nbytes), nbytes)]
        return []

    # -- improvement ----------------------------------------------------------------------------------------------

    def refine(self) -> None:
        """Make the plan faster while it still fits."""
        left = MOST_REFINEMENTS
        improved = True
        while improved and left > 0:
            improved = False
            for key in self._by_cost():
                for option in self._alternatives(self._draft.get(key)):
                    if left == 0:
                        return
                    left -= 1
                    if self._improves(key, option):
                        improved = True
                        break

    def _by_cost(self) -> list[Key]:
        """Decided gaps, dearest first."""
        transients = self._drafter.replay.transients
        sizes: dict[Key, float] = {}
        for decision in self.plan.decisions:
            key = (decision.storage, decision.gap)
            nbytes = self._storages[decision.storage].nbytes
            if decision.choice is Choice.RECOMPUTE:
                segment = self.plan.segments[decision.segment]
                sizes[key] = transients.seconds(segment.ops) / len(segment.outputs)
            else:
                sizes[key] = 2 * drag_seconds(self._link, nbytes) + offload_seconds(self._link, nbytes)
        for key in self._draft:
            sizes.setdefault(key, 0.0)  # decided, but without effect: drop the words
        return sorted(sizes, key=lambda key: (-sizes[key], key))

    def _alternatives(self, option: Option | None) -> list[Option | None]:
        if option is None:
            return []
        if option.choice is Choice.RECOMPUTE:
            return [None, Option(Choice.OFFLOAD)]
        eased = [Option(Choice.OFFLOAD, hurry=False, late=option.late), Option(Choice.OFFLOAD, hurry=option.hurry)]
        return [None, *(other for other in eased if other != option), Option(Choice.RECOMPUTE)]

    def _improves(self, key: Key, option: Option | None) -> bool:
        draft = dict(self._draft)
        if option is None:
            draft.pop(key, None)
        else:
            draft[key] = option
        tried = self._try(draft)
        if tried is None:
            return False
        plan, forecast = tried
        if forecast.peak_bytes > self._budget or not self._is_better(draft, forecast):
            return False
        self._accept(draft, plan, forecast)
        return True

    def _is_better(self, draft: Draft, forecast: Forecast) -> bool:
        """Faster; or as fast, with fewer moves."""
        if forecast.step_seconds != self.forecast.step_seconds:
            return forecast.step_seconds < self.forecast.step_seconds
        return len(draft) < len(self._draft)

"""FlashNeuron's policy as a plan: what forward makes for backward is sent out from the first on, until the rest fits.

    left                                                                 right
    | parameters | what stays, lowest address first |    free    | what is sent out, highest address first |

Backward waits for the last block to be out, then fetches in order of use, as far as the largest free stretch has room
beside the largest op. Memory has addresses, and a block needs a stretch of its own: that is what it fails on.

Source: J. Bae et al., "FlashNeuron: SSD-Enabled Large-Batch Training of Very Deep Neural Networks", FAST 2021, as the
public artifact of G10 simulates it. Inferred: of the tensors of one op the order of allocation.
"""

from __future__ import annotations

import bisect

from walks import Away, Job, Key, Walk

from elbowroom.ir.forecast import Forecast
from elbowroom.ir.gaps import Gap

PAGE_BYTES = 4096


def flashneuron(job: Job, budget_bytes: int) -> Forecast | None:
    """Its selection and its schedule; None where the model is too large for it."""
    loss = next(op.tick for op in job.trace.ops if op.name == "makeLoss")
    chosen = _choose(job, budget_bytes, loss)
    if chosen is None:
        return None
    try:
        return job.forecast("flashneuron", _Walk(job, budget_bytes, chosen, loss).run())
    except MemoryError:
        return None


def _choose(job: Job, budget_bytes: int, loss: int) -> frozenset[Key] | None:
    homes = job.trace.storages
    room = budget_bytes - sum(home.nbytes for home in homes if home.created < 0) - job.working_bytes[0]
    spanning = {gap.storage: key for key, gap in sorted(job.gaps.items()) if gap.opens < loss < gap.closes}
    order = _crossing(job, loss)
    total = sum(map(job.size, order))
    chosen = set()
    for storage in order:
        if total < room:
            break
        if storage in spanning:
            chosen.add(spanning[storage])
            total -= job.size(storage)
    return None if room <= 0 or total > room else frozenset(chosen)


def _crossing(job: Job, loss: int) -> list[int]:
    """Storages that forward uses and backward reads again, in order of first use."""
    last = {view.storage: op.tick for op in job.trace.ops for view in op.reads}
    first: dict[int, None] = {}
    for op in job.trace.ops:
        if op.tick < loss:
            first.update(dict.fromkeys(view.storage for view in (*op.reads, *op.writes)))
    return [each for each in first if job.trace.storages[each].created >= 0 and last.get(each, -1) >= loss]


class _Arena:
    """Pages in two directions: stretches that are taken, by their beginning."""

    def __init__(self, nbytes: int) -> None:
        self._pages = nbytes // PAGE_BYTES
        self._taken: list[tuple[int, int]] = []  # [begin, end), sorted
        self._where: dict[int, tuple[int, int]] = {}

    def _gaps(self) -> list[tuple[int, int]]:
        begins = [0, *(end for _, end in self._taken)]
        ends = [*(begin for begin, _ in self._taken), self._pages]
        return [(begin, end) for begin, end in zip(begins, ends, strict=True) if end > begin]

    def largest(self) -> int:
        """Bytes of the largest free stretch."""
        return max((end - begin for begin, end in self._gaps()), default=0) * PAGE_BYTES

    def take(self, storage: int, nbytes: int, *, right: bool) -> bool:
        """Take a stretch for a block; False if there is none."""
        pages = -(-nbytes // PAGE_BYTES)
        for begin, end in reversed(self._gaps()) if right else self._gaps():
            if end - begin >= pages:
                place = (end - pages, end) if right else (begin, begin + pages)
                bisect.insort(self._taken, place)
                self._where[storage] = place
                return True
        return pages == 0

    def give(self, storage: int) -> None:
        """Take it back."""
        place = self._where.pop(storage, None)
        if place is not None:
            del self._taken[bisect.bisect_left(self._taken, place)]


class _Walk(Walk):
    def __init__(self, job: Job, budget_bytes: int, chosen: frozenset[Key], loss: int) -> None:
        super().__init__(job, budget_bytes, wanted=chosen)
        self._loss = loss
        self._chosen = {storage for storage, _ in chosen}
        self._arena = _Arena(budget_bytes)
        self._makes: dict[int, list[int]] = {}
        self._ends: dict[int, list[int]] = {}
        read = {view.storage for op in job.trace.ops for view in op.reads}
        workspaces = [0]
        for home in job.trace.storages:
            if home.created < 0:
                self._arena.take(home.id, home.nbytes, right=False)
            elif home.id in read:
                self._makes.setdefault(home.created, []).append(home.id)
                self._ends.setdefault(job.ends[home.id], []).append(home.id)
            else:
                workspaces.append(home.nbytes)
        self._arena.take(-1, max(workspaces), right=False)
        self._make_room(0, job.events[0])  # before that nothing can move

    def _make_room(self, tick: int, until: int) -> None:
        if tick >= self._loss:
            for each in self.away.values():
                if each.release < 0:
                    self._give_up(each, tick)
        for at in range(tick, until + 1):
            for storage in self._ends.get(at, ()):
                self._arena.give(storage)
            for storage in self._makes.get(at, ()):
                self._place(storage, tick)

    def _place(self, storage: int, tick: int) -> None:
        while not self._arena.take(storage, self.job.size(storage), right=storage in self._chosen):
            each = next((each for each in self.away.values() if each.release < 0), None)
            if each is None:
                raise MemoryError
            self._give_up(each, tick)

    def _give_up(self, each: Away, tick: int) -> None:
        super()._give_up(each, tick)
        self._arena.give(each.gap.storage)

    def _close(self, gap: Gap, tick: int) -> None:
        each = self.away.get(gap.storage)
        if each is not None and each.release >= 0:
            self._place(gap.storage, tick)
        super()._close(gap, tick)

    def _fetch_early(self, tick: int) -> None:
        if tick < self._loss:
            return
        rest = self._arena.largest() - self.job.working_bytes[1]
        for each in sorted(self.away.values(), key=lambda each: each.gap.closes):
            size = self.job.size(each.gap.storage)
            if each.release < 0 or rest <= size:
                return
            self._arena.take(each.gap.storage, size, right=True)
            self._fetch(each, tick)
            rest -= size

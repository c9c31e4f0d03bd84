"""G10's policy as a plan: the gaps whose absence relieves the memory most are spent away, for as long as is safe.

    gap of a block    |<-- out, as the link has time -->|<------ away ------>|<-- back, as late as is safe -->|
                                                                    <--- or earlier, where there is room

Source: H. Zhang, Y. E. Zhou, Y. Xue, Y. Liu, J. Huang, "G10: Enabling An Efficient Unified GPU Memory and Storage
Architecture with Smart Tensor Migrations", MICRO 2023, section 4, and what its public artifact does. Inferred: one tier
below instead of host and SSD side by side; parameters stay; what the schedule leaves over is evicted, whole blocks at a
time, the least recently used first, where G10 relies on page faults.
"""

from __future__ import annotations

import bisect
import pathlib
import re

import numpy as np
from walks import Job, Key, Walk

from elbowroom.ir.forecast import Forecast


def follow_guide(job: Job, path: pathlib.Path) -> Forecast:
    """The schedule that the artifact itself wrote down (`prefetch_guide.config`), carried out as it stands.

    Capacity is not enforced, as it is not in the artifact's own runs without unified memory.
    """
    ops = [op for op in job.trace.ops if op.name != "input"]
    labels = {home.label: home.id for home in job.trace.storages}
    firsts = {(key[0], bisect.bisect_left([op.tick for op in ops], tick)): key for key, tick in job.leaves.items()}
    backs: dict[Key, int] = {}
    latest: dict[int, Key] = {}
    line = re.compile(r"Issued Time: (\d+) Tensor: (\d+) .*To: (\w+)")
    for index, number, target in (found.groups() for found in map(line.match, path.read_text().splitlines()) if found):
        storage = labels.get(f"tensor{number}", -1)
        if target != "In_gpu" and (storage, int(index)) in firsts:
            key = latest[storage] = firsts[storage, int(index)]
            backs[key] = job.gaps[key].closes
        elif target == "In_gpu" and storage in latest:
            backs[latest[storage]] = min(backs[latest[storage]], job.event_before(ops[int(index)].tick))
    walk = Walk(job, 1 << 60, wanted=frozenset(backs), backs=backs)
    return job.forecast("g10", walk.run())


def g10(job: Job, budget_bytes: int) -> Forecast:
    """G10's choice of gaps and its schedule, on one tier."""
    chosen = _Vitality(job, budget_bytes)
    backs = chosen.choose()
    walk = Walk(job, budget_bytes, wanted=frozenset(backs), backs=backs, evicts=True)
    return job.forecast("g10", walk.run())


class _Vitality:
    """Memory and link time by op, as G10 plans them: what relief each gap would give, and what room the link has."""

    def __init__(self, job: Job, line_bytes: int) -> None:
        self.job, self.line = job, line_bytes
        ticks = [op.tick for op in job.trace.ops]
        self.ticks = ticks
        self.seconds = np.array(job.costs.op_seconds)
        self.memory = job.live[ticks].astype(float)
        link = job.costs.link
        self.out_room = self.seconds * link.out_bytes_per_second
        self.back_room = self.seconds * link.back_bytes_per_second
        self.keys = sorted(job.gaps)
        self.sizes = np.array([job.size(key[0]) for key in self.keys], dtype=float)
        self.first = np.array([bisect.bisect_left(ticks, job.leaves[key]) for key in self.keys])
        self.last = np.array([bisect.bisect_left(ticks, job.gaps[key].closes) for key in self.keys])

    def choose(self) -> dict[Key, int]:
        """The gaps to spend away, and the tick at which each comes back."""
        tried = np.zeros(len(self.keys), dtype=bool)
        chosen: list[tuple[int, int, int]] = []
        while not tried.all() and (self.memory > self.line).any():
            relief = np.where(tried, 0.0, self._relief())
            index = int(np.argmax(relief))
            if relief[index] <= 0:
                break
            tried[index] = True
            cleared, fetched = self._place(index)
            if fetched > cleared:
                self._occupy(index, fetched)
                self.memory[cleared + 1 : fetched] -= self.sizes[index]
                chosen.append((fetched, cleared, index))
        return {self.keys[index]: self._hasten(fetched, cleared, index) for fetched, cleared, index in sorted(chosen)}

    def _relief(self) -> np.ndarray:
        """Bytes x seconds over the line, from when half of a block could be out to when half would be coming back."""
        pressed = np.concatenate(([0.0], np.cumsum(self.seconds * (self.memory > self.line))))
        out, back = (np.concatenate(([0.0], np.cumsum(room))) for room in (self.out_room, self.back_room))
        gone = np.searchsorted(out, out[self.first] + self.sizes / 2)
        come = np.searchsorted(back, back[self.last] - self.sizes / 2, side="right") - 1
        gone, come = np.minimum(gone, len(pressed) - 1), np.maximum(come, 0)
        return np.where(come > gone, self.sizes * (pressed[come] - pressed[gone]), 0.0)

    def _place(self, index: int) -> tuple[int, int]:
        """The op during which the last of it is out; the op at which it must begin to come back."""
        out, back = (np.concatenate(([0.0], np.cumsum(room))) for room in (self.out_room, self.back_room))
        cleared = int(np.searchsorted(out, out[self.first[index]] + self.sizes[index])) - 1
        fetched = int(np.searchsorted(back, back[self.last[index]] - self.sizes[index], side="right")) - 1
        return cleared, fetched

    def _occupy(self, index: int, fetched: int) -> None:
        left = self.sizes[index]
        for op in range(self.first[index], len(self.ticks)):
            taken = min(left, self.out_room[op])
            self.out_room[op] -= taken
            left -= taken
            if left <= 0:
                break
        left = self.sizes[index]
        for op in range(self.last[index] - 1, fetched - 1, -1):
            taken = min(left, self.back_room[op])
            self.back_room[op] -= taken
            left -= taken

    def _hasten(self, fetched: int, cleared: int, index: int) -> int:
        """Earlier, where there is room until it would be safe."""
        op = fetched
        while op > cleared + 1 and self.memory[op - 1] + self.sizes[index] <= self.line:
            op -= 1
            self.memory[op] += self.sizes[index]
        return self.job.event_before(self.ticks[op])

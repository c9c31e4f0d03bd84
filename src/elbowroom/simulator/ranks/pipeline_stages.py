"""Cuts the step of one device into the stages of a pipeline: which entries, seconds and bytes each stage has.

Blocks (`blocks.find_block`) follow one another in the forward pass; a stage is a run of blocks, chosen so that the
slowest stage is as fast as possible. What lies in no block belongs to the block before it, at the beginning to the
first one.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from elbowroom.errors import UsageError
from elbowroom.ir.trace import PERSISTENT_ROLES, Role
from elbowroom.simulator.ranks.blocks import ROOT, find_block
from elbowroom.simulator.ranks.rank_step import RankStep
from elbowroom.simulator.ranks.turns import list_touched

Ints = npt.NDArray[np.int64]


class PipelineStages:
    """PipelineStages of a pipeline.

    Attributes:
        count: number of stages.
        blocks: names of the blocks of each stage.
        entry_stages: stage of each entry before the update; those of the update belong to all.
        forward_seconds, backward_seconds, update_seconds: of each stage, for the trace's batch.
        whole_update_seconds: of the update on one device.
        cut_bytes: bytes that each stage passes to the next one; 0 for the last.
        owners: stages that hold each storage.
        spread: storages that an op of the update makes for several stages, each of which holds its share.

    Raises:
        UsageError: the model has fewer blocks than stages, or they do not run one after another.
    """

    def __init__(self, step: RankStep, count: int) -> None:
        self._step, self.count = step, count
        names, positions = self._find_positions()
        if len(names) < count:
            raise UsageError(
                f"{step.trace.name} has {len(names)} blocks (items of a ModuleList or Sequential), which do not make "
                f"{count} stages: take at most {len(names)} stages"
            )
        seconds = np.bincount(positions[: step.update], weights=step.entry_seconds[: step.update], minlength=len(names))
        ends = split_evenly(seconds.tolist(), count)
        stage_of_block = np.array([bisect.bisect_right(ends, index) for index in range(len(names))], dtype=np.int64)
        self.blocks = [names[begin:end] for begin, end in itertools.pairwise((0, *ends))]
        self.entry_stages: Ints = stage_of_block[positions]
        self.owners = self._find_owners()
        self.spread = self._find_update_owners()
        self._shares = self._list_shares()
        self.forward_seconds = self._sum(0, step.backward)
        self.backward_seconds = self._sum(step.backward, step.update)
        self.update_seconds = self._sum_update()
        self.whole_update_seconds = float(sum(step.entry_seconds[step.update :]))
        self.cut_bytes = self._count_cuts()

    def list_tied(self) -> list[tuple[int, int, int]]:
        """Return (first stage, last stage, bytes) of the gradients of parameters that several stages use."""
        storages = self._step.trace.storages
        return [
            (min(self.owners[home.id]), max(self.owners[home.id]), home.nbytes)
            for home in storages
            if home.role is Role.PARAMETER and len(self.owners[home.id]) > 1
        ]

    def _find_positions(self) -> tuple[list[str], Ints]:
        """Return the blocks in the order of the forward pass, and the position of each entry's block."""
        step = self._step
        order: dict[str, int] = {}
        for op in step.trace.ops:
            block = find_block(op.module)
            if op.tick < step.backward and block != ROOT:
                if block in order and order[block] != len(order) - 1:
                    raise UsageError(
                        f"{block} of {step.trace.name} runs again after {list(order)[-1]}: a pipeline needs blocks "
                        "that run one after another"
                    )
                order.setdefault(block, len(order))
        positions = np.zeros(step.trace.end, dtype=np.int64)
        blocks = {op.tick: find_block(op.module) for op in step.trace.ops}
        current = 0
        for tick in range(step.trace.end):
            if tick == step.backward:
                current = max(len(order) - 1, 0)
            current = order.get(blocks.get(tick, ROOT), current)
            positions[tick] = current
        return list(order), positions

    def _sum(self, begin: int, end: int) -> list[float]:
        found = np.bincount(
            self.entry_stages[begin:end], weights=self._step.entry_seconds[begin:end], minlength=self.count
        )
        return [float(seconds) for seconds in found]

    def _sum_update(self) -> list[float]:
        """Divide the seconds of each op of the update by the bytes that each stage holds of what it touches."""
        step = self._step
        found = [0.0] * self.count
        ops = {op.tick: op for op in step.trace.ops}
        for tick in range(step.update, step.trace.end):
            touched = list_touched(ops[tick]) if tick in ops else set()
            whole = sum(step.trace.storages[each].nbytes for each in touched)
            for stage in range(self.count):
                held = sum(self.count_held(each, stage) for each in touched)
                found[stage] += float(step.entry_seconds[tick]) * (held / whole if whole else 1.0)
        return found

    def count_held(self, storage: int, stage: int) -> float:
        """Return the bytes of a storage that a stage holds."""
        nbytes = self._step.trace.storages[storage].nbytes
        if storage in self.spread:
            return nbytes * self._shares[stage]
        return nbytes if stage in self.owners[storage] else 0

    def _list_shares(self) -> list[float]:
        """Return the share of each stage in the bytes of all parameters."""
        weights = [home for home in self._step.trace.storages if home.role is Role.PARAMETER]
        whole = sum(home.nbytes for home in weights)
        held = [sum(home.nbytes for home in weights if stage in self.owners[home.id]) for stage in range(self.count)]
        return [nbytes / whole if whole else 1.0 for nbytes in held]

    def _find_owners(self) -> list[tuple[int, ...]]:
        """Return the stages that hold each storage: those that use a parameter, buffer or input in the forward or
        backward pass, that of the parameter for gradients and optimizer state, and the one that makes all others."""
        step, storages = self._step, self._step.trace.storages
        users: dict[int, set[int]] = {}
        for op in step.trace.ops:
            if op.tick < step.update:
                for view in (*op.reads, *op.writes):
                    users.setdefault(view.storage, set()).add(int(self.entry_stages[op.tick]))
        of_module = {
            home.module: tuple(sorted(users[home.id]))
            for home in reversed(storages)  # so that a module's first parameter counts
            if home.role is Role.PARAMETER and home.id in users
        }
        owners: list[tuple[int, ...]] = []
        for home in storages:
            if home.role in (Role.GRADIENT, Role.OPTIMIZER_STATE) and home.module in of_module:
                owners.append(of_module[home.module])
            elif home.created < 0:
                owners.append(tuple(sorted(users.get(home.id, {0}))))
            else:
                owners.append((int(self.entry_stages[home.created]),))
        return owners

    def _find_update_owners(self) -> frozenset[int]:
        """Assign what the update makes to the stages of what it is made from; return what belongs to several."""
        step = self._step
        spread = set[int]()
        for op in step.trace.ops:
            if op.tick >= step.update:
                touched = list_touched(op)
                made = {each for each in touched if step.trace.storages[each].created == op.tick}
                sources = {stage for each in touched - made for stage in self.owners[each]}
                for each in made if sources else ():
                    self.owners[each] = tuple(sorted(sources))
                    spread |= {each} if len(sources) > 1 else set()
        return frozenset(spread)

    def _count_cuts(self) -> list[int]:
        """Return the bytes that the forward pass of each stage leaves for later ones."""
        step, storages = self._step, self._step.trace.storages
        furthest: dict[int, int] = {}
        for op in step.trace.ops:
            if op.tick < step.backward:
                for view in op.reads:
                    furthest[view.storage] = max(furthest.get(view.storage, 0), int(self.entry_stages[op.tick]))
        cuts = [0] * self.count
        for storage, last in furthest.items():
            home = storages[storage]
            if home.created >= 0 and home.role not in PERSISTENT_ROLES:
                for stage in range(int(self.entry_stages[home.created]), last):
                    cuts[stage] += home.nbytes
        return cuts


def split_evenly(weights: Sequence[float], parts: int) -> list[int]:
    """Return the ends of `parts` runs of weights whose largest sum is as small as possible; no run is empty.

    Cost: parts * len(weights) ** 2.
    """
    sums = [0.0, *itertools.accumulate(weights)]
    best = [[sums[end] for end in range(len(sums))]]
    cuts: list[list[int]] = [[0] * len(sums)]
    for part in range(1, parts):
        row, cut = [float("inf")] * len(sums), [0] * len(sums)
        for end in range(part + 1, len(sums)):
            row[end], cut[end] = min((max(best[-1][at], sums[end] - sums[at]), at) for at in range(part, end))
        best.append(row)
        cuts.append(cut)
    ends = [len(weights)]
    for part in range(parts - 1, 0, -1):
        ends.append(cuts[part][ends[-1]])
    return ends[::-1]

"""A step of `fully_shard`: each rank holds a share of the model's state, and gathers each block for its turn.

    compute   [root  block 1 | block 2 | ...       backward: ... | block 2 | block 1 ] wait | update of the share
    network   gather root, 1, 2, ...                 gather 2, 1; reduce-scatter 2, 1, root

A block is gathered while the one before it computes: its gather is issued when that one begins. With resharding a
block is freed after its last op of the forward pass and gathered again for the backward pass. What lies in no block,
the root, stays from the first op to the end of the backward pass. Gradients of a block are copied into a buffer, which
is reduced while the next block computes, and used again once that one is ready. The optimizer updates the share, in a
share of the time.

Sources: Y. Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", PVLDB 16(12), 2023,
sections 3 and 4; `torch/distributed/fsdp/_fully_shard`; S. Rajbhandari et al., "ZeRO", SC 2020 (bytes of shards).
Inferred: shares are even, without padding of the first dimension; blocks are those of `blocks.find_block`; all
collectives share one lane; copies into and out of their buffers take no time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np

from elbowroom.cost.shapes import element_bytes
from elbowroom.ir.network import CollectiveKind, Network
from elbowroom.ir.parallelism import Parallelism, RanksForecast
from elbowroom.ir.trace import Role
from elbowroom.simulator.allocator_model import Stay
from elbowroom.simulator.ranks.blocks import find_block
from elbowroom.simulator.ranks.lanes import ComputeLane, NetworkLane
from elbowroom.simulator.ranks.rank_step import LiveBytes, RankStep, touches_state
from elbowroom.simulator.ranks.turns import Gradient, Turn, list_touched, list_turns, list_weights

_SHARDED_ROLES = frozenset({Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE})


def simulate_sharded(step: RankStep, network: Network, parallelism: Parallelism) -> RanksForecast:
    """Forecast a step of ranks that shard the model's state."""
    run = _ShardedRun(step, network, parallelism)
    run.carry_out()
    saved = count_saved_update(step, parallelism)
    return RanksForecast(
        ranks=parallelism.ranks,
        step_seconds=step.forecast.step_seconds + run.compute.late - saved,
        alone_seconds=step.forecast.step_seconds,
        exposed_seconds=run.compute.late,
        bubble_seconds=0.0,
        network_seconds=sum(call.end - call.begin for call in run.lane.calls),
        sent_bytes=run.lane.count_sent(),
        peak_bytes=int(max(run.count_live())),
        collectives=run.lane.list_totals(),
    )


def count_saved_update(step: RankStep, parallelism: Parallelism) -> float:
    """Return the seconds that the optimizer saves on a share of the state.

    An op on 1 / n of the bytes takes 1 / n of the time, but no less than the shortest op of the step, which is a launch
    and nothing else. Shards of another dtype have more or fewer bytes than the trace's.
    """
    shortest = min((seconds for seconds in step.costs.op_seconds if seconds > 0.0), default=0.0)
    saved = 0.0
    for op, seconds in zip(step.trace.ops, step.costs.op_seconds, strict=True):
        if op.tick >= step.update and seconds > shortest and touches_state(step.trace, op):
            touched = list_touched(op)
            whole = sum(step.trace.storages[each].nbytes for each in touched)
            shared = sum(count_shared_bytes(step, each, parallelism) for each in touched)
            saved += seconds - max(seconds * shared / whole / parallelism.ranks, shortest) if whole else 0.0
    return saved


def count_shared_bytes(step: RankStep, storage: int, parallelism: Parallelism) -> int:
    """Return the bytes of which all ranks together hold shares, in the dtype of shards."""
    nbytes, dtype = step.trace.storages[storage].nbytes, step.dtypes.get(storage)
    if parallelism.shard_dtype is None or dtype is None:
        return nbytes
    return nbytes * element_bytes(parallelism.shard_dtype) // element_bytes(dtype)


class _ShardedRun:
    """One step: turns of blocks, and their collectives."""

    def __init__(self, step: RankStep, network: Network, parallelism: Parallelism) -> None:
        self._step, self._parallelism = step, parallelism
        self._ranks = parallelism.ranks
        self.compute = ComputeLane(step.forecast.begin_seconds)
        self.lane = NetworkLane(network, parallelism, parallelism.ranks)
        self._weights = list_weights(step.trace)
        self._gradients: dict[str, list[Gradient]] = {}
        for gradient in step.gradients:
            self._gradients.setdefault(find_block(step.trace.storages[gradient.storage].module), []).append(gradient)
        self._turns = list_turns(step.trace, reshard_after_forward=parallelism.reshard_after_forward)

    def carry_out(self) -> None:
        """Issue the collectives in the order of their ticks, and let compute wait for them."""
        ready = {block: gradients[-1].ready for block, gradients in self._gradients.items()}
        issued = self._find_issues()
        done: dict[Turn, float] = {}
        reduced = 0.0
        for tick in sorted({turn.begin for turn in self._turns} | set(ready.values()) | set(issued.values())):
            for block in [block for block, then in ready.items() if then == tick]:
                self.compute.wait(tick, reduced)  # so that the buffer of the last reduction can be used again
                nbytes = sum(self._count_shared(each.storage) for each in self._gradients[block])
                reduced = self.lane.start(CollectiveKind.REDUCE_SCATTER, nbytes, self.compute.find_time(tick))
            for turn in [turn for turn in self._turns if issued[turn] == tick]:
                nbytes = sum(self._step.trace.storages[each].nbytes for each in self._weights[turn.block])
                done[turn] = self.lane.start(CollectiveKind.ALL_GATHER, nbytes, self.compute.find_time(tick))
            for turn in [turn for turn in self._turns if turn.begin == tick]:
                self.compute.wait(tick, done[turn])
        self.compute.wait(self._step.update, reduced)

    def _find_issues(self) -> dict[Turn, int]:
        """Return the tick at which each turn's gather is issued: the begin of the turn before, in the same pass."""
        issued: dict[Turn, int] = {}
        for before, turn in itertools.pairwise((None, *self._turns)):
            assert turn is not None
            begins = self._step.backward if turn.begin >= self._step.backward else 0
            issued[turn] = begins if before is None else max(before.begin, begins)
        return issued

    def count_live(self) -> LiveBytes:
        """Return the bytes on a rank's device during each entry."""
        step, storages = self._step, self._step.trace.storages
        whole = [stay for stay in step.stays if storages[stay.storage].role in _SHARDED_ROLES]
        shards = {stay.storage: self._count_shard(stay.storage) for stay in whole}
        live: LiveBytes = (
            np.asarray(step.forecast.live_bytes)
            - step.count_live(whole)
            + step.count_live(self._list_shards(whole), shards)
        )
        if self._ranks == 1:
            return live
        self._add_whole_gradients(live)
        for turn, issued in self._find_issues().items():
            live[issued : turn.end] += sum(step.rounded[each] for each in self._weights[turn.block])
        return live

    def _add_whole_gradients(self, live: LiveBytes) -> None:
        """Add gradients from their creation until they are copied for the reduction of their block; and these copies,
        in the dtype of shards, until the next block has its own."""
        step, storages = self._step, self._step.trace.storages
        order = sorted(self._gradients.values(), key=lambda gradients: gradients[-1].ready)
        ends = [gradients[-1].ready for gradients in order[1:]] + [step.update]
        for gradients, end in zip(order, ends, strict=True):
            ready = gradients[-1].ready
            for each in gradients:
                if storages[each.storage].created >= 0:
                    live[storages[each.storage].created : ready] += step.rounded[each.storage]
                live[ready:end] += step.round_up(self._count_shared(each.storage))

    def _count_shared(self, storage: int) -> int:
        return count_shared_bytes(self._step, storage, self._parallelism)

    def _count_shard(self, storage: int) -> int:
        """Return the bytes of one rank's share of a storage, rounded up."""
        return self._step.round_up(-(-self._count_shared(storage) // self._ranks))

    def _list_shards(self, whole: Iterable[Stay]) -> list[Stay]:
        """Return the stays of shards. Those of gradients that the step makes begin when their block is ready."""
        storages = self._step.trace.storages
        ready = {
            each.storage: gradients[-1].ready
            for gradients in self._gradients.values()
            for each in gradients
            if storages[each.storage].created >= 0 and self._ranks > 1
        }
        return [dataclasses.replace(stay, begin=max(stay.begin, ready.get(stay.storage, -1))) for stay in whole]

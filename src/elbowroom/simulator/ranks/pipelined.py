"""A step of a pipeline: each stage on ranks of its own, and micro-batches one after another through all stages.

    stage 0   F0 F1 F2 F3 .  .  .  B0 F4 .. B1 ...            1F1B; with p equal stages and m micro-batches a rank waits
    stage 1      F0 F1 F2 .  .  B0 F3 B1 ...                  for (p - 1) / (m + p - 1) of the time

Activations go to the next stage when they are ready, one after another, and their gradients come back the same way;
that takes time, but no compute.
With more ranks than stages, each stage has ranks / stages replicas whose gradients are reduced at the end, before the
update. Replicas of a stage are neighbours in the network.

Sources: Y. Huang et al., "GPipe", NeurIPS 2019 (the schedule and its bubble); D. Narayanan et al., "PipeDream", SOSP
2019, and "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, section 2.2
(1F1B).
Inferred: sends overlap with compute; what one stage makes and a later one reads is passed on whole, and so is its
gradient; reduction does not overlap with the last backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from elbowroom.cost.collectives import price_send
from elbowroom.errors import UsageError
from elbowroom.ir.network import CollectiveKind, Network
from elbowroom.ir.parallelism import CollectiveTotal, MicroBatchOrder, Parallelism, RanksForecast, StageForecast
from elbowroom.simulator.ranks.lanes import NetworkLane
from elbowroom.simulator.ranks.pipeline_stages import PipelineStages
from elbowroom.simulator.ranks.rank_step import RankStep
from elbowroom.simulator.ranks.stage_memory import StageMemory


class Work(NamedTuple):
    """One micro-batch in one stage, forward or backward."""

    micro_batch: int
    is_forward: bool


def simulate_pipelined(step: RankStep, network: Network, parallelism: Parallelism) -> RanksForecast:
    """Forecast a step of a pipeline.

    Raises:
        UsageError: the ranks are no multiple of the stages, or the model cannot be cut (`PipelineStages`).
    """
    count, ranks = parallelism.stages, parallelism.ranks
    if count < 1 or parallelism.micro_batches < 1:
        raise UsageError(
            f"a pipeline has 1 stage and 1 micro-batch or more, not {count} and {parallelism.micro_batches}"
        )
    if ranks % count:
        raise UsageError(f"{ranks} ranks do not divide into {count} stages: take a multiple of {count} ranks")
    stages = PipelineStages(step, count)
    run = _PipelinedRun(step, stages, network, parallelism)
    free = _PipelinedRun(step, stages, None, parallelism)
    work = parallelism.micro_batches * (sum(stages.forward_seconds) + sum(stages.backward_seconds))
    forecasts = tuple(_forecast_stage(step, stages, stage, parallelism) for stage in range(count))
    seconds = [sum(total.seconds for total in totals) for totals in run.totals]
    return RanksForecast(
        ranks=ranks,
        step_seconds=run.step_seconds,
        alone_seconds=(work + stages.whole_update_seconds) / count,
        exposed_seconds=run.step_seconds - free.step_seconds,
        bubble_seconds=max(free.flushed) - work / count,
        network_seconds=max(seconds),
        sent_bytes=max(run.sent_bytes),
        peak_bytes=max(each.peak_bytes for each in forecasts),
        collectives=run.totals[seconds.index(max(seconds))],
        stages=forecasts,
    )


def _forecast_stage(step: RankStep, stages: PipelineStages, stage: int, parallelism: Parallelism) -> StageForecast:
    micro_batches = parallelism.micro_batches
    is_gpipe = parallelism.schedule is MicroBatchOrder.GPIPE
    alive = micro_batches if is_gpipe else min(stages.count - stage, micro_batches)
    memory = StageMemory(step, stages, stage)
    return StageForecast(
        first=stages.blocks[stage][0],
        last=stages.blocks[stage][-1],
        forward_seconds=stages.forward_seconds[stage],
        backward_seconds=stages.backward_seconds[stage],
        update_seconds=stages.update_seconds[stage],
        sent_bytes=stages.cut_bytes[stage],
        alive=alive,
        activation_bytes=memory.activation_bytes,
        peak_bytes=memory.count_peak(alive, adds_up=micro_batches > 1),
    )


def order_work(stage: int, stages: int, micro_batches: int, schedule: MicroBatchOrder) -> list[Work]:
    """Return the work of one stage, in order."""
    ahead = micro_batches if schedule is MicroBatchOrder.GPIPE else min(stages - stage - 1, micro_batches)
    order = [Work(index, is_forward=True) for index in range(ahead)]
    for index in range(micro_batches):
        if ahead + index < micro_batches:
            order.append(Work(ahead + index, is_forward=True))
        order.append(Work(index, is_forward=False))
    return order


def time_flush(
    forward: Sequence[float],
    backward: Sequence[float],
    sends: Sequence[float],
    micro_batches: int,
    schedule: MicroBatchOrder,
) -> list[float]:
    """Return when each stage has finished its last backward pass.

    Args:
        forward, backward: seconds of one micro-batch in each stage.
        sends: seconds in which each stage passes a micro-batch to the next one, or that one its gradient back.

    Cost: stages * micro-batches.
    """
    count = len(forward)
    orders = [order_work(stage, count, micro_batches, schedule) for stage in range(count)]
    arrived: dict[tuple[int, Work], float] = {}
    links = {is_forward: [0.0] * count for is_forward in (True, False)}
    clock, position = [0.0] * count, [0] * count
    while any(position[stage] < len(orders[stage]) for stage in range(count)):
        for stage in range(count):
            while position[stage] < len(orders[stage]):
                work = orders[stage][position[stage]]
                if stage == (0 if work.is_forward else count - 1):
                    arrived[stage, work] = 0.0
                if (stage, work) not in arrived:
                    break
                seconds = (forward if work.is_forward else backward)[stage]
                clock[stage] = max(clock[stage], arrived[stage, work]) + seconds
                position[stage] += 1
                following, link = (stage + 1, stage) if work.is_forward else (stage - 1, stage - 1)
                if 0 <= following < count:
                    free = links[work.is_forward]
                    free[link] = max(free[link], clock[stage]) + sends[link]
                    arrived[following, work] = free[link]
    return clock


class _PipelinedRun:
    """One step of all stages.

    Args:
        network: None for one that takes no time.

    Attributes:
        flushed: end of the last backward pass of each stage.
        step_seconds: duration of the step.
        totals, sent_bytes: of each stage's collectives.
    """

    def __init__(
        self, step: RankStep, stages: PipelineStages, network: Network | None, parallelism: Parallelism
    ) -> None:
        self._stages, self._network = stages, network
        self._parallelism = parallelism
        self._replicas = parallelism.ranks // stages.count
        self._sends = [self._price_send(nbytes) for nbytes in stages.cut_bytes]
        self.flushed = time_flush(
            stages.forward_seconds, stages.backward_seconds, self._sends, parallelism.micro_batches,
            parallelism.schedule,
        )  # fmt: skip
        self.totals: list[tuple[CollectiveTotal, ...]] = []
        self.sent_bytes: list[int] = []
        ready = [self._reduce(stage, step) for stage in range(stages.count)]
        for first, last, nbytes in stages.list_tied():
            ready[first] = ready[last] = max(ready[first], ready[last]) + self._price_send(nbytes, last - first)
        self.step_seconds = max(seconds + update for seconds, update in zip(ready, stages.update_seconds, strict=True))

    def _reduce(self, stage: int, step: RankStep) -> float:
        """Reduce a stage's gradients among its replicas, and note its collectives; return when that is over."""
        micro_batches, cuts = self._parallelism.micro_batches, self._stages.cut_bytes
        sent, back = cuts[stage], cuts[stage - 1] if stage else 0
        passed = CollectiveTotal(
            kind=CollectiveKind.SEND,
            count=micro_batches * ((sent > 0) + (back > 0)),
            nbytes=micro_batches * (sent + back),
            seconds=micro_batches * (self._sends[stage] + (self._sends[stage - 1] if stage else 0.0)),
        )
        self.totals.append((passed,) if passed.count else ())
        self.sent_bytes.append(passed.nbytes)
        if self._network is None:
            return self.flushed[stage]
        gradients = [each.storage for each in step.gradients if stage in self._stages.owners[each.storage]]
        lane = NetworkLane(self._network, self._parallelism, self._replicas)
        nbytes = sum(step.trace.storages[storage].nbytes for storage in gradients)
        over = lane.start(CollectiveKind.ALL_REDUCE, nbytes, self.flushed[stage])
        self.totals[stage] += lane.list_totals()
        self.sent_bytes[stage] += lane.count_sent()
        return over

    def _price_send(self, nbytes: int, stages_apart: int = 1) -> float:
        if self._network is None or self._stages.count == 1:
            return 0.0
        return price_send(self._network, nbytes, stages_apart * self._replicas, self._parallelism.ranks)

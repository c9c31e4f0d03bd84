"""Parallelism: how a job's ranks share its step; and RanksForecast, the prediction of one step of all ranks."""

from __future__ import annotations

import dataclasses
import enum

from elbowroom.ir.network import Algorithm, CollectiveKind
from elbowroom.units import format_bytes, format_seconds


class Parallel(enum.StrEnum):
    """Share of the job that each rank has."""

    DATA = "data"
    """The batch: `DistributedDataParallel`."""
    SHARDED = "sharded"
    """The batch, and the model's state: `fully_shard`, ZeRO."""
    PIPELINED = "pipelined"
    """The layers, in stages; and the batch, if there are more ranks than stages."""


class MicroBatchOrder(enum.StrEnum):
    """Order of the micro-batches in a pipeline."""

    ONE_F_ONE_B = "1f1b"
    """Backward as soon as possible: stage s of p holds at most p - s micro-batches."""
    GPIPE = "gpipe"
    """All forward passes, then all backward passes: each stage holds all micro-batches."""


class ShardDtype(enum.StrEnum):
    """Dtype of the state that ranks share out, and in which they add gradients."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Division of a step among ranks.

    Attributes:
        ranks: number of processes, each with a device of its own.
        algorithm: of collectives.
        bucket_bytes: gradients that `DistributedDataParallel` reduces together (`bucket_cap_mb`); None for its default.
        gradient_as_bucket_view: whether gradients are views of their buckets, which saves a copy of all gradients.
        reshard_after_forward: whether `fully_shard` frees gathered weights between forward and backward pass.
        shard_dtype: of shards and of the reduction of gradients, as in mixed precision: the trace's weights are what is
            gathered. None for the trace's dtypes.
        stages: parts of the model in a pipeline.
        micro_batches: steps of the trace's batch that a pipeline adds up before each update.
        schedule: order of the micro-batches.
    """

    kind: Parallel
    ranks: int
    algorithm: Algorithm = Algorithm.AUTO
    bucket_bytes: int | None = None
    gradient_as_bucket_view: bool = False
    reshard_after_forward: bool = True
    shard_dtype: ShardDtype | None = None
    stages: int = 1
    micro_batches: int = 1
    schedule: MicroBatchOrder = MicroBatchOrder.ONE_F_ONE_B


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTotal:
    """All collectives of one kind in a step of one rank: their number, bytes of whole tensors, and seconds."""

    kind: CollectiveKind
    count: int
    nbytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageForecast:
    """One stage of a pipeline.

    Attributes:
        first, last: modules of its first and last block.
        forward_seconds, backward_seconds: of one micro-batch.
        update_seconds: of the optimizer.
        sent_bytes: activations that one micro-batch passes to the next stage; its gradients come back.
        alive: micro-batches whose activations are held at once, at most.
        activation_bytes: what one of them holds between its forward and its backward pass.
        peak_bytes: most bytes on the device at once.
    """

    first: str
    last: str
    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    sent_bytes: int
    alive: int
    activation_bytes: int
    peak_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RanksForecast:
    """Predicted step of a job with several ranks, by the rank that needs most.

    Attributes:
        ranks: number of ranks.
        step_seconds: duration of the step.
        alone_seconds: share of one rank in the work, as one device alone would do it.
        exposed_seconds: part of the step in which ranks wait for the network.
        bubble_seconds: part in which a rank of the pipeline waits for others, on average, if the network took no time.
        network_seconds: time in which a rank's collectives are under way.
        sent_bytes: bytes that one rank sends.
        peak_bytes: most bytes on one rank's device at once.
        collectives: totals by kind.
        stages: of a pipeline; empty for others.
    """

    ranks: int
    step_seconds: float
    alone_seconds: float
    exposed_seconds: float
    bubble_seconds: float
    network_seconds: float
    sent_bytes: int
    peak_bytes: int
    collectives: tuple[CollectiveTotal, ...]
    stages: tuple[StageForecast, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<RanksForecast of {self.ranks}: step {format_seconds(self.step_seconds)} "
            f"(waiting for the network {format_seconds(self.exposed_seconds)}, efficiency {self.efficiency:.1%}), "
            f"peak {format_bytes(self.peak_bytes)} a rank>"
        )

    @property
    def efficiency(self) -> float:
        """Scaling efficiency: throughput per rank, relative to one device."""
        return self.alone_seconds / self.step_seconds if self.step_seconds else 1.0

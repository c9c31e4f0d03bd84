"""A step of `DistributedDataParallel`: each rank computes the whole model on its batch, and gradients are averaged.

    compute   forward   backward: g9 g8 g7 g6 ... g1 | wait | update
    network                         [bucket] [bucket] [bucket]

Gradients join a bucket in the order in which they are ready, until it is full; a full bucket is reduced at once, after
those before it. The update waits for all of them.

Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", PVLDB 13(12), 2020,
section 3.2; `torch/nn/parallel/distributed.py` (1 MiB for the first bucket and 25 MiB for others, unless a size is
given). Inferred: copies into and out of buckets take no time, and collectives no share of compute.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from elbowroom.ir.network import CollectiveKind, Network
from elbowroom.ir.parallelism import Parallelism, RanksForecast
from elbowroom.ir.trace import Role
from elbowroom.simulator.ranks.lanes import ComputeLane, NetworkLane
from elbowroom.simulator.ranks.rank_step import RankStep

DEFAULT_FIRST_BYTES = 1 << 20
DEFAULT_BYTES = 25 << 20


class Bucket(NamedTuple):
    """Gradients that are reduced together: the tick at which the last one is ready, and their bytes."""

    ready: int
    nbytes: int


def simulate_data_parallel(step: RankStep, network: Network, parallelism: Parallelism) -> RanksForecast:
    """Forecast a step of data-parallel ranks."""
    ranks = parallelism.ranks
    compute = ComputeLane(step.forecast.begin_seconds)
    lane = NetworkLane(network, parallelism, ranks)
    buckets = fill_buckets(step, parallelism.bucket_bytes)
    reduced = 0.0
    for bucket in buckets:
        reduced = lane.start(CollectiveKind.ALL_REDUCE, bucket.nbytes, compute.find_time(bucket.ready))
    compute.wait(step.update, reduced)
    return RanksForecast(
        ranks=ranks,
        step_seconds=step.forecast.step_seconds + compute.late,
        alone_seconds=step.forecast.step_seconds,
        exposed_seconds=compute.late,
        bubble_seconds=0.0,
        network_seconds=sum(call.end - call.begin for call in lane.calls),
        sent_bytes=lane.count_sent(),
        peak_bytes=_count_peak(step, parallelism, buckets),
        collectives=lane.list_totals(),
    )


def fill_buckets(step: RankStep, bucket_bytes: int | None) -> tuple[Bucket, ...]:
    """Return the buckets in the order in which they are reduced.

    Args:
        bucket_bytes: at which a bucket is full; None for the default, which has a smaller first one.
    """
    limit_bytes = DEFAULT_FIRST_BYTES if bucket_bytes is None else bucket_bytes
    buckets: list[Bucket] = []
    nbytes = 0
    for gradient in step.gradients:
        nbytes += step.trace.storages[gradient.storage].nbytes
        if nbytes >= limit_bytes or gradient is step.gradients[-1]:
            buckets.append(Bucket(gradient.ready, nbytes))
            nbytes = 0
            limit_bytes = DEFAULT_BYTES if bucket_bytes is None else bucket_bytes
    return tuple(buckets)


def _count_peak(step: RankStep, parallelism: Parallelism, buckets: tuple[Bucket, ...]) -> int:
    """Return the peak with the buckets, which exist from the first step on."""
    if parallelism.ranks == 1:
        return step.forecast.peak_bytes
    held = sum(step.round_up(bucket.nbytes) for bucket in buckets)
    if not parallelism.gradient_as_bucket_view:
        return step.forecast.peak_bytes + held
    ready = {gradient.storage: gradient.ready for gradient in step.gradients}
    gradients = [stay for stay in step.stays if step.trace.storages[stay.storage].role is Role.GRADIENT]
    fresh = [dataclasses.replace(stay, end=min(stay.end, ready.get(stay.storage, stay.end))) for stay in gradients]
    # A gradient is made beside its bucket, and copied once it is ready.
    live = np.asarray(step.forecast.live_bytes) - step.count_live(gradients) + step.count_live(fresh)
    return int(max(live)) + held

"""Prices collectives on a network: latency and bandwidth of a ring, of trees, or of each level in turn.

For n ranks in m nodes and a tensor of S bytes, with B the slowest bandwidth on the way and a, c the latencies of
messages within and between nodes:

    ring          all-reduce   2 (n - 1) / n * S / B + 2 (n - m) a + 2 (m - 1) c
                  all-gather, reduce-scatter: half of that
    tree          all-reduce   2 S / B + 2 (n / m - 1) a + 2 ceil(log2 m) c
    hierarchical  reduce-scatter in each node, all-reduce between nodes, all-gather in each node: the sum of rings

A node sends and receives no more through its network cards than one rank does through its own links, as a ring enters
and leaves it once; all cards together carry that.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA
19(1), 2005 (ring and its bounds); P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", Parallel Computing 35(12), 2009; NVIDIA's NCCL 2.8, `src/graph/tuning.cc` (steps within and between
nodes; the slowest bandwidth on a ring's way). Inferred: no congestion between nodes, and no share of compute.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from elbowroom.errors import UsageError
from elbowroom.ir.network import Algorithm, CollectiveKind, Network, NetworkLevel


class Hop(NamedTuple):
    """A level as a group of ranks uses it: `units` of that level, each with `members` that hold ranks of the group."""

    level: NetworkLevel
    members: int
    units: int


def price_collective(
    network: Network,
    kind: CollectiveKind,
    nbytes: int,
    ranks: int,
    algorithm: Algorithm = Algorithm.AUTO,
) -> float:
    """Return the seconds of one collective of neighbouring ranks on an idle network; 0 for one rank or no bytes.

    Args:
        nbytes: of the whole tensor.

    Raises:
        UsageError: the ranks do not fill units of the network, or are more than it joins; or the kind is SEND, whose
            price is `price_send`.
    """
    if kind is CollectiveKind.SEND:
        raise UsageError("two ranks pass a tensor on with price_send, which needs their distance")
    hops = split_ranks(network, ranks)
    if nbytes <= 0 or not hops:
        return 0.0
    if algorithm is Algorithm.HIERARCHICAL:
        return network.launch_seconds + _price_levels(hops, kind, nbytes)
    ring = _price_ring(hops, kind, nbytes, ranks)
    if kind is not CollectiveKind.ALL_REDUCE or algorithm is Algorithm.RING:
        return network.launch_seconds + ring
    tree = _price_tree(hops, nbytes)
    return network.launch_seconds + (tree if algorithm is Algorithm.TREE else min(ring, tree))


def price_send(network: Network, nbytes: int, distance: int, ranks: int) -> float:
    """Return the seconds in which each rank passes a tensor to the rank `distance` further on, all at once.

    The slowest of them counts: one that leaves its node shares the node's bandwidth with the ranks that leave it, too.

    Raises:
        UsageError: as for `price_collective`.
    """
    size, slowest = 1, 0.0
    for hop in split_ranks(network, ranks):
        if distance < size * hop.members:
            leaving = min(distance, size)  # of the ranks of one member
            slowest = max(slowest, hop.level.latency_seconds + leaving * nbytes / hop.level.bytes_per_second)
        size *= hop.members
    return network.launch_seconds + slowest if nbytes > 0 and slowest else 0.0


def count_sent_bytes(kind: CollectiveKind, nbytes: int, ranks: int) -> int:
    """Return the bytes that one rank sends in a collective carried out as a ring."""
    if kind is CollectiveKind.SEND:
        return nbytes
    return _count_rounds(kind) * nbytes * (ranks - 1) // ranks


def split_ranks(network: Network, ranks: int) -> tuple[Hop, ...]:
    """Return the levels that neighbouring ranks use, the first within a node; none for one rank.

    Raises:
        UsageError: the ranks do not fill units of a level, or are more than the network joins.
    """
    if ranks < 1:
        raise UsageError(f"a job has 1 rank or more, not {ranks}")
    hops: list[Hop] = []
    left = ranks
    for level in network.levels:
        if left == 1:
            break
        members = left if level.members is None else min(left, level.members)
        if left % members:
            size = ranks // left * members
            raise UsageError(
                f"a group of {ranks} ranks does not fill units of {size} ranks, which {level.name} joins in network "
                f"{network.name}: take at most {size}, or a multiple of it"
            )
        left //= members
        hops.append(Hop(level, members, left))
    if left > 1:
        raise UsageError(
            f"network {network.name} joins at most {network.most_ranks} ranks, not {ranks}: take fewer, or a network "
            "with a further level"
        )
    return tuple(hops)


def _price_ring(hops: tuple[Hop, ...], kind: CollectiveKind, nbytes: int, ranks: int) -> float:
    """Every rank sends (n - 1) / n of the tensor to the next one, twice for an all-reduce."""
    slowest = min(hop.level.bytes_per_second for hop in hops)
    latency = sum(hop.units * (hop.members - 1) * hop.level.latency_seconds for hop in hops)
    return _count_rounds(kind) * ((ranks - 1) / ranks * nbytes / slowest + latency)


def _price_tree(hops: tuple[Hop, ...], nbytes: int) -> float:
    """Each tensor goes up and down; two trees share it, so that every rank's links are busy both ways."""
    slowest = min(hop.level.bytes_per_second for hop in hops)
    steps = [hop.members - 1 if index == 0 else _count_depth(hop.members) for index, hop in enumerate(hops)]
    latency = sum(step * hop.level.latency_seconds for step, hop in zip(steps, hops, strict=True))
    return 2 * (nbytes / slowest + latency)


def _price_levels(hops: tuple[Hop, ...], kind: CollectiveKind, nbytes: int) -> float:
    """A ring at each level, of what the levels before have left to each rank.

    The ranks of a member run their rings at once, so the member's bandwidth carries all their shares.
    """
    return _count_rounds(kind) * sum(
        (hop.members - 1) * (nbytes / hop.members / hop.level.bytes_per_second + hop.level.latency_seconds)
        for hop in hops
    )


def _count_rounds(kind: CollectiveKind) -> int:
    return 2 if kind is CollectiveKind.ALL_REDUCE else 1


def _count_depth(members: int) -> int:
    return math.ceil(math.log2(members))

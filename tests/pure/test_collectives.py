"""Networks and what collectives cost on them: closed forms, bounds, and the shipped networks. No torch."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.cost.collectives import count_sent_bytes, price_collective, price_send, split_ranks
from elbowroom.errors import TraceError, UnknownMember, UsageError
from elbowroom.hardware.shipped import list_networks, load_network
from elbowroom.ir import files
from elbowroom.ir.network import Algorithm, CollectiveKind, Network, NetworkLevel

REDUCE, GATHER, SCATTER = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
MIB = 1 << 20


def make_network(
    *levels: tuple[int | None, float, float], launch_seconds: float = 0.0, name: str = "made up"
) -> Network:
    """A network of (members, bytes per second, latency) at each level."""
    return Network(
        name=name,
        launch_seconds=launch_seconds,
        levels=tuple(
            NetworkLevel(
                name=f"level {index}", members=members, bytes_per_second=rate, latency_seconds=latency, source="made up"
            )
            for index, (members, rate, latency) in enumerate(levels)
        ),
    )


FLAT = make_network((None, 1e9, 1e-6))
NODES = make_network((8, 100e9, 1e-6), (None, 20e9, 5e-6), launch_seconds=1e-5)


@pytest.mark.parametrize("ranks", [2, 3, 8, 1000])
@pytest.mark.parametrize("nbytes", [1, 10**6, 3 * 10**9])
def test_a_ring(ranks: int, nbytes: int) -> None:
    share = (ranks - 1) / ranks * nbytes / 1e9
    ring = price_collective(FLAT, REDUCE, nbytes, ranks, Algorithm.RING)
    assert ring == pytest.approx(2 * share + 2 * (ranks - 1) * 1e-6)
    for kind in (GATHER, SCATTER):
        for algorithm in (Algorithm.AUTO, Algorithm.RING, Algorithm.TREE):
            assert price_collective(FLAT, kind, nbytes, ranks, algorithm) == pytest.approx(ring / 2)


def test_a_ring_over_nodes() -> None:
    """The cards of a node bound it, and only the messages between nodes take their latency: 32 ranks in 4 nodes."""
    found = price_collective(NODES, REDUCE, 10**9, 32, Algorithm.RING)
    assert found == pytest.approx(1e-5 + 2 * (31 / 32 * 1e9 / 20e9 + 28 * 1e-6 + 3 * 5e-6))
    inside = price_collective(NODES, REDUCE, 10**9, 8, Algorithm.RING)
    assert inside == pytest.approx(1e-5 + 2 * (7 / 8 * 1e9 / 100e9 + 7 * 1e-6))


def test_trees() -> None:
    found = price_collective(NODES, REDUCE, 10**6, 8 * 100, Algorithm.TREE)
    assert found == pytest.approx(1e-5 + 2 * (1e6 / 20e9 + 7 * 1e-6 + 7 * 5e-6)), "ceil(log2(100)) is 7"
    ring = price_collective(NODES, REDUCE, 10**6, 800, Algorithm.RING)
    assert found < ring and price_collective(NODES, REDUCE, 10**6, 800) == found
    assert price_collective(NODES, REDUCE, 10**10, 16) == price_collective(NODES, REDUCE, 10**10, 16, Algorithm.RING)


def test_level_by_level() -> None:
    """Reduce-scatter in the node, a ring of each rank's eighth between nodes, all-gather in the node."""
    found = price_collective(NODES, REDUCE, 8 * 10**9, 32, Algorithm.HIERARCHICAL)
    within = 2 * (7 / 8 * 8e9 / 100e9 + 7 * 1e-6)
    between = 2 * (3 / 4 * 8 * 1e9 / 20e9 + 3 * 5e-6)  # eight ranks share the cards of their node
    assert found == pytest.approx(1e-5 + within + between)


@given(
    nbytes=some.integers(1, 1 << 40),
    more=some.integers(0, 1 << 30),
    ranks=some.sampled_from([2, 4, 8, 16, 24, 800]),
    kind=some.sampled_from([REDUCE, GATHER, SCATTER]),
    algorithm=some.sampled_from(list(Algorithm)),
    speed_up=some.floats(1.0, 100.0),
)
def test_order_of_prices(
    nbytes: int, more: int, ranks: int, kind: CollectiveKind, algorithm: Algorithm, speed_up: float
) -> None:
    price = price_collective(NODES, kind, nbytes, ranks, algorithm)
    assert price_collective(NODES, kind, nbytes + more, ranks, algorithm) >= price
    faster = dataclasses.replace(
        NODES,
        levels=tuple(
            dataclasses.replace(level, bytes_per_second=level.bytes_per_second * speed_up) for level in NODES.levels
        ),
    )
    assert price_collective(faster, kind, nbytes, ranks, algorithm) <= price
    # Every rank has to send that much (Thakur et al., section 3), over links of 100 GB/s at best.
    assert price > count_sent_bytes(kind, nbytes, ranks) / 100e9
    assert price_collective(NODES, kind, nbytes, ranks) <= price or algorithm is Algorithm.HIERARCHICAL


def test_nothing_to_do() -> None:
    for kind in (REDUCE, GATHER, SCATTER):
        assert price_collective(NODES, kind, 10**9, 1) == price_collective(NODES, kind, 0, 64) == 0.0
    assert price_send(NODES, 0, 1, 8) == price_send(NODES, 5, 1, 1) == 0.0


def test_a_send() -> None:
    assert price_send(NODES, 10**9, 1, 8) == pytest.approx(1e-5 + 1e-6 + 0.01)
    # One of eight ranks leaves the node with all of its cards; the others wait for it.
    assert price_send(NODES, 10**9, 1, 64) == pytest.approx(1e-5 + 5e-6 + 0.05)
    for distance in (8, 16):  # all eight leave
        assert price_send(NODES, 10**9, distance, 64) == pytest.approx(1e-5 + 5e-6 + 8 * 0.05)


def test_ranks_fill_nodes() -> None:
    assert [(hop.members, hop.units) for hop in split_ranks(NODES, 32)] == [(8, 4), (4, 1)]
    assert [(hop.members, hop.units) for hop in split_ranks(NODES, 5)] == [(5, 1)]
    assert split_ranks(NODES, 1) == ()
    with pytest.raises(UsageError, match=r"12 ranks does not fill units of 8 ranks.*at most 8, or a multiple"):
        split_ranks(NODES, 12)
    pair = make_network((8, 1e9, 0.0), (2, 1e9, 0.0), name="pair")
    with pytest.raises(UsageError, match="pair joins at most 16 ranks, not 32"):
        split_ranks(pair, 32)
    with pytest.raises(UsageError, match="1 rank or more, not 0"):
        split_ranks(NODES, 0)
    with pytest.raises(UsageError, match="price_send"):
        price_collective(NODES, CollectiveKind.SEND, 1, 2)


@pytest.mark.parametrize("name", list_networks())
def test_shipped_networks_say_where_they_come_from(name: str) -> None:
    network = load_network(name)
    assert network.name == name and network.levels[-1].members is None
    for level in network.levels:
        each_way = re.findall(r"([\d.]+) GB/s each way", level.source)
        share = re.search(r"([\d.]+) % assumed reachable", level.source)
        latency = re.search(r"([\d.]+) us\b", level.source)
        assert each_way and share and latency, level.source
        sharers = 2 if "shared by two devices" in level.source else 1
        promised = float(each_way[-1]) * 1e9 * float(share[1]) / 100 / sharers
        assert level.bytes_per_second == pytest.approx(promised)
        assert level.latency_seconds == pytest.approx(float(latency[1]) * 1e-6)


def test_an_unknown_network() -> None:
    with pytest.raises(UnknownMember, match=r"no network is called 'dgx-z'.*dgx-h100"):
        load_network("dgx-z")


def test_networks_as_files(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "network.json"
    files.save(NODES, path)
    assert files.load(Network, path) == NODES
    assert "level 0 of 8 at 100 GB/s, level 1 of any number" in repr(NODES)
    good = json.loads(path.read_text())

    def spoil(level: int | None, **fields: object) -> str:
        value = json.loads(json.dumps(good["value"]))
        (value if level is None else value["levels"][level]).update(fields)
        path.write_text(json.dumps(good | {"value": value}))
        with pytest.raises(TraceError) as error:
            files.load(Network, path)
        return str(error.value)

    assert "levels[0] moves 0.0 bytes per second" in spoil(0, bytes_per_second=0.0)
    assert "levels[1].latency_seconds: expected a finite number of at least 0" in spoil(1, latency_seconds=-1.0)
    assert "levels[0] joins 1 members" in spoil(0, members=1)
    assert "levels[0] joins any number" in spoil(0, members=None)
    assert "levels are empty" in spoil(None, levels=[])


def test_size_of_a_whole_network() -> None:
    assert NODES.most_ranks is None
    assert make_network((8, 1e9, 0.0), (4, 1e9, 0.0)).most_ranks == math.prod((8, 4))

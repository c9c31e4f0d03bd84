"""Reduces the saved storages of a step to a small graph of dependencies and needs, as a model for a MILP.

    forward   [ block 0 ][ block 1 ][ block 2 ]      up to three nodes each: results of matrix products or convolutions,
    backward         | 2 | 1 | 0 |   windows         results that other blocks are computed from, and the rest

A node is kept, dropped and recomputed as a whole. A window is an interval of the step in which one block is needed
after another; all its recomputation is modelled at its beginning.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from elbowroom.ir.plan import Segment
from elbowroom.planner.schedule.draft import Drafter, Key
from elbowroom.planner.schedule.memory_curve import MemoryCurve

NODES_A_BLOCK = 3
"""Most nodes that a block has."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Storages that are kept or dropped together.

    Attributes:
        storages: sorted.
        seconds: to recompute all of them from the nodes they are made from.
        made_from: earlier nodes.
        nbytes: their total.
        extra_bytes: transient bytes beyond that, at the peak of their recomputation.
    """

    storages: tuple[int, ...]
    seconds: float
    extra_bytes: int
    made_from: tuple[int, ...]
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeGraph:
    """The nodes, and the windows in which they are needed.

    Attributes:
        nodes: in topological order.
        windows: the first tick of each; window 0 begins with the step, and nothing is needed in it.
        needs: (tick, storage) of each need of the nodes' storages, in order.
        needed: by window, the nodes needed in it.
        last_needed: by node, the last such window.
        ticks: by window, the ticks at which its memory is constrained; the first is its beginning.
        fixed_bytes: by window and tick, the memory without the nodes.
        node_bytes: by window, tick and node, the bytes that the node adds if it is present.
    """

    nodes: tuple[Node, ...]
    windows: tuple[int, ...]
    needs: tuple[tuple[int, int], ...]
    needed: tuple[frozenset[int], ...]
    last_needed: tuple[int, ...]
    ticks: tuple[tuple[int, ...], ...]
    fixed_bytes: tuple[npt.NDArray[np.int64], ...]
    node_bytes: tuple[npt.NDArray[np.int64], ...]

    def window_at(self, tick: int) -> int:
        """Return the window that contains a tick."""
        return bisect.bisect_right(self.windows, tick) - 1


def make_graph(drafter: Drafter, load: MemoryCurve, most_nodes: int) -> RecomputeGraph:
    """Build the graph of a step, with at most `most_nodes` nodes (but at least three) and as many windows.

    Args:
        load: memory use of the plain step.

    Cost: linear in the ops replayed to make each storage, and in ticks for each gap.
    """
    maker = _Maker(drafter, load)
    blocks = maker.cut(most_nodes)
    nodes = maker.make_nodes(blocks)
    return maker.add_windows(nodes, blocks, most_nodes)


class _Maker:
    """Builds one graph."""

    def __init__(self, drafter: Drafter, load: MemoryCurve) -> None:
        self._drafter, self._load = drafter, load
        trace = drafter.replay.trace
        self._flops = {op.tick: op.flops for op in trace.ops}
        self._keys: dict[int, list[Key]] = {}
        for key in load.keys:
            self._keys.setdefault(key[0], []).append(key)
        self._sources: dict[int, frozenset[int]] = {}
        self._is_costly: dict[int, bool] = {}
        for storage in sorted(self._keys, key=lambda storage: (trace.storages[storage].created, storage)):
            closure = drafter.find_closure(storage, self._closes(storage), lambda other: other == storage)  # noqa: B023
            if closure is not None:
                self._sources[storage] = frozenset(closure.leaves)
                self._is_costly[storage] = any(self._flops[tick] for tick in closure.ops)
        self._order = list(self._sources)

    def _closes(self, storage: int) -> int:
        return self._drafter.gaps[self._keys[storage][0]].closes

    # -- blocks and nodes -----------------------------------------------------------------------------------------

    def cut(self, most_nodes: int) -> list[list[int]]:
        """Cut the storages into blocks of similar bytes, at places that few bytes cross."""
        order = self._order
        if len(order) <= most_nodes:
            return [[storage] for storage in order]
        place = {storage: index for index, storage in enumerate(order)}
        sizes = np.array([self._load.nbytes[self._keys[storage][0]] for storage in order])
        crossing = np.zeros(len(order) + 1, dtype=np.int64)  # bytes made before each place and read after it
        last_user = {source: index for index, storage in enumerate(order) for source in self._sources[storage]}
        for source, index in last_user.items():
            if source in place:
                crossing[place[source] + 1 : index + 1] += sizes[place[source]]
        sums, blocks = np.cumsum(sizes), max(1, most_nodes // NODES_A_BLOCK)
        cuts = {0, len(order)}
        for index in range(1, blocks):
            low, high = (int(np.searchsorted(sums, (index + part) * sums[-1] / blocks)) for part in (-0.5, 0.5))
            cuts.add(min(range(low + 1, max(high, low + 1) + 1), key=lambda cut: (crossing[cut], cut)))
        return [order[begin:end] for begin, end in itertools.pairwise(sorted(cuts))]

    def make_nodes(self, blocks: Sequence[Sequence[int]]) -> tuple[Node, ...]:
        """Return the nodes of the blocks, in order."""
        block_of = {storage: index for index, block in enumerate(blocks) for storage in block}
        wanted = {
            source
            for storage, sources in self._sources.items()
            for source in sources
            if source in block_of and block_of[source] != block_of[storage]
        }
        nodes: list[Node] = []
        node_of: dict[int, int] = {}
        for block in blocks:
            costly = [storage for storage in block if storage not in wanted and self._is_costly[storage]]
            cheap = [storage for storage in block if storage not in wanted and not self._is_costly[storage]]
            for group in (costly, [storage for storage in block if storage in wanted], cheap):
                node = self._make_node(group, node_of)
                if node.storages:
                    node_of |= dict.fromkeys(node.storages, len(nodes))
                    nodes.append(node)
        return tuple(nodes)

    def _make_node(self, group: list[int], node_of: dict[int, int]) -> Node:
        """Return the node of a group, without storages that cannot be computed from earlier nodes."""
        ops: set[int] = set()
        leaves: set[int] = set()
        made: list[int] = []
        for storage in group:
            closure = self._drafter.find_closure(
                storage, self._closes(storage), lambda other: other in self._sources and other not in node_of
            )
            if closure is None:
                del self._sources[storage]  # it is kept
                continue
            made.append(storage)
            ops.update(closure.ops)
            leaves.update(closure.leaves)
        replayed = Segment(ops=tuple(sorted(ops)), outputs=tuple(sorted(made)), leaves=tuple(sorted(leaves)))
        footprint = self._drafter.replay.footprints.measure(replayed, replayed.outputs)
        return Node(
            storages=replayed.outputs,
            seconds=footprint.seconds,
            extra_bytes=footprint.extra_bytes,
            made_from=tuple(sorted({node_of[leaf] for leaf in leaves if leaf in node_of})),
            nbytes=sum(self._load.nbytes[self._keys[storage][0]] for storage in made),
        )

    # -- windows --------------------------------------------------------------------------------------------------

    def add_windows(self, nodes: tuple[Node, ...], blocks: Sequence[Sequence[int]], most: int) -> RecomputeGraph:
        """Return the graph of nodes, with the windows in which blocks are needed."""
        trace = self._drafter.replay.trace
        block_of = {storage: index for index, block in enumerate(blocks) for storage in block}
        node_of = {storage: index for index, node in enumerate(nodes) for storage in node.storages}
        needs = [(need.tick, trace.saves[need.save].storage) for need in trace.needs]
        needs = [(tick, storage) for tick, storage in needs if storage in node_of]
        runs = [next(run)[0] for _, run in itertools.groupby(needs, key=lambda need: block_of[need[1]])]
        while len(runs) > most:
            gaps = [after - before for before, after in itertools.pairwise(runs)]
            del runs[gaps.index(min(gaps)) + 1]
        windows = (0, *runs)
        needed: list[set[int]] = [set() for _ in windows]
        for tick, storage in needs:
            needed[bisect.bisect_right(windows, tick) - 1].add(node_of[storage])
        last = {node: window for window, found in enumerate(needed) for node in sorted(found)}
        away = self._count_away(nodes)
        fixed = self._load.live - away.sum(axis=0)
        ends = (*windows[1:], trace.end)
        pieces = (2 * len(nodes) + 1, *(1 for _ in runs))
        ticks = [
            self._find_ticks(begin, end, fixed, count) for begin, end, count in zip(windows, ends, pieces, strict=True)
        ]
        return RecomputeGraph(
            nodes=nodes,
            windows=windows,
            needs=tuple(needs),
            needed=tuple(frozenset(found) for found in needed),
            last_needed=tuple(last[node] for node in range(len(nodes))),
            ticks=tuple(tuple(found) for found in ticks),
            fixed_bytes=tuple(fixed[found] for found in ticks),
            node_bytes=tuple(away[:, found].T for found in ticks),
        )

    def _count_away(self, nodes: tuple[Node, ...]) -> npt.NDArray[np.int64]:
        """Return, by node and tick, the bytes that the plain step holds but need not."""
        change = np.zeros((len(nodes), len(self._load.live) + 1), dtype=np.int64)
        for index, node in enumerate(nodes):
            for storage in node.storages:
                for key in self._keys[storage]:
                    begin, end = self._load.gone[key], self._drafter.gaps[key].closes
                    if begin < end:
                        change[index, begin] += self._load.nbytes[key]
                        change[index, end] -= self._load.nbytes[key]
        return np.cumsum(change, axis=1)[:, :-1]

    def _find_ticks(self, begin: int, end: int, fixed: npt.NDArray[np.int64], pieces: int) -> list[int]:
        """Return a window's first tick, and the peaks of its pieces, with the nodes and without."""
        found = {begin}
        for piece in np.array_split(np.arange(begin, end), pieces):
            if len(piece):
                found |= {int(piece[np.argmax(curve[piece])]) for curve in (self._load.live, fixed)}
        return sorted(found)

"""Network: how the ranks of a job are joined, level by level, from the devices of one node to all nodes."""

from __future__ import annotations

import dataclasses
import enum
import math
import reprlib


class CollectiveKind(enum.StrEnum):
    """Kind of exchange between ranks. Sizes are the bytes of the whole tensor, as each rank has it before or after."""

    ALL_REDUCE = "all_reduce"
    """Every rank gets the sum of all ranks' tensors."""
    REDUCE_SCATTER = "reduce_scatter"
    """Every rank gets its share of the sum."""
    ALL_GATHER = "all_gather"
    """Every rank gets the tensor of which each has a share."""
    SEND = "send"
    """One rank passes a tensor to another."""


class Algorithm(enum.StrEnum):
    """Way to carry out a collective."""

    AUTO = "auto"
    """Ring or tree, whichever is faster."""
    RING = "ring"
    """Each rank passes pieces to the next one."""
    TREE = "tree"
    """Two binary trees over the nodes, for all-reduce; everything else takes a ring."""
    HIERARCHICAL = "hierarchical"
    """Level by level: within each node, and then between ranks of the same position in all nodes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLevel:
    """One level of a network: it joins the members of one unit. A unit is a member of the next level.

    Attributes:
        name: "NVLink", "InfiniBand", ...
        members: members of one unit at most: devices of a node at the first level; None for any number.
        bytes_per_second: what one member, with all ranks in it, sends and receives at once, each way.
        latency_seconds: of one message between members.
        source: "measured", or a datasheet and what is assumed.
    """

    name: str
    members: int | None
    bytes_per_second: float
    latency_seconds: float
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Levels that join ranks, the first within a node.

    Attributes:
        name: "dgx-h100", ...
        launch_seconds: time of a collective beyond its messages.
    """

    name: str
    launch_seconds: float
    levels: tuple[NetworkLevel, ...]

    def __repr__(self) -> str:
        levels = ", ".join(
            f"{level.name} of {'any number' if level.members is None else level.members} at "
            f"{level.bytes_per_second / 1e9:.4g} GB/s"
            for level in self.levels
        )
        return f"<Network {reprlib.repr(self.name)}: {levels or 'no levels'}>"

    @property
    def most_ranks(self) -> int | None:
        """Number of ranks that the network joins; None for any number."""
        members = [level.members for level in self.levels]
        return None if None in members else math.prod(count for count in members if count is not None)

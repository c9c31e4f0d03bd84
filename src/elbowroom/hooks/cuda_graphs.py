"""Refuses replays of CUDA graphs while model state may move: a graph uses the addresses of when it was captured."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from elbowroom.errors import UsageError
from elbowroom.native import library

CHECKS_ADDRESSES = "torch._inductor.cudagraph_trees"
"""Module of PyTorch that replays graphs of compiled code, and captures them anew if parameters have other addresses."""


@functools.cache
def refuse_replays() -> None:
    """Wrap `torch.cuda.CUDAGraph.replay`, once in a process."""
    wrap_replay(torch.cuda.CUDAGraph)


def wrap_replay(graph_class: Any) -> None:
    """Have a class's method `replay` raise a UsageError while a room moves model state."""
    replay = graph_class.replay

    @functools.wraps(replay)
    def checked(graph: Any) -> None:
        if library.load().is_any_state_managed() and sys._getframe(1).f_globals.get("__name__") != CHECKS_ADDRESSES:
            raise UsageError(
                "a CUDA graph is replayed while parameters, gradients or optimizer state may leave the device: it "
                "would use the memory where they were when it was captured. Pass manages='activations' to "
                "elbowroom.fit, and capture the graph again"
            )
        replay(graph)

    graph_class.replay = checked

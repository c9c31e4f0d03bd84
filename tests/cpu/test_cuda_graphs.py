"""CUDA graphs, which use model state at fixed addresses."""

from __future__ import annotations

import types

import pytest

from elbowroom.errors import UsageError
from elbowroom.hooks.cuda_graphs import CHECKS_ADDRESSES, wrap_replay
from elbowroom.ir.hardware import HardwareProfile
from tests.state_jobs import BUDGET, adamw, fit, make_job


class Graph:
    """Counts its replays."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1


wrap_replay(Graph)


@pytest.mark.parametrize("manages", ["activations", "everything"])
def test_graphs_are_not_replayed_while_state_moves(manages: str, profile: HardwareProfile) -> None:
    job, budget = make_job(adamw), BUDGET if manages == "everything" else 1 << 40
    graph = Graph()
    names = {"__name__": CHECKS_ADDRESSES, "graph": graph}
    compiled = types.FunctionType(compile("graph.replay()", "", "exec"), names)
    with fit(job, profile, budget, manages=manages) as room:
        for index in range(3):
            with room.step():
                job.step(index)
        if manages == "everything":
            with pytest.raises(UsageError, match="CUDA graph is replayed"):
                graph.replay()
        else:
            graph.replay()
        compiled()
    graph.replay()
    assert graph.replays == (2 if manages == "everything" else 3)

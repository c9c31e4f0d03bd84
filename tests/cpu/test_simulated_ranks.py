"""Real steps on several simulated ranks: when gradients are ready, and what belongs to which block and stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import elbowroom
from elbowroom.hardware.shipped import load_network, load_shipped
from elbowroom.ir.network import CollectiveKind
from elbowroom.ir.parallelism import Parallel, Parallelism
from elbowroom.ir.trace import Trace
from elbowroom.simulator.ranks.rank_step import RankStep
from elbowroom.simulator.ranks.simulate_ranks import simulate_ranks
from tests.generators import keep_everything


class TiedNet(nn.Module):
    """An embedding, blocks, and a head with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.h = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.h:
            x = torch.relu(block(x))
        return self.head(x)


def capture(clips: bool | None = None, *, keeps_gradients: bool = False, fused: bool = False) -> Trace:
    """A step of `TiedNet`; `clips` says whether gradients are clipped, and whether all at once."""
    model = TiedNet()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=fused)
    tokens = torch.randint(0, 100, (4, 16))

    def step() -> torch.Tensor:
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        if clips is not None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=clips)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keeps_gradients)
        return loss.detach()

    return elbowroom.capture(step, model, optimizer, name="tied")


def list_ready(trace: Trace) -> list[str]:
    costs = elbowroom.price(trace, load_shipped("h100"))
    step = RankStep(trace, costs, keep_everything(costs))
    assert step.update == step.gradients[-1].ready > step.backward
    return [trace.storages[gradient.storage].label for gradient in step.gradients]


@pytest.mark.parametrize(
    "options", [{}, {"clips": False}, {"clips": True}, {"keeps_gradients": True}, {"clips": True, "fused": True}]
)
def test_gradients_are_ready_layer_by_layer(options: dict[str, bool]) -> None:
    """The last layer's first, whether or not they are clipped afterwards; the tied weight's after all of them."""
    found = list_ready(capture(**options))
    blocks = [label.split(".")[1] for label in found if ".h." in f".{label.removeprefix('gradient of ')}"]
    assert blocks == ["3", "3", "2", "2", "1", "1", "0", "0"]
    assert found[-1] == "gradient of embedding.weight" and len(found) == 9


def test_real_blocks_and_stages() -> None:
    trace = capture()
    costs = elbowroom.price(trace, load_shipped("h100"))

    def run(kind: Parallel, **options: int) -> dict[CollectiveKind, int]:
        parallelism = Parallelism(kind=kind, ranks=8, **options)
        found = simulate_ranks(trace, costs, keep_everything(costs), load_network("dgx-h100"), parallelism)
        return {total.kind: total.count for total in found.collectives}

    # Four blocks twice, and what lies in none of them, which stays.
    assert run(Parallel.SHARDED) == {CollectiveKind.ALL_GATHER: 9, CollectiveKind.REDUCE_SCATTER: 5}
    assert run(Parallel.PIPELINED, stages=4, micro_batches=8)[CollectiveKind.ALL_REDUCE] == 1

"""What `benchmarks/peers.py` says of its results, and that checkpointed groups of blocks compute what the blocks do."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmark be found as a script finds it."""
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[2] / "benchmarks")


def make_result(peak_bytes: int, seconds: list[float], *, same_bits: bool = True) -> dict[str, Any]:
    """Return what a contender of a heat measured."""
    return {"peak_bytes": peak_bytes, "seconds": seconds, "same_bits": same_bits}


HEAT = {
    "contenders": {
        "plain": make_result(100, [1.0, 1.0, 1.0]),
        "checkpoint:size=1": make_result(70, [1.5, 1.6, 1.8]),
        "compile:aot_eager=0.5": make_result(75, [1.2, 1.2, 1.2], same_bits=False),
        "selective:compute": make_result(76, [1.1, 1.1, 1.1]),
        "elbowroom:75": make_result(75, [1.0, 1.0, 1.0]),
        "elbowroom:50": make_result(50, [2.0, 2.0, 2.0]),
        "elbowroom-inductor:75": make_result(75, [0.6, 0.6, 0.6]),
    }
}


def test_the_fastest_peer_within_the_peak_counts() -> None:
    from peer_table import compare

    found = compare(HEAT, 75)
    assert (found["peer"], found["ratio"], found["ours"]) == ("compile:aot_eager=0.5", 1.2, 1.0)
    assert found["compiled"] == pytest.approx(2.0)


def test_peers_with_other_bits_can_be_left_out() -> None:
    from peer_table import compare

    found = compare(HEAT, 75, exact=True)
    assert (found["peer"], found["ratio"]) == ("checkpoint:size=1", 1.6)


def test_there_is_no_ratio_where_no_peer_reaches_the_peak() -> None:
    from peer_table import compare

    assert compare(HEAT, 50) == {"ours": 2.0, "peer": None, "ratio": None, "compiled": None}


def test_the_front_leaves_out_peers_that_another_one_beats_in_both() -> None:
    from peer_table import list_front

    survey = {
        "plain": {"peak_bytes": 100, "seconds": [1.0]},
        "checkpoint:size=1": {"peak_bytes": 60, "seconds": [1.5]},
        "checkpoint:size=2": {"peak_bytes": 70, "seconds": [1.6]},
        "selective:half": {"peak_bytes": 80, "seconds": [1.2, 1.3]},
        "trl": {"failed": "it needs an accelerator"},
    }
    assert list_front(survey) == ["checkpoint:size=1", "selective:half"]


def test_buffers_are_compared_apart_from_losses_and_parameters() -> None:
    from peers import compare_bits

    found = {"bits": "losses parameters others"}
    compare_bits(found, {"bits": "losses parameters buffers"})
    assert (found["same_bits"], found["same_buffers"]) == (True, False)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_checkpointed_groups_of_blocks_compute_what_the_blocks_do(size: int) -> None:
    from peer_contenders import BlockGroup, recompute
    from peer_contenders import group_blocks as group
    from peer_models import MODELS, with_optimizer

    from elbowroom.workloads import Workload

    def make() -> Workload:
        torch.manual_seed(0)
        model = nn.Sequential()
        model.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)))
        inputs = torch.randn(4, 8)
        forward: Callable[[], torch.Tensor] = lambda: model.blocks(inputs).square().mean()  # noqa: E731
        made = Workload(
            name="", model=model, optimizer=torch.optim.SGD(model.parameters()), step=forward, forward=forward, batch={}
        )
        return with_optimizer(made, torch.optim.SGD(model.parameters(), lr=0.5))

    plain, grouped = make(), make()
    groups = group(grouped, MODELS["vit_small"], size, recompute)
    assert [len(each.blocks) for each in groups] == [size] * (5 // size) + [5 % size] * bool(5 % size)
    assert all(isinstance(each, BlockGroup) for each in grouped.model.blocks)
    for _ in range(2):
        assert torch.equal(plain.step(), grouped.step())
    pairs = zip(plain.model.parameters(), grouped.model.parameters(), strict=True)
    assert all(torch.equal(own, other) for own, other in pairs)

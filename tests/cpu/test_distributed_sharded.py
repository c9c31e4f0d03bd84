"""Two processes with FSDP (`fully_shard`) or parallel tensors train in rooms as without, to the last bit, within the
budget of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from elbowroom.ir.hardware import HardwareProfile
from tests.rank_jobs import Found, check_outcome, check_resumed, list_cases, run_rooms

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
)

OFFLOADING: dict[str, Any] = {"strategy": "offload_all"}
SEARCHING: dict[str, Any] = {"strategy": "auto:effort=0.1"}
RECOMPUTING: dict[str, Any] = {"mode": "dynamic", "policy": "dtr"}

ROOMS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("sharded transformer", 7 << 20, {}),
    ("sharded transformer", 3_000_000, SEARCHING),
    ("sharded transformer", 2_200_000, RECOMPUTING),
    ("sharded transformer that stays gathered", 3_000_000, OFFLOADING),
    ("sharded transformer that stays gathered", 2_200_000, RECOMPUTING),
    ("sharded transformer in bfloat16", 1_750_000, OFFLOADING),
    ("sharded transformer in bfloat16", 1_300_000, RECOMPUTING),
    ("sharded convolutions", 3_200_000, OFFLOADING),
    ("sharded convolutions", 3_100_000, RECOMPUTING),
    ("sharded experts", 1_650_000, OFFLOADING),
    ("sharded experts", 1_250_000, RECOMPUTING),
    ("sharded accumulation", 2_300_000, OFFLOADING),
    ("sharded accumulation", 1_700_000, RECOMPUTING),
    ("sharded, clipped", 2_800_000, OFFLOADING),
    ("sharded, gathered ahead", 3_700_000, OFFLOADING),
    ("sharded, checkpointed", 2_800_000, OFFLOADING),
    ("tensor parallel", 3_000_000, SEARCHING),
    ("tensor parallel", 2_100_000, OFFLOADING),
    ("tensor parallel", 1_900_000, RECOMPUTING),
)
"""Jobs with budgets and options of their rooms."""

QUICK = {1, 7, 17}
"""Indices of those that run without `--slow`, too."""

CHECKPOINTS = [
    ("sharded transformer", "sharded transformer", 3_000_000),
    ("tensor parallel", "tensor parallel", 2_500_000),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, profile: HardwareProfile, pytestconfig: pytest.Config) -> Found:
    """What each rank found in all jobs, plain and in rooms."""
    folder = tmp_path_factory.mktemp("ranks")
    if not pytestconfig.getoption("slow"):
        return run_rooms(folder, [ROOMS[index] for index in sorted(QUICK)], profile)
    return run_rooms(folder, ROOMS, profile, checkpoints=CHECKPOINTS)


@pytest.mark.parametrize(("name", "budget"), list_cases(ROOMS, QUICK))
@pytest.mark.parametrize("rank", [0, 1])
def test_shards_train_to_the_same_bits_within_their_budgets(name: str, budget: int, rank: int, found: Found) -> None:
    check_outcome(found[rank][name, None], found[rank][name, budget], budget)


@pytest.mark.parametrize(("name", "budget"), list_cases(ROOMS, QUICK, (0, 1, 3, 5, 7, 11, 17)))
def test_shards_follow_one_plan(name: str, budget: int, found: Found) -> None:
    plans = {results[name, budget].plan for results in found}
    assert len(plans) == 1 and plans != {""}
    for results in found:
        assert results[name, budget].modes[:3] == ["capture"] * 3
        assert set(results[name, budget].modes[-2:]) <= {"planned", "plain"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [each[0] for each in CHECKPOINTS])
def test_a_checkpoint_of_shards_is_saved_and_loaded_while_state_is_away(name: str, found: Found) -> None:
    for results in found:
        check_resumed(results[name, name])

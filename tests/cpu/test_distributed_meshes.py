"""Four processes train in rooms as without, to the last bit, within the budget of each: replicas, shards that are
replicated, tensors that are sharded. A job that goes on with other shards plans anew.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from elbowroom.ir.hardware import HardwareProfile
from tests.rank_jobs import Found, check_outcome, check_resumed, run_rooms

pytestmark = [
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
    ),
    pytest.mark.slow,
]

OFFLOADING: dict[str, Any] = {"strategy": "offload_all"}

ROOMS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("transformer", 3_300_000, OFFLOADING),
    ("sharded and replicated", 4_000_000, OFFLOADING),
    ("tensor parallel and sharded", 2_000_000, OFFLOADING),
)
"""Jobs with budgets and options of their rooms."""

SAVES, GOES_ON = "sharded decoders", "sharded and replicated"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, profile: HardwareProfile) -> Found:
    """What each rank found in all jobs, plain and in rooms."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_rooms(folder, ROOMS, profile, checkpoints=[(SAVES, GOES_ON, 4_000_000)], ranks=4)


@pytest.mark.parametrize(("name", "budget"), [each[:2] for each in ROOMS])
def test_four_ranks_train_to_the_same_bits_by_one_plan(name: str, budget: int, found: Found) -> None:
    for results in found:
        check_outcome(results[name, None], results[name, budget], budget)
        assert results[name, budget].modes[-2:] == ["planned"] * 2
    plans = {results[name, budget].plan for results in found}
    assert len(found) == 4 and len(plans) == 1 and plans != {""}


def test_a_job_that_goes_on_with_other_shards_plans_anew(found: Found) -> None:
    for results in found:
        check_resumed(results[SAVES, GOES_ON])
        modes = results[SAVES, GOES_ON][1].modes
        assert modes[0] != "planned" and modes[-2:] == ["planned"] * 2

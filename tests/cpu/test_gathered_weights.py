"""Two processes with `fully_shard` whose plans replay ops that read gathered weights, and what such replays must not
read: weights that are not there, or other ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from elbowroom.ir.hardware import HardwareProfile
from tests.rank_jobs import run_ranks

pytestmark = [
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
    ),
    pytest.mark.slow,
]

CASES = [
    ("sharded decoders", [5_000_000, 4_400_000, 4_000_000]),
    ("sharded transformer that stays gathered", [5_000_000]),
    ("sharded transformer in bfloat16", [3_500_000]),
    ("sharded accumulation", [3_500_000]),
    ("sharded, gathered ahead", [4_500_000]),
    ("sharded, weights scaled in place", [5_000_000]),
]
"""Jobs with budgets that only replays of such ops meet."""

SAME = ["exposes", "skips", "twice"]
"""Changed steps that have the same results."""

REFUSED = ["inside", "update_unseen", "update_on_one_rank"]
"""Changed steps that raise an error."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, profile: HardwareProfile) -> list[Any]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    ends = run_ranks(folder, "gathered_jobs.run_all", CASES, [*SAME, *REFUSED], profile)
    assert all(end.code == 0 for end in ends), "\n".join(end.text for end in ends)
    return [end.result for end in ends]


def list_differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [what for what in one if not torch.equal(one[what], other[what])]


@pytest.mark.parametrize(("name", "budget"), [(name, budget) for name, budgets in CASES for budget in budgets])
def test_replays_read_gathered_weights(name: str, budget: int, found: list[Any]) -> None:
    for trained, _ in found:
        job = trained[name, budget]
        assert list_differences(trained[name, None].tensors, job.tensors) == []
        assert job.modes == ["capture"] * 3 + ["planned"] * 3
        assert max(job.peaks) <= budget
        assert job.reading > 0
        assert job.executed == job.planned


@pytest.mark.parametrize("how", SAME)
def test_steps_that_leave_such_a_plan_compute_the_same(how: str, found: list[Any]) -> None:
    for _, changed in found:
        (plain, _), (managed, error) = changed[how]
        assert not error
        assert list_differences(plain, managed) == []


@pytest.mark.parametrize("how", REFUSED)
def test_nothing_is_computed_from_weights_that_are_not_those_of_the_forward_pass(how: str, found: list[Any]) -> None:
    for _, changed in found:
        _, (_, error) = changed[how]
        assert "from weights of fully_shard" in error

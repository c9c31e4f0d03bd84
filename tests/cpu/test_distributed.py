"""Two processes with DistributedDataParallel train in rooms as without, to the last bit, within the budget of each."""

from __future__ import annotations

import concurrent.futures
import pathlib
import re
from typing import Any

import pytest
import torch.distributed as dist

from elbowroom.ir.hardware import HardwareProfile
from tests.bucket_jobs import CASES
from tests.rank_jobs import (
    PLAN_BYTES,
    STEPS,
    End,
    Found,
    check_outcome,
    check_resumed,
    list_cases,
    run_ranks,
    run_rooms,
)

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
)

OFFLOADING: dict[str, Any] = {"strategy": "offload_all"}
SEARCHING: dict[str, Any] = {"strategy": "auto:effort=0.1"}

ROOMS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("transformer", 7 << 20, {}),
    ("transformer", 3_300_000, SEARCHING),
    ("transformer", 2_000_000, OFFLOADING),
    ("transformer, buckets hold the gradients", 3_300_000, OFFLOADING),
    ("transformer, buckets hold the gradients", 2_100_000, OFFLOADING),
    ("transformer, buckets hold the gradients", 2_200_000, {"mode": "dynamic", "policy": "dtr"}),
    ("convolutions", 7 << 20, {}),
    ("convolutions", 3_300_000, SEARCHING),
    ("convolutions", 3_500_000, OFFLOADING),
    ("experts", 4 << 20, {}),
    ("experts", 1_700_000, OFFLOADING),
    ("experts", 1_000_000, OFFLOADING),
    ("accumulation", 2_100_000, OFFLOADING),
    ("uneven batches", 2_800_000, OFFLOADING),
    ("buffers", 2_000_000, OFFLOADING),
    ("compressed", 3_300_000, OFFLOADING),
    ("compressed by rank", 18_000_000, {}),
    ("checkpointed", 2_600_000, OFFLOADING),
    ("spread optimizer", 3_000_000, OFFLOADING),
    ("reduced in place", 1_700_000, {"manages": "activations", "strategy": "recompute_all"}),
    ("static graph", 1_900_000, {"mode": "dynamic"}),
    ("wide layers", 11_000_000, {}),
    ("transformer", 1_250_000, {}),
    ("compiled", 1_500_000, {}),
)
"""Jobs with budgets and options of their rooms."""

QUICK = {1, 4, 7, 13, 15, 21}
"""Indices of those that run without `--slow`, too."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, profile: HardwareProfile, pytestconfig: pytest.Config) -> Found:
    """What each rank found in all jobs, plain and in rooms."""
    folder = tmp_path_factory.mktemp("ranks")
    if not pytestconfig.getoption("slow"):
        return run_rooms(folder, [ROOMS[index] for index in sorted(QUICK)], profile)
    return run_rooms(folder, ROOMS, profile, checkpoints=[("transformer", "transformer", 3_300_000)])


@pytest.mark.parametrize(("name", "budget"), list_cases(ROOMS, QUICK))
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_train_to_the_same_bits_within_their_budgets(name: str, budget: int, rank: int, found: Found) -> None:
    check_outcome(found[rank][name, None], found[rank][name, budget], budget)


@pytest.mark.parametrize(("name", "budget"), list_cases(ROOMS, QUICK, (0, 1, 3, 6, 7, 12, 15)))
def test_ranks_follow_one_plan(name: str, budget: int, found: Found) -> None:
    plans = {results[name, budget].plan for results in found}
    assert len(plans) == 1 and plans != {""}
    for results in found:
        assert results[name, budget].modes[:3] == ["capture"] * 3
        assert set(results[name, budget].modes[-2:]) <= {"planned", "plain"}


@pytest.mark.slow
def test_a_checkpoint_is_saved_and_loaded_while_state_is_away(found: Found) -> None:
    for results in found:
        check_resumed(results["transformer", "transformer"])
        assert results["transformer", "transformer"][1].modes[-3:] == ["planned"] * 3


def test_ranks_that_may_run_out_of_batches_plan_alone(found: Found) -> None:
    one, other = (results["uneven batches", 2_800_000] for results in found)
    assert one.plan == other.plan == ""
    assert (len(one.modes), len(other.modes)) == (STEPS, STEPS - 1)
    assert "planned" in one.modes and "planned" in other.modes


@pytest.mark.parametrize("ranks", [1, 2])
def test_buckets_from_before_the_room_count_once(ranks: int, tmp_path: pathlib.Path, profile: HardwareProfile) -> None:
    for end in run_ranks(tmp_path, "bucket_jobs.find_gaps", profile, ranks=ranks):
        assert end.code == 0, end.text
        gaps = {name: max(map(abs, gaps)) for name, gaps in end.result.items()}
        assert gaps.keys() == CASES.keys() and max(gaps.values()) <= 64, gaps  # a tensor of DDP's own


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory, profile: HardwareProfile) -> list[End]:
    """What each rank found in meetings."""
    ends = run_ranks(tmp_path_factory.mktemp("meetings"), "meet", profile)
    assert all(end.code == 0 for end in ends), "\n".join(end.text for end in ends)
    return ends


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("options", r"UsageError: rank 1 of the job came with settling_steps=4, and rank 0 with settling_steps=3"),
        ("model", r"UsageError: rank 1 of the job came with a model with digest"),
        ("versions", r"UsageError: rank 1 of the job came with elbowroom .*\.1, torch"),
        ("budgets", r"RanksDiffer: rank 0 has the smallest budget, 3.0 MiB \(3145728 bytes\)"),
        ("steps", r"RanksDiffer: the step of rank 1 .* differs from that of rank 0"),
    ],
)
def test_all_ranks_are_told_how_they_differ(what: str, says: str, met: list[End]) -> None:
    assert [bool(re.match(says, end.result[what])) for end in met] == [True, True], met[0].result[what]


def test_ranks_that_differ_go_on_as_asked(met: list[End]) -> None:
    for end in met:
        assert end.result["other budgets"] == "" and end.result["least budget"] == 3 << 20
        assert "rank 1 has the smallest budget" in end.text
        assert end.result["dynamic"] == ["capture"] * 3 + ["dynamic"] * 2


def test_a_budget_changes_on_all_ranks(met: list[End]) -> None:
    one, other = (end.result for end in met)
    for each in (one, other):
        assert each["exchanges"] == 2  # one to offer steps, and one to receive the plan
        assert each["plan changed"] and each["plan"] == one["plan"]
        assert each["bytes of a plan"] < PLAN_BYTES / 8  # it is sent beside PyTorch's allocator
        assert each["budget"] == each["kept"] == (7 << 19) - (1 << 18)
        assert each["refused"].startswith("Infeasible: the step cannot run within 1000 B")
        assert each["modes"][3:] == ["planned"] * 5
        assert max(each["peaks"][:5]) <= 4 << 20 and max(each["peaks"][5:]) <= each["budget"]
    assert "Rank 1 cannot have this budget." in one["refused"]


def test_a_budget_changes_after_a_rank_has_run_another_kind_of_step(
    tmp_path: pathlib.Path, profile: HardwareProfile
) -> None:
    """And on each rank alone once the program has destroyed the process group."""
    for rank, end in enumerate(run_ranks(tmp_path, "change_budgets_apart", profile, seconds=100)):
        assert end.code == 0, end.text
        found = end.result
        assert found["last was agreed"] is (rank == 0) and found["changed"], found
        assert found["budget"] == 6 << 19 and "so this rank plans alone" in end.text
        assert max(found["peaks"][:14]) <= 4 << 20 and max(found["peaks"][14:]) <= 7 << 19


def test_a_rank_that_does_not_come_is_named(met: list[End]) -> None:
    says = "RankLost: rank 0 waited for the others at elbowroom.fit: rank 1 did not come to it within 2 s"
    assert met[0].result["in vain"].startswith(says)


FAILURES = {
    "is killed": r"rank 0 noticed that rank 1 \(process \d+\) has ended; its last sign of life: .* \d+ bytes",
    "hangs": r"rank 0 ends .* rank 1 gives no sign of life for \d+ s; its last: holding \d+ bytes",
    "waits for itself": r"rank 0 ends .* no rank has run for 5 s: rank 0 at .*rank_jobs.py.*, rank 1 at .*\(_end\)",
    "waits after a refusal": r"no rank has run for 5 s: .*, rank 1 at .* \(holding \d+ bytes, after Infeasible: the "
    r"step cannot run within 4.0 MiB .* are needed at once when aten.randn.default runs",
    "does not fit": r"rank 1: Infeasible: the step cannot run within 4.0 MiB .*\(\d+ bytes\) are needed at once when",
}
"""What happens to rank 1, and what the other one says."""

QUICK_FAILURE = "is killed"
"""The one that is tried without `--slow`, too."""


Failed = dict[str, tuple[list[End], list[str]]]


@pytest.fixture(scope="module")
def failed(
    tmp_path_factory: pytest.TempPathFactory, profile: HardwareProfile, pytestconfig: pytest.Config
) -> dict[str, tuple[list[End], list[str]]]:
    """How the ranks end after each failure, and the files that they leave; "" for ranks that survive theirs."""

    def run(how: str, folder: pathlib.Path) -> tuple[list[End], list[str]]:
        (folder / "spill").mkdir()
        if not how:
            return run_ranks(folder, "survive", profile, seconds=100), []
        ends = run_ranks(folder, "fail", how, str(folder / "spill"), profile, seconds=100, ends=[0])
        return ends, [each.name for each in (folder / "spill").iterdir()]

    ways = ["", *FAILURES] if pytestconfig.getoption("slow") else [QUICK_FAILURE]
    folders = [tmp_path_factory.mktemp("failure") for _ in ways]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        return dict(zip(ways, threads.map(run, ways, folders), strict=True))


@pytest.mark.slow
def test_a_restart_knows_nothing_of_earlier_failures(tmp_path: pathlib.Path, profile: HardwareProfile) -> None:
    for end in run_ranks(tmp_path, "restart", profile, seconds=100):
        assert end.code == 0, end.text
        assert len(end.result) == 8


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("new_group", r"rank 0 ends, as it waits at elbowroom.fit for rank 1, whose process \d+ has ended"),
        ("all_gather_object", r"rank 0 waited for the others at elbowroom.fit: rank 1, process \d+, has ended"),
    ],
)
def test_a_rank_that_ends_while_ranks_meet_ends_the_job(
    call: str, says: str, tmp_path: pathlib.Path, profile: HardwareProfile
) -> None:
    end = run_ranks(tmp_path, "end_in_fit", call, profile, seconds=60, ends=[0])[0]
    assert end.code not in (0, None)
    assert re.search(says, end.text), end.text


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=() if how == QUICK_FAILURE else pytest.mark.slow) for how in FAILURES]
)
def test_a_rank_that_fails_ends_the_job(how: str, failed: Failed) -> None:
    (end, _), left = failed[how]
    assert end.code not in (0, None)
    assert re.search(FAILURES[how], end.text, re.DOTALL), end.text
    assert left == []


@pytest.mark.slow
def test_ranks_go_on_after_steps_that_fail(failed: Failed) -> None:
    ends, _ = failed[""]
    for rank, end in enumerate(ends):
        assert end.code == 0, end.text
        assert end.result == ["capture"] * (5 - rank) + ["planned"] * 2  # a step that failed is not recorded

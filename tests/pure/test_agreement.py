"""What ranks agree on follows from what each says, names those that differ, and is the same on every rank."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.errors import RanksDiffer, UsageError
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.ranks.agreement import (
    Difference,
    Greeting,
    Offer,
    Terms,
    check_greetings,
    digest_step,
    merge_offers,
)
from tests.generators import jobs

GREETING = Greeting(
    versions="elbowroom 1, torch 2", model="a" * 64, options=(("mode", "auto"),), budget_bytes=100, host="h", process=1
)
OPS = 3


@some.composite
def offers(draw: some.DrawFn) -> list[Offer]:
    amounts = some.integers(0, 9)
    return [
        Offer(
            step=draw(some.sampled_from(("one", "one", "one", "other", ""))),
            text=f"rank {rank}",
            budget_bytes=draw(amounts),
            floor_bytes=draw(amounts),
            plain_bytes=draw(amounts),
            op_seconds=tuple(draw(some.lists(some.floats(0, 1), min_size=OPS, max_size=OPS))),
            workspace_bytes=tuple(draw(some.lists(amounts, min_size=OPS, max_size=OPS))),
            goes_without=draw(some.booleans()),
        )
        for rank in range(draw(some.integers(2, 5)))
    ]


@given(offers())
def test_terms_hold_for_every_rank(given: list[Offer]) -> None:
    found = merge_offers(given)
    steps = {each.step for each in given}
    if steps in ({"one"}, {"other"}):
        assert isinstance(found, Terms)
        assert found.budget_bytes == min(each.budget_bytes for each in given)
        assert found.goes_without == all(each.goes_without for each in given)
        for op in range(OPS):
            assert found.op_seconds[op] == max(each.op_seconds[op] for each in given)
            assert found.workspace_bytes[op] == max(each.workspace_bytes[op] for each in given)
        leader = given[found.leader]
        assert all((each.floor_bytes, each.plain_bytes) <= (leader.floor_bytes, leader.plain_bytes) for each in given)
    else:
        assert isinstance(found, Difference)
        assert found.is_early == ("" in steps)
        for rank, each in enumerate(given):
            if not each.step:
                assert f"rank {rank}: rank {rank}" in found.text


@pytest.mark.parametrize(
    ("steps", "named"),
    [("aab", "rank 2"), ("abb", "rank 0"), ("ab", "rank 1"), ("abcaa", "ranks 1, 2")],
)
def test_the_ranks_that_differ_from_most_are_named(steps: str, named: str) -> None:
    found = merge_offers([Offer(step=step, text="3 ops", budget_bytes=1) for step in steps])
    assert isinstance(found, Difference) and not found.is_early
    assert found.text.startswith(f"the step of {named} (3 ops, digest ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"versions": "elbowroom 2"}, "rank 1 of the job came with elbowroom 2, and rank 0 with elbowroom 1"),
        ({"model": "b" * 64}, "rank 1 of the job came with a model with digest bbbbbbbbbbbb"),
        ({"options": (("mode", "dynamic"),)}, "rank 1 of the job came with mode=dynamic, and rank 0 with mode=auto"),
    ],
)
def test_ranks_of_different_jobs_are_refused(change: dict[str, object], says: str) -> None:
    other = dataclasses.replace(GREETING, **change)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=says):
        check_greetings([GREETING, other, GREETING], stops=False)


def test_budgets_may_differ_unless_the_job_stops_then() -> None:
    other = dataclasses.replace(GREETING, budget_bytes=90)
    assert check_greetings([GREETING, GREETING], stops=True) == ""
    assert check_greetings([GREETING, other], stops=False).startswith("rank 1 has the smallest budget, 90 B")
    with pytest.raises(RanksDiffer, match="rank 1 has the smallest budget"):
        check_greetings([GREETING, other], stops=True)


@given(jobs())
def test_lifetimes_do_not_change_the_digest_of_a_step_and_saves_do(job: tuple[Trace, Costs]) -> None:
    trace, _ = job
    longer = [dataclasses.replace(each, released=trace.end, label="other") for each in trace.storages]
    assert digest_step(trace) == digest_step(dataclasses.replace(trace, storages=tuple(longer), name="other"))
    if trace.saves:
        larger = [
            dataclasses.replace(each, nbytes=each.nbytes + (each.id == trace.saves[0].storage)) for each in longer
        ]
        assert digest_step(trace) != digest_step(dataclasses.replace(trace, storages=tuple(larger)))

"""The tables of the planner benchmarks: each requirement, met and violated. No torch."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.standings import find_fastest, find_reversals, find_violations, list_excesses, list_gaps, print_summary

STRATEGIES = ("auto", "first", "second")


def make_cell(share: float = 0.5, bound: float | None = 1.0, **seconds: float | None) -> dict[str, Any]:
    """Return a cell with the seconds of each strategy; None for one that does not fit."""
    attempts = {
        name: {"fits": each is not None, "needed_bytes": 99, "planning_seconds": 0.5, "first": False}
        | ({} if each is None else {"step_seconds": each, "peak_bytes": 40})
        for name, each in seconds.items()
    }
    return {
        "model": "net", "hardware": "card", "share": share, "budget_bytes": 50, "bound_seconds": bound,
        "plain_seconds": 1.0, "attempts": attempts,
    }  # fmt: skip


def test_no_violation_if_every_requirement_holds() -> None:
    cells = [
        make_cell(0.8, auto=1.0, first=1.3, second=None),
        make_cell(0.4, auto=1.0199, first=1.016),  # 0.4 % slower is within 0.5 %
        make_cell(0.2, auto=1.0599, first=2.0),
        make_cell(0.1, None, auto=None, first=None),
    ]
    assert find_violations(cells, STRATEGIES) == []


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (make_cell(auto=1.016, first=1.01), "auto is 0.59% slower than first"),
        (make_cell(auto=None, second=3.0), "auto finds no plan, second does"),
        (make_cell(0.4, auto=1.03), "at 40% and more is 3.00%, above 2%"),
        (make_cell(0.39, auto=1.07), "below 40% is 7.00%, above 6%"),
        (make_cell(auto=1.0, first=0.99), "first beats the bound"),
    ],
)
def test_each_violation_is_reported(cell: dict[str, Any], words: str) -> None:
    assert any(words in each for each in find_violations([cell], STRATEGIES))


def test_failures_and_peaks_above_the_budget_are_reported() -> None:
    cell = make_cell(auto=1.0, first=1.0)
    cell["attempts"]["second"] = {"failed": "KeyError: 7", "planning_seconds": 0.1}
    cell["attempts"]["first"]["peak_bytes"] = 51
    found = find_violations([cell], STRATEGIES)
    assert len(found) == 2
    assert "second failed: KeyError: 7" in " ".join(found) and "first is above the budget" in " ".join(found)


def test_gaps_are_listed_for_the_requested_shares() -> None:
    cells = [make_cell(share, auto=1 + share) for share in (0.2, 0.3, 0.4, 1.0)]
    assert list_gaps(cells, "auto", deep=True) == pytest.approx([0.2, 0.3])
    assert list_gaps(cells, "auto", deep=False) == pytest.approx([0.4, 1.0])
    assert len(list_gaps([*cells, make_cell(bound=None, auto=1.0)], "auto")) == 4


def test_auto_is_the_fastest_of_equals() -> None:
    assert find_fastest(make_cell(auto=1.0, first=1.0, second=2.0), STRATEGIES) == (1.0, "auto")
    assert find_fastest(make_cell(auto=1.1, first=1.0, second=1.0), STRATEGIES) == (1.0, "first")
    assert find_fastest(make_cell(auto=None), STRATEGIES) is None
    # Strategies that were not requested do not count.
    assert find_fastest(make_cell(auto=1.1, first=1.0), ("auto",)) == (1.1, "auto")


def test_excesses_compare_with_the_best_other_strategy_worst_first() -> None:
    cells = [make_cell(auto=1.0, first=2.0, second=1.6), make_cell(auto=1.2, first=1.0, second=1.1)]
    found = [(pytest.approx(excess), other) for excess, _, other in list_excesses(cells, STRATEGIES)]
    assert found == [(0.2, "first"), (-0.375, "second")]


def plans(*points: tuple[int, float | None, int]) -> list[dict[str, Any]]:
    return [{"budget_bytes": budget, "step_seconds": seconds, "peak_bytes": peak} for budget, seconds, peak in points]


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([(1, None, 0), (2, 3.0, 2), (3, 3.0, 2), (4, 2.0, 4)], []),
        ([(2, 2.0, 2), (3, 2.1, 3), (4, 2.05, 4)], ["3 bytes: 5.000% slower than within 2", "4 bytes: 2.500% slower"]),
        ([(2, 2.0, 2), (3, 1.0, 1), (4, 1.0, 2)], ["3 bytes: a peak 1 bytes below that within 2"]),
        ([(2, 2.0, 2), (3, None, 0)], ["3 bytes: no plan, though there is one within 2"]),
    ],
)
def test_reversals_with_more_memory_are_reported(points: list[tuple[int, float | None, int]], words: list[str]) -> None:
    found = find_reversals(plans(*points))
    assert len(found) == len(words)
    for said, expected in zip(found, words, strict=True):
        assert said.startswith(expected)


def test_the_summary_prints_missing_and_refused_results(capsys: pytest.CaptureFixture[str]) -> None:
    cell = make_cell(auto=1.1, first=1.2)
    cell["attempts"]["second"] = {"refused": "UsageError: too many ops", "planning_seconds": 0.1}
    print_summary([cell, make_cell(0.2, None, auto=None)], STRATEGIES)
    shown = capsys.readouterr().out
    assert "auto 10.0%" in shown and "none" in shown and "refused 1" in shown
    print_summary([], STRATEGIES)

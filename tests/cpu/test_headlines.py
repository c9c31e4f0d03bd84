"""What a row of `benchmarks/headlines.py` says: reproduced, passed or not reproduced, and why."""

from __future__ import annotations

import pathlib
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def headlines(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, found as a script finds it."""
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[2] / "benchmarks")
    import headlines

    return headlines


@pytest.mark.parametrize(
    ("found", "auto", "more", "verdict", "as_good", "words"),
    [
        (1.3, 1.4, {}, "reproduced", True, ""),
        (1.3, 1.2, {}, "reproduced", False, ""),
        (1.0, 1.4, {}, "passed", True, "has 1.000, not 1.300"),
        (1.0, 1.0, {}, "not reproduced", True, "and auto has 1.000"),
        (None, 1.4, {}, "passed", None, "no plan"),
        (None, 1.0, {}, "not reproduced", None, "no plan"),
        (None, None, {}, "not reproduced", False, "no plan"),
        (1.0, None, {}, "not reproduced", False, "auto has none"),
        (1.4, 1.4, {"reason": "in another card"}, "not reproduced", True, "in another card"),
        (1.2, 1.2, {"less": True}, "reproduced", True, ""),
        (1.5, 1.2, {"less": True}, "passed", True, "has 1.500, not 1.300"),
    ],
)
def test_a_row_says_what_came_of_it(
    headlines: ModuleType, found: float | None, auto: float | None, more: dict[str, Any], verdict: str,
    as_good: bool | None, words: str,
) -> None:  # fmt: skip
    row = headlines.make_row("batch", "net", "over it", found, auto, published=1.3, **more)
    assert (row["verdict"], row["as_good"]) == (verdict, as_good)
    assert words in row["reason"] and bool(row["reason"]) == (verdict != "reproduced")


def test_what_has_nothing_to_compare_with_does_not_hold(headlines: ModuleType) -> None:
    rows = [headlines.make_row("batch", "net", "over it", None, 1.0, published=1.3)]
    total = headlines.sum_up(rows, "over it")
    assert (total["verdict"], total["as_good"], total["found"]) == ("not reproduced", None, None)


def test_a_batch_counts_at_half_of_the_plain_throughput(headlines: ModuleType) -> None:
    class Jobs:
        """A card on which ten samples fit without a plan; more cost ever more time."""

        def seconds(self, model: str, batch: int, strategy: str) -> float | None:
            per_sample = {"keep_all": 1.0, "slow": 1.0 + (batch - 10) / 100, "fast": 1.5, "small": 1.0}[strategy]
            return None if strategy == "small" and batch > 50 else batch * per_sample

    sizes = {name: headlines.find_accepted(Jobs(), "net", name, 10, 500) for name in ("slow", "fast", "small")}
    assert 107 <= sizes["slow"] <= 110 and sizes["fast"] >= 490 and 49 <= sizes["small"] <= 50

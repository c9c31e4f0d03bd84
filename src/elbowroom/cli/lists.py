"""Parses options that hold several budgets or several strategies."""

from __future__ import annotations

from elbowroom.cli.sources import read_amount
from elbowroom.errors import UsageError

ALL = "all"
MOST_BUDGETS = 1000


def read_budgets(text: str, *, device_bytes: int | None = None, peak_bytes: int | None = None) -> tuple[int, ...]:
    """Return budgets in bytes, ascending and without duplicates.

    The text is a comma-separated list: "20%peak:100%peak:9", "4GiB,60%peak,80%", or a mix. FROM:TO:COUNT stands for
    COUNT evenly spaced budgets, both ends included.

    Args:
        device_bytes, peak_bytes: what "60%" and "60%peak" are shares of; None if unknown.

    Raises:
        UsageError: a part is neither a budget nor FROM:TO:COUNT, or is a share of an unknown amount.
    """

    def read(part: str) -> int:
        return read_amount("--budgets", part, device_bytes=device_bytes, peak_bytes=peak_bytes)

    found: set[int] = set()
    for part in text.split(","):
        bounds = part.split(":")
        if len(bounds) == 1:
            found.add(read(part))
            continue
        count = bounds[2].strip() if len(bounds) == 3 else ""
        if not (count.isdecimal() and 2 <= int(count) <= MOST_BUDGETS):
            raise UsageError(
                f"--budgets: {part!r} is not FROM:TO:COUNT with a COUNT of 2 to {MOST_BUDGETS}; "
                "write, for example, 20%peak:100%peak:9"
            )
        low, high = (read(bound) for bound in bounds[:2])
        if low > high:
            raise UsageError(f"--budgets: {part!r} starts above its end; write the smaller budget first")
        steps = int(count) - 1
        found |= {low + (high - low) * step // steps for step in range(steps + 1)}
    return tuple(sorted(found))


def read_strategies(text: str) -> tuple[str, ...]:
    """Return strategies without duplicates, from "all", "auto,vdnn", or "auto,autoswap:score=doa,mode=zero_overhead".

    Options follow their strategy, so a part with "=" but without ":" belongs to the part before it.

    Raises:
        UnknownMember: there is no such strategy.
        UsageError: a strategy has no such option, or the text names no strategy.
    """
    from elbowroom.planner.options import find_strategy
    from elbowroom.planner.problem import list_strategies

    found: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if "=" in part and ":" not in part and found:
            found[-1] += f",{part}"
        else:
            found += list_strategies() if part == ALL else [part]
    if not found:
        raise UsageError(f"--strategies: {text!r} names none; write all, or a list such as auto,keep_all")
    for strategy in found:
        find_strategy(strategy)
    return tuple(dict.fromkeys(found))

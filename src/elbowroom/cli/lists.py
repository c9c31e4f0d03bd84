"""Several budgets, or several strategies, in one text."""

from __future__ import annotations

from elbowroom.cli.sources import read_amount
from elbowroom.errors import UsageError

ALL = "all"
MOST_BUDGETS = 1000


def read_budgets(text: str, *, device_bytes: int | None = None, peak_bytes: int | None = None) -> tuple[int, ...]:
    """Budgets in bytes, smallest first, each once: of "20%peak:100%peak:9", "4GiB,60%peak,80%", or both mixed.

    FROM:TO:COUNT are so many budgets at equal distances, both ends included.

    Args:
        device_bytes, peak_bytes: what "60%" and "60%peak" are shares of; None where that is not known.

    Raises:
        UsageError: a part is neither a budget nor FROM:TO:COUNT, or a share of what is not known.
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
            raise UsageError(f"--budgets: {part!r} ends before it begins; the smaller one comes first")
        steps = int(count) - 1
        found |= {low + (high - low) * step // steps for step in range(steps + 1)}
    return tuple(sorted(found))


def read_strategies(text: str) -> tuple[str, ...]:
    """Strategies, each once: of "all", "auto,vdnn", or with options, "auto,autoswap:score=doa,mode=zero_overhead,vdnn".

    An option follows the strategy it is for, so a part with "=" and without ":" belongs to the part before it.

    Raises:
        UnknownMember: there is no such strategy.
        UsageError: one has no such option, or there is none in the text.
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
        raise UsageError(f"--strategies: {text!r} names none; write all, or for example auto,keep_all")
    for strategy in found:
        find_strategy(strategy)
    return tuple(dict.fromkeys(found))

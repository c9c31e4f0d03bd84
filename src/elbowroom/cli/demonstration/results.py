"""Results of the demo, one per model: checks and a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from elbowroom.units import format_bytes, format_seconds

ALLOCATES_ITSELF = (
    "A room's allocator reuses pages that plain PyTorch returns to the system and faults in again, so a step may be "
    "faster within a budget."
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One model, plain and within its budget.

    Attributes:
        spec: the workload.
        plain, within: results of the two processes (`jobs.run_plain`, `jobs.run_within`).
        losses_again: of a second plain process; None if there was none, since the losses were equal at once.
    """

    spec: str
    budget_bytes: int
    plain: Mapping[str, Any]
    within: Mapping[str, Any]
    losses_again: Sequence[str] | None = None

    @property
    def losses_equal(self) -> bool:
        """True if the losses of all steps are bitwise equal to those of a plain process."""
        return self.within["losses"] in (self.plain["losses"], self.losses_again)

    @property
    def repeats(self) -> bool:
        """False if two plain processes had different losses."""
        return self.losses_again in (None, self.plain["losses"])

    @property
    def remark(self) -> str:
        """Remark if plain PyTorch does not repeat itself; else ""."""
        if self.repeats:
            return ""
        other = "; those within the budget equal the second's" if self.losses_equal else ""
        return f"{self.spec}: two plain processes had different losses: PyTorch does not repeat itself here{other}"

    @property
    def budget_held(self) -> bool:
        """True if every metered step stayed within the budget."""
        peak_bytes = self.within["peak_bytes"]
        return peak_bytes is not None and peak_bytes <= self.budget_bytes

    def fields(self) -> dict[str, Any]:
        """Return the fields of the JSON document."""
        return {
            "name": self.spec,
            "budget_bytes": self.budget_bytes,
            "budget_share": self.budget_bytes / self.plain["peak_bytes"],
            "slowdown": self.within["seconds"] / self.plain["seconds"],
            "losses_equal": self.losses_equal,
            "plain_repeats": self.repeats,
            "budget_held": self.budget_held,
            "plain": dict(self.plain),
            "within": dict(self.within),
        }


def find_problems(results: Sequence[Result]) -> list[str]:
    """Return a message for each failed check; empty if all passed."""
    problems = []
    for result in results:
        if not result.losses_equal:
            steps = zip(result.plain["losses"], result.within["losses"], strict=False)
            first = next((step for step, (one, other) in enumerate(steps, 1) if one != other), None)
            where = "in number" if first is None else f"from step {first} on"
            problems.append(f"{result.spec}: the losses differ {where}")
        if not result.budget_held:
            peak, budget = result.within["peak_bytes"], result.budget_bytes
            found = f"the measured peak of {peak} bytes is above the budget of {budget}"
            problems.append(f"{result.spec}: {'no peak was measured' if peak is None else found}")
    return problems


def tabulate(results: Sequence[Result]) -> Table:
    """Return a table of plain PyTorch and Elbowroom side by side, with one column per model."""
    title = "Plain PyTorch, and the same training within a budget"
    table = Table(title=title, title_justify="left", title_style="bold")
    if any(result.plain["device"] == "cpu" for result in results):
        table.caption = ALLOCATES_ITSELF
        table.caption_justify = "left"
    table.add_column("")
    for result in results:
        table.add_column(result.spec.rpartition(":")[2], justify="right")
        table.add_column("of plain", justify="right", style="dim")
    for name, describe in _ROWS:
        cells: list[str] = []
        for result in results:
            cells += describe(result)
        table.add_row(name, *cells, end_section=name in _SECTIONS)
    return table


def _share(value: float, whole: float) -> str:
    return f"{value / whole:.0%}" if whole else ""


def _bytes(result: Result, name: str, nbytes: int | None) -> tuple[str, str]:
    """Format bytes with their share of the plain step's bytes."""
    return ("not measured", "") if nbytes is None else (format_bytes(nbytes), _share(nbytes, result.plain[name]))


def _step(result: Result, seconds: float) -> tuple[str, str]:
    return (format_seconds(seconds), f"{seconds / result.plain['seconds']:.2f} x")


_ROWS: tuple[tuple[str, Callable[[Result], tuple[str, str]]], ...] = (
    ("plain peak", lambda r: (format_bytes(r.plain["peak_bytes"]), "")),
    ("plain resident memory", lambda r: (format_bytes(r.plain["resident_bytes"]), "")),
    ("plain seconds per step", lambda r: (format_seconds(r.plain["seconds"]), "")),
    ("budget", lambda r: _bytes(r, "peak_bytes", r.budget_bytes)),
    ("forecast peak", lambda r: _bytes(r, "peak_bytes", r.within["forecast_peak_bytes"])),
    ("measured peak", lambda r: _bytes(r, "peak_bytes", r.within["peak_bytes"])),
    ("resident memory", lambda r: _bytes(r, "resident_bytes", r.within["resident_bytes"])),
    ("forecast seconds per step", lambda r: _step(r, r.within["forecast_seconds"])),
    ("measured seconds per step", lambda r: _step(r, r.within["seconds"])),
    ("losses equal", lambda r: (f"{'yes' if r.losses_equal else 'NO'}, all {len(r.plain['losses'])}", "")),
)

_SECTIONS = ("plain seconds per step",)

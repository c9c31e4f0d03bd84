"""How far does one save, one need, or one call of `plan` go through the code?

    python benchmarks/call_counts.py [--output FILE.json]

A small MLP is trained by a plan that offloads everything. `sys.setprofile` lists the calls of Python functions:

- from the save of a tensor at which one storage is offloaded and one is released, and
- from the need of a tensor whose storage is reloaded at once (and, in a walk of its own, released after it was given),

up to the calls of `Transfers` (`runtime/transfers.py`). The calls that these lead to in turn are the tier's work, and
counted apart. Files are those of the package. Of all such saves (needs) in a step, the longest walk is shown.

For `plan`, each function counts at its first call only, as a reader would follow it. The figure is how often this walk
returns to a file that it has left.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from writing import write_results

import elbowroom
from elbowroom.ir.journal import Mode

SOURCE = pathlib.Path(elbowroom.__file__).parent

LAYERS, WIDTH, ROWS = 13, 256, 512

SHARE = 0.65
"""Of the bytes that the step takes as it is: its budget."""

MOST = {"save": "25 in 8", "need": "20 in 7"}
"""Calls and files that these walks may have."""

MOST_RETURNS = 2


@dataclasses.dataclass
class Walk:
    """The calls of Python functions that one call leads to.

    Attributes:
        calls: file and function of each, up to the calls of `Transfers`.
        inside: calls that these lead to in turn.
    """

    calls: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    inside: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def count(self, function: str) -> int:
        """Return how often a function was called."""
        return sum(name == function for _, name in self.calls)

    def count_files(self) -> int:
        """Return how many files of the package have a function that was called."""
        return len({file for file, _ in self.calls if file.endswith(".py")})


class Recorder:
    """Records the walks that begin at some functions. A context; for the thread that enters it."""

    def __init__(self, begins_at: Callable[[str, str], bool], door: str) -> None:
        self._begins_at = begins_at
        self._door = door
        self._root: FrameType | None = None
        self._at_door: FrameType | None = None
        self.walks: list[Walk] = []

    def __enter__(self) -> Recorder:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self._see_call(frame)
        elif event == "return" and frame is self._at_door:
            self._at_door = None
        elif event == "return" and frame is self._root:
            self._root = None

    def _see_call(self, frame: FrameType) -> None:
        call = name_file(frame.f_code.co_filename), frame.f_code.co_qualname
        if self._root is None:
            if not self._begins_at(*call):
                return
            self._root = frame
            self.walks.append(Walk())
        walk = self.walks[-1]
        if self._at_door is not None:
            walk.inside.append(call)
            return
        walk.calls.append(call)
        if call[0] == self._door:
            self._at_door = frame


def name_file(path: str) -> str:
    """Return a file's path in the package; "" for others, and for code that was generated."""
    return path[len(str(SOURCE)) + 1 :] if path.startswith(f"{SOURCE}/") else ""


def make_job() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """Return a model, its optimizer, and a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def record_step() -> tuple[list[Walk], Any]:
    """Return the walks of all saves and needs of a planned step, and the step with its plan."""
    model, optimizer, step = make_job()
    with elbowroom.fit(model, optimizer, 1 << 40) as room:
        for _ in range(3):
            with room.step():
                step()
        assert room.planned is not None
        budget = int(SHARE * room.planned.forecast.peak_bytes)
    with elbowroom.fit(model, optimizer, budget, strategy="offload_all", min_offload_bytes=1) as room:
        while room.planned is None or room.journal().steps[-1].mode is not Mode.PLANNED:
            with room.step():
                step()
        recorder = Recorder(
            lambda file, name: file == "runtime/step_runner.py" and name in ("StepRunner.move", "StepRunner.bring"),
            "runtime/transfers.py",
        )
        with room.step(), recorder:
            step()
        assert room.journal().steps[-1].mode is Mode.PLANNED
        return recorder.walks, room.planned


def choose(walks: list[Walk], root: str, once: dict[str, int]) -> Walk:
    """Return the longest of the walks from `root` that call some functions so often."""
    found = [
        walk
        for walk in walks
        if walk.calls[0][1] == f"StepRunner.{root}" and all(walk.count(name) == times for name, times in once.items())
    ]
    if not found:
        raise SystemExit(f"in this step there is no such {root}: {once}")
    return max(found, key=lambda walk: len(walk.calls))


def count_returns(planned: Any) -> tuple[Counter[str], int]:
    """Return how often a reader of `plan` comes back to each file, and how many functions are called."""
    recorder = Recorder(lambda file, name: file == "planner/problem.py" and name == "plan", "")
    with recorder:
        elbowroom.plan(planned.trace, planned.costs, planned.plan.budget_bytes)
    functions = dict.fromkeys(call for call in recorder.walks[0].calls if call[0])
    runs = [file for file, _ in itertools.groupby(file for file, _ in functions)]
    return Counter({file: visits - 1 for file, visits in Counter(runs).items()}), len(functions)


def main() -> None:
    """Count, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parsed = parser.parse_args()
    walks, planned = record_step()
    chosen = {
        "save": choose(walks, "move", {"PlannedMoves._offload": 1, "PlannedMoves._release": 1}),
        "need": choose(walks, "bring", {"PlannedMoves._release": 0}),
        "need, then release": choose(walks, "bring", {"PlannedMoves._release": 1}),
    }
    results: list[dict[str, Any]] = []
    print(f"{'':18} {'calls':>6} {'files':>6} {'at most':>8} {'in the tier':>12}")
    for name, walk in chosen.items():
        calls, files, inside = len(walk.calls), walk.count_files(), len(walk.inside)
        print(f"{name:18} {calls:6} {files:6} {MOST.get(name, ''):>8} {inside:12}")
        listed = [f"{file} {function}".strip() for file, function in walk.calls]
        results.append({"what": name, "calls": calls, "files": files, "calls_in_tier": inside, "walk": listed})
    returns, functions = count_returns(planned)
    most = max(returns.values())
    print(f"plan: {functions} functions; returns to one file {most} times, at most {MOST_RETURNS}:")
    for file, times in returns.most_common():
        if times > 0:
            print(f"{times:6} {file}")
    results.append({"what": "plan", "functions": functions, "returns": {k: v for k, v in returns.items() if v}})
    write_results(parsed.output, results)


if __name__ == "__main__":
    main()

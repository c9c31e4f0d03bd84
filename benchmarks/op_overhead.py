"""What does a room add to each op, over plain PyTorch?

    python benchmarks/op_overhead.py [--rounds 7] [--output FILE.json]

Loops of small ops in a forward and a backward pass, on the CPU: bare PyTorch, a dispatch mode that only calls the op,
and dynamic steps with room for everything: in a room that never had too little ("dynamic"), and after a step that had
too little, so that what may move is recorded ("short"), or all that there is ("recorded"). And steps that follow a
plan that moves nothing: where the model's state is small ("planned"), and where it might have to leave ("state").
Rounds take turns in one process; those of "short", "recorded" and "state" come last, since plain steps are slower while
there are such rooms, too. Figures are medians over rounds, and of what is added the difference of the fastest as well,
which other jobs on the machine disturb least.
Then: what deciding takes, by how many storages there are to choose from.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from writing import write_results

import elbowroom
from elbowroom._family import get, names
from elbowroom.ir.events import PressureRaised, StorageSaved
from elbowroom.ir.journal import Mode
from elbowroom.residency import policies
from elbowroom.residency.access_history import AccessHistory
from elbowroom.residency.machine import State

LAYERS = 100

LARGE_ROWS, SMALL_BYTES = 4096, 64 << 20
"""A batch whose step takes 150 MB, and a budget that is too small for it and large for the others."""

STATE_BYTES = 32 << 20
"""Of a parameter that no op uses, so that state is a third of the budget."""


class Bare(TorchDispatchMode):
    """Calls the op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Count(Bare):
    """Counts ops."""

    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def make_step() -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., None]]:
    """Many small layers; the step may be given another batch."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.LayerNorm(32)) for _ in range(LAYERS)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(8, 32)

    def step(batch: torch.Tensor = x) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def take(step: Callable[[], None], context: AbstractContextManager[Any]) -> float:
    """Seconds of one step."""
    begin = time.perf_counter()
    with context:
        step()
    return time.perf_counter() - begin


class Path(NamedTuple):
    """A storage is computed from nothing."""

    seconds: float
    nbytes: int = 1000
    leaves: tuple[()] = ()


class Context:
    """A driver that has so many storages (`residency.context.PolicyContext`)."""

    budget_bytes = 1 << 40

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        self.seconds += 1e-6
        return self.seconds

    def busy_seconds(self) -> float:
        return self.seconds

    def live_bytes(self) -> int:
        return 1 << 39

    take_recent_peak = live_bytes

    def nbytes(self, storage: int) -> int:
        return 1000 + storage % 977

    def address(self, storage: int) -> int:
        return 2048 * (storage * 7919 % (1 << 17))

    def state(self, storage: int) -> State:
        return State.RESIDENT

    def move_seconds(self, nbytes: int) -> tuple[float, float]:
        return 5e-5, 5e-5

    def copy_out_seconds(self, storage: int) -> float:
        return 5e-5

    def find_path(self, storage: int) -> Path:
        return Path(1e-5 * (1 + storage % 13))

    def may_drop(self, storage: int) -> bool:
        return True

    may_leave = may_move = may_drop

    def add_segment(self, storage: int) -> int:
        return 0


def time_decisions(policy: str, count: int) -> float:
    """Seconds for each eviction, where there are `count` storages."""
    chosen = get(policies, policy, "Policy")(Context(), AccessHistory())
    for storage in range(count):
        chosen.decide(StorageSaved(storage, storage))
    begin = time.perf_counter()
    for _ in range(100):
        chosen.decide(PressureRaised(1, count))
    return (time.perf_counter() - begin) / 100


Contexts = dict[str, tuple[Callable[[], None], Callable[[], AbstractContextManager[Any]]]]


def run_rounds(contexts: Contexts, rounds: int) -> dict[str, list[float]]:
    """Seconds of the steps of each context, which take turns."""
    for run, make in contexts.values():
        take(run, make())
    taken: dict[str, list[float]] = {name: [] for name in contexts}
    for _ in range(rounds):
        for name, (run, make) in contexts.items():
            taken[name].append(take(run, make()))
    return taken


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    step, counter = make_step(), Count()
    with counter:
        step[2]()
    with contextlib.ExitStack() as stack:

        def make_room(
            made: tuple[nn.Module, torch.optim.Optimizer, Any], nbytes: int, **options: Any
        ) -> elbowroom.Room:
            options = {"mode": "dynamic"} | options
            return stack.enter_context(elbowroom.fit(*made[:2], nbytes, **options))

        contexts: Contexts = {
            "plain": (step[2], contextlib.nullcontext), "bare mode": (step[2], Bare),
            "dynamic": (step[2], make_room(step, 1 << 40).step),
        }  # fmt: skip

        def plan(nbytes: int) -> tuple[Callable[[], None], Callable[[], AbstractContextManager[Any]]]:
            """A step that follows a plan that moves nothing, within so many bytes."""
            same_step = make_step()
            same_step[0].register_parameter("frozen", nn.Parameter(torch.zeros(STATE_BYTES // 4), requires_grad=False))
            room = make_room(same_step, nbytes, mode="auto", always_watch=True)
            while room.planned is None or room.journal().steps[-1].mode is not Mode.PLANNED:
                take(same_step[2], room.step())
            return same_step[2], room.step

        contexts["planned"] = plan(1 << 40)
        taken = run_rounds(contexts, parsed.rounds)
        taken |= run_rounds({"state": plan(3 * STATE_BYTES)}, parsed.rounds)
        contexts = {}
        for name, more in (("short", {}), ("recorded", {"min_offload_bytes": 1})):
            same_step = make_step()
            room = make_room(same_step, SMALL_BYTES, **more)
            with room.step():
                same_step[2](torch.randn(LARGE_ROWS, 32))
            if not sum(record.offloaded_bytes + record.recomputed for record in room.journal().steps):
                raise SystemExit("the large step fits: nothing is recorded")
            contexts[name] = same_step[2], room.step
        taken |= run_rounds(contexts, parsed.rounds)
    results: list[dict[str, Any]] = []
    for name, seconds in taken.items():
        each = statistics.median(seconds) / counter.ops
        results.append({"what": name, "ops": counter.ops, "seconds_an_op": each})
        print(f"{name:10} {each * 1e6:7.1f} us an op, {counter.ops} ops")
    for name in ("dynamic", "short", "recorded", "planned", "state"):
        over = statistics.median(b - a for a, b in zip(taken["plain"], taken[name], strict=True)) / counter.ops
        least = (min(taken[name]) - min(taken["plain"])) / counter.ops
        what = f"{name} over plain"
        print(f"{what}: {over * 1e6:.1f} us an op; the fastest over the fastest: {least * 1e6:.1f}")
        results.append({"what": what, "ops": counter.ops, "seconds_an_op": over, "least_seconds_an_op": least})
    for policy in names(policies):
        for count in (100, 1_000, 10_000, 100_000):
            each = time_decisions(policy, count)
            results.append({"what": policy, "storages": count, "seconds_an_eviction": each})
            print(f"{policy:10} {count:7} storages: {each * 1e6:7.1f} us an eviction")
    write_results(parsed.output, results)


if __name__ == "__main__":
    main()

"""What does the observer add to each op, over plain PyTorch?

    python benchmarks/observer.py [--rounds 200] [--output FILE.json]

Small ops on one thread of the CPU, forward and backward: 40 linear layers, and an LSTM cell in a loop. Rounds take
turns in one process, each in all ways: plain; with the observer; with its clock and exact deaths as well ("traced");
and after it was stopped. Times are of the thread's CPU, in microseconds an op: the median of the differences from plain
in the same round, and the difference of the tenth percentiles, which other jobs on the machine disturb least.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from writing import write_results

from elbowroom.native import library


def make_linear() -> Callable[[], None]:
    """Forty small linear layers."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(40))), torch.randn(4, 16)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return step


def make_lstm() -> Callable[[], None]:
    """An LSTM cell in a loop of 16."""
    torch.manual_seed(0)
    cell, xs, zeros = nn.LSTMCell(16, 16), torch.randn(16, 4, 16), torch.zeros(4, 16)

    def step() -> None:
        hidden, memory = zeros, zeros
        for x in xs:
            hidden, memory = cell(x, (hidden, memory))
        hidden.sum().backward()
        cell.zero_grad()

    return step


def take(step: Callable[[], None]) -> float:
    """CPU seconds of one step."""
    begin = time.thread_time()
    step()
    return time.thread_time() - begin


def measure(step: Callable[[], None], rounds: int) -> dict[str, Any]:
    """Microseconds an op, each way."""
    native = library.load(library.OBSERVER)
    observer, traced = native.Observer(), native.Observer(tracks_deaths=True, reads_clock=True)

    def observed(one: Any) -> float:
        one.start()
        seconds = take(step)
        one.stop()
        return seconds

    ways: dict[str, Callable[[], float]] = {
        "observer": lambda: observed(observer),
        "traced": lambda: observed(traced),
        "stopped": lambda: take(step),
    }
    for way in ways.values():
        way()
    ops = len(observer.ops())
    plain: list[float] = []
    taken: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        plain.append(take(step))
        for name, way in ways.items():
            taken[name].append(way())
    gc.enable()
    scale = 1e6 / ops

    def find_tenth(values: list[float]) -> float:
        return sorted(values)[len(values) // 10]

    result: dict[str, Any] = {"ops": ops, "plain_us": round(statistics.median(plain) * scale, 3)}
    for name, values in taken.items():
        paired = statistics.median(one - other for one, other in zip(values, plain, strict=True))
        result[f"{name}_adds_us"] = round(paired * scale, 3)
        result[f"{name}_adds_us_tenth"] = round((find_tenth(values) - find_tenth(plain)) * scale, 3)
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--output", metavar="FILE.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for name, make in {"linear": make_linear, "lstm": make_lstm}.items():
        results.append({"loop": name, **measure(make(), arguments.rounds)})
        print(results[-1])
    write_results(arguments.output, results)


if __name__ == "__main__":
    main()

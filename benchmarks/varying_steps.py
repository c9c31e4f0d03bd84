"""What steps of other shapes cost each time, near the memory that they need and below it.

    python benchmarks/varying_steps.py [--models moe gpt2] [--shares 4 0.98 0.8 0.6] [--rounds 5] [--output FILE.json]

A mixture of experts routes another number of tokens to each expert in each step, and a GPT-2 gets inputs of other
lengths: no plan serves them, and the online policy decides. Each round runs the same steps without a room, and in one
of mode `auto` and one of `dynamic`, whose budgets are shares of the peak where everything fits. Times are of the
processor, with one thread, of the steps after the first ten; the ratio to the plain steps of the same round, and the
least and largest of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from writing import write_results

import elbowroom
from elbowroom.room import Room
from elbowroom.workloads._packages import import_package

FIRST, STEPS = 10, 40
WHOLE = 1 << 40
VOCABULARY = 300
MODES = ("auto", "dynamic")
Job = tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]


class Experts(nn.Module):
    """Two layers of six experts, each of which gets the tokens that are routed to it."""

    def __init__(self, width: int = 64, experts: int = 6, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.routers = nn.ModuleList(nn.Linear(width, experts) for _ in range(layers))
        self.experts = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(experts)
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        for norm, router, experts in zip(self.norms, self.routers, self.experts, strict=True):
            normed = norm(x)
            weights, chosen = router(normed).softmax(-1).topk(2, -1)
            out = torch.zeros_like(normed)
            for index, expert in enumerate(experts):  # type: ignore[arg-type]
                rows, places = torch.where(chosen == index)
                if len(rows):
                    out = out.index_add(0, rows, expert(normed[rows]) * weights[rows, places, None])
            x = x + out
        return self.head(x)  # type: ignore[no-any-return]


def make_moe() -> Job:
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        tokens = torch.randint(0, VOCABULARY, (8, 64), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens), tokens.flatten()).backward()
        optimizer.step()

    return model, optimizer, step


def make_gpt2() -> Job:
    transformers: Any = import_package("transformers")
    config = transformers.GPT2Config(n_layer=6, n_head=4, n_embd=128, vocab_size=1000, n_positions=256)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters())
    lengths = random.Random(0)

    def step() -> None:
        tokens = torch.randint(0, 1000, (4, lengths.randrange(96, 256)))
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    return model, optimizer, step


MODELS: dict[str, Callable[[], Job]] = {"moe": make_moe, "gpt2": make_gpt2}


def run(make: Callable[[], Job], budget_bytes: int | None = None, mode: str = "auto") -> tuple[float, Room | None]:
    """Train. Return the seconds of the steps after the first, and the room."""
    torch.manual_seed(0)
    model, optimizer, step = make()
    room = None if budget_bytes is None else elbowroom.fit(model, optimizer, budget_bytes, mode=mode)
    seconds = 0.0
    with contextlib.nullcontext() if room is None else room:
        for index in range(STEPS):
            begin = time.process_time()
            with contextlib.nullcontext() if room is None else room.step():
                step()
            seconds += (time.process_time() - begin) * (index >= FIRST)
    return seconds, room


def find_peak(make: Callable[[], Job]) -> int:
    """Return the peak of the steps in a room in which everything fits."""
    room = run(make, WHOLE, "dynamic")[1]
    assert room is not None
    return max(record.peak_bytes or 0 for record in room.journal().steps)


def compare(name: str, shares: list[float], rounds: int) -> list[dict[str, Any]]:
    """Run all modes and budgets of one model, and print a row for each."""
    make = MODELS[name]
    run(make)  # what is slow the first time
    peak_bytes = find_peak(make)
    found: dict[tuple[float, str], list[float]] = {(share, mode): [] for share in shares for mode in MODES}
    moved: dict[tuple[float, str], float] = {}
    for _ in range(rounds):
        for (share, mode), ratios in found.items():
            plain, (seconds, room) = run(make)[0], run(make, int(share * peak_bytes), mode)
            assert room is not None
            ratios.append(seconds / plain)
            records = room.journal().steps[FIRST:]
            moved[share, mode] = sum(record.offloaded_bytes for record in records) / len(records)
    rows = []
    for (share, mode), ratios in found.items():
        rows.append({
            "model": name, "peak_bytes": peak_bytes, "share": share, "mode": mode, "ratio": statistics.median(ratios),
            "least": min(ratios), "most": max(ratios), "offloaded_bytes": moved[share, mode],
        })  # fmt: skip
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(
            f"{name:6} {share:5.2f} of {peak_bytes / 1e6:.1f} MB, {mode:8} {statistics.median(ratios):5.2f} x plain "
            f"{spread:16} {moved[share, mode] / 1e6:6.2f} MB moved out a step",
            flush=True,
        )
    return rows


def main() -> None:
    """Run, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--shares", nargs="+", type=float, default=[4.0, 0.98, 0.8, 0.6])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("elbowroom").setLevel(logging.CRITICAL)
    results = [row for name in options.models for row in compare(name, options.shares, options.rounds)]
    write_results(options.output, results)


if __name__ == "__main__":
    main()

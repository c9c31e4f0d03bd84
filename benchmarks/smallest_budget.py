"""Is what `Infeasible` says true? Steps that did not fit, tried again within what the error says they need.

    python benchmarks/smallest_budget.py [--only NAME ...] [--output FILE.json]

Small models with several optimizers train for three steps within shares of their plain peak: planned ahead (`step=`),
captured in the first step, and without a plan (`mode="dynamic"`). Where that raises `Infeasible`, a fresh room gets
`needed_bytes`. An error with `is_whole_step` calls this the smallest budget that works, and any other one calls it a
lower bound. Then the budget of `elbowroom.smallest_budget` is tried in all three ways.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch import nn
from torch.nn import functional
from writing import write_results

import elbowroom
from elbowroom.errors import Infeasible

SHARES = (0.1, 0.25, 0.4, 0.55, 0.7)
STEPS = 3
MODES = ("planned ahead", "captured", "dynamic")
TOO_LITTLE = 0.9
"""Of the smallest budget: a share with which the step planned ahead must not work."""

Job = tuple[nn.Module, list[torch.optim.Optimizer], Callable[[], Any]]


class Recurrent(nn.Module):
    """An LSTM and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.readout = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last hidden state, read out."""
        return self.readout(self.cell(x)[0][:, -1])


def make_mlp() -> nn.Module:
    """Eight layers of 256."""
    return nn.Sequential(*(each for _ in range(8) for each in (nn.Linear(256, 256), nn.GELU())))


def make_convnet() -> nn.Module:
    """Four convolutions with batch norm."""
    blocks = [(nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for i in range(4)]
    return nn.Sequential(*(each for block in blocks for each in block), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def make_transformer() -> nn.Module:
    """Three encoder layers."""
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


INPUTS: dict[Callable[[], nn.Module], tuple[int, ...]] = {
    make_mlp: (1024, 256),
    make_convnet: (16, 3, 32, 32),
    make_transformer: (16, 64, 64),
    Recurrent: (32, 32, 64),
}


def make_job(
    make: Callable[[], nn.Module], optimizer: Any, accumulate: int = 1, split: bool = False, **options: Any
) -> Job:
    """A model, its optimizers, and a step of `accumulate` backward passes."""
    torch.manual_seed(0)
    model = make()
    batch = torch.randn(INPUTS[make])
    parameters = list(model.parameters())
    groups = [parameters[::2], parameters[1::2]] if split else [parameters]
    optimizers = [optimizer(group, lr=1e-3, **options) for group in groups]

    def step() -> None:
        for part in batch.chunk(accumulate):
            functional.mse_loss(y := model(part), torch.zeros_like(y)).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()

    return model, optimizers, step


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
JOBS: dict[str, Callable[[], Job]] = {
    "MLP, SGD": lambda: make_job(make_mlp, SGD, momentum=0.9),
    "MLP, AdamW": lambda: make_job(make_mlp, ADAMW),
    "MLP, AdamW, foreach": lambda: make_job(make_mlp, ADAMW, foreach=True),
    "conv net, SGD": lambda: make_job(make_convnet, SGD),
    "conv net, AdamW": lambda: make_job(make_convnet, ADAMW),
    "transformer, SGD": lambda: make_job(make_transformer, SGD),
    "transformer, AdamW": lambda: make_job(make_transformer, ADAMW),
    "LSTM, AdamW": lambda: make_job(Recurrent, ADAMW),
    "MLP, AdamW, accumulate 4": lambda: make_job(make_mlp, ADAMW, accumulate=4),
    "transformer, two optimizers": lambda: make_job(make_transformer, ADAMW, split=True),
}


def train(make: Callable[[], Job], budget: int | str, mode: str, profile: Any) -> tuple[int, Infeasible | None]:
    """The peak of some steps in a fresh room, and the error that ended them."""
    model, optimizers, step = make()
    options: dict[str, Any] = {
        "profile": profile,
    }
    if mode == "dynamic":
        options["mode"] = "dynamic"
    if mode == "planned ahead":
        options["step"] = step
    try:
        with elbowroom.fit(model, optimizers, budget, **options) as room:
            for _ in range(STEPS):
                with room.step():
                    step()
            return max(record.peak_bytes for record in room.journal().steps), None
    except Infeasible as error:
        return 0, error


def try_again(make: Callable[[], Job], peak: int, mode: str, profile: Any) -> list[dict[str, Any]]:
    """What each share of the plain peak gives, and what the budget that its error names gives."""
    found = []
    for share in SHARES:
        budget = int(share * peak)
        _, error = train(make, budget, mode, profile)
        if error is None:
            continue
        again_bytes, again = train(make, error.needed_bytes, mode, profile)
        found.append({
            "mode": mode, "budget_bytes": budget, "needed_bytes": error.needed_bytes,
            "is_whole_step": getattr(error, "is_whole_step", True), "works": again is None,
            "peak_bytes": again_bytes,
        })  # fmt: skip
    return found


def run(name: str, profile: Any) -> dict[str, Any]:
    """One job: its retries, and its smallest budget in every way of running it."""
    make = JOBS[name]
    peak, _ = train(make, "1TiB", "dynamic", profile)
    row: dict[str, Any] = {"job": name, "plain_peak_bytes": peak, "retries": []}
    for mode in MODES:
        row["retries"] += try_again(make, peak, mode, profile)
    if hasattr(elbowroom, "smallest_budget"):
        smallest = elbowroom.smallest_budget(*make(), profile=profile)
        row["smallest_bytes"] = smallest
        peaks = {mode: train(make, smallest, mode, profile) for mode in MODES}
        row["works"] = {mode: error is None and peak <= smallest for mode, (peak, error) in peaks.items()}
        row["works_with_less"] = train(make, int(TOO_LITTLE * smallest), "planned ahead", profile)[1] is None
    return row


def summarize(rows: list[dict[str, Any]]) -> None:
    """Shares of the retries that did what their error said."""
    retries = [each for row in rows for each in row["retries"]]
    for is_whole, what in ((True, "called the smallest budget"), (False, "called a lower bound")):
        some = [each for each in retries if each["is_whole_step"] == is_whole]
        print(f"{what}: {len(some)} retries, {sum(each['works'] for each in some)} of them work")
    for mode in MODES:
        some = [row["works"][mode] for row in rows if "works" in row]
        print(f"smallest_budget, {mode}: {sum(some)} of {len(some)} work within it")
    print(f"with {TOO_LITTLE:.0%} of it: {sum(row.get('works_with_less', False) for row in rows)} work")


def main() -> None:
    """Run all jobs, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--output")
    given = parser.parse_args()
    logging.getLogger("elbowroom").setLevel(logging.ERROR)
    profile, rows = elbowroom.probe("cpu"), []
    for name in given.only:
        row = run(name, profile)
        rows.append(row)
        whole = [each["works"] for each in row["retries"] if each["is_whole_step"]]
        print(f"{name}: {sum(whole)} of {len(whole)} whole-step retries work; smallest {row.get('smallest_bytes')}, "
              f"{row.get('works')}, with less: {row.get('works_with_less')}", flush=True)  # fmt: skip
    summarize(rows)
    write_results(given.output, rows)


if __name__ == "__main__":
    main()

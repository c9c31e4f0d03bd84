"""What do ops in slices gain by running together? Bytes moved and seconds per step, with stretches and without.

    python benchmarks/stretches.py [--only NAME] [--steps 6] [--output FILE]

Steps within budgets far below what their largest ops take, so that these run in slices. Both rooms run in one process,
one after the other; the first two steps, in which slices and stretches are found, are left out. Parameters after the
last step are compared with those of plain PyTorch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from torch.nn import functional
from writing import write_results

import elbowroom
from elbowroom.runtime.stretch import SlicedStretch
from elbowroom.runtime.waiting_ops import WaitingOps
from elbowroom.units import format_bytes, parse_bytes
from elbowroom.workloads._packages import import_package

Job = tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], Any]]

WARM = 3
"""Steps before the first that counts."""


def make_head(tokens: int = 2048, classes: int = 50257, width: int = 256) -> Job:
    """A language model's head and its loss; the logits take 392 MiB."""
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(classes, width), torch.nn.Linear(width, classes, bias=False)
    model = torch.nn.Sequential(embedding, head)
    batch = torch.randint(classes, (4, tokens // 4))

    def step() -> None:
        functional.cross_entropy(model(batch).view(-1, classes), batch.flatten()).backward()

    return model, torch.optim.SGD(model.parameters(), lr=0.1), step


def make_vgg(batch: int = 8, image_size: int = 224) -> Job:
    """VGG-16, whose first layers have the largest activations."""
    torch.manual_seed(0)
    model = import_package("torchvision").models.vgg16()
    images, labels = torch.randn(batch, 3, image_size, image_size), torch.randint(1000, (batch,))

    def step() -> None:
        functional.cross_entropy(model(images), labels).backward()

    return model, torch.optim.SGD(model.parameters(), lr=0.01), step


CASES: dict[str, tuple[Callable[[], Job], str]] = {
    "language model head": (make_head, "160MB"),
    "vgg16": (make_vgg, "250MB"),
}


def run(make: Callable[[], Job], budget: str | None, steps: int) -> dict[str, Any]:
    """Train, and return seconds and bytes moved of each step, and a digest of the parameters."""
    model, optimizer, step = make()
    seconds, moved = [], []

    def train() -> None:
        torch.manual_seed(0)  # dropout draws the same numbers in each step
        step()
        optimizer.step()
        optimizer.zero_grad()

    if budget is None:
        for _ in range(steps):
            train()
    else:
        with elbowroom.fit(model, optimizer, budget, mode="dynamic") as room:
            for _ in range(steps):
                begin = time.perf_counter()
                with room.step():
                    train()
                seconds.append(time.perf_counter() - begin)
                metrics = room.metrics()
                moved.append(int(metrics["offloaded_bytes"] + metrics["reloaded_bytes"]))
            assert room.metrics()["max_peak_bytes"] <= parse_bytes(budget)
    digest = hashlib.sha256()
    for each in model.parameters():
        digest.update(each.detach().numpy().tobytes())
    return {"seconds": seconds[WARM:], "moved_bytes": moved[WARM:], "digest": digest.hexdigest()}


def main() -> None:
    """Run all cases and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(CASES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output")
    options = parser.parse_args()
    results = []
    for name, (make, budget) in CASES.items():
        if options.only not in (None, name):
            continue
        ran: dict[str, int] = {}

        def note(
            self: SlicedStretch, ran: dict[str, int] = ran, whole: Callable[[SlicedStretch], None] = SlicedStretch.run
        ) -> None:
            names = " + ".join(op.call.op._schema.name.removeprefix("aten::") for op in self.ops)
            whole(self)
            if len(self.ops) > 1:
                ran[names] = ran.get(names, 0) + 1

        plain = run(make, None, options.steps)
        with mock.patch.object(WaitingOps, "begin", return_value=None):
            apart = run(make, budget, options.steps)
        with mock.patch.object(SlicedStretch, "run", note):
            together = run(make, budget, options.steps)
        assert plain["digest"] == apart["digest"] == together["digest"], "the parameters differ"
        found = {
            "case": name, "budget_bytes": parse_bytes(budget), "stretches": ran, "same_bits": True,
            "moved_bytes": {"apart": apart["moved_bytes"][-1], "together": together["moved_bytes"][-1]},
            "seconds": {"apart": apart["seconds"], "together": together["seconds"]},
        }  # fmt: skip
        results.append(found)
        medians = [statistics.median(each["seconds"]) for each in (apart, together)]
        print(
            f"{name} within {budget}: moves {format_bytes(apart['moved_bytes'][-1])} -> "
            f"{format_bytes(together['moved_bytes'][-1])} a step, {medians[0]:.2f} -> {medians[1]:.2f} s; "
            f"{', '.join(f'{each} {count}' for each, count in ran.items()) or 'no stretch'}",
            flush=True,
        )
    if options.output:
        write_results(options.output, results)


if __name__ == "__main__":
    main()

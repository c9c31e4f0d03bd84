"""Do all budgets work above the smallest one that does, with the same bits, in every step?

    python benchmarks/budget_scan.py [--only NAME ...] [--shares 1.02 0.9 ...] [--steps 10] [--output FILE.json]
        [--check]

Small jobs of many kinds train within many shares of their plain peak. What must not happen at any: other losses,
parameters, buffers or optimizer state than plain training has; a step that takes more than the budget, by a meter that
stands before PyTorch's allocator; an error other than `Infeasible`; a thread or open file that stays. What should not:
a step that is refused after others have run ("late"), and a budget that is refused although a smaller one works
("gap"). --check makes the former an exit code of 1.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import torch
from state_exactness import make_gpt2, make_mixtral, make_mobilenet, make_vit
from torch import nn
from torch.nn import functional
from writing import write_results

import elbowroom
from elbowroom.errors import Infeasible
from tests.native.outside_meter import register_meter

SHARES = (1.02, 1.0, 0.96, 0.92, 0.88, 0.83, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4, 0.36, 0.32, 0.28, 0.24, 0.2)
EVERY = 4
"""Of so many steps, the last is of another kind in jobs whose steps vary."""

Step = Callable[[int], torch.Tensor]
Job = tuple[nn.Module, torch.optim.Optimizer, Step]


def _seed(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


def make_convolutions() -> nn.Module:
    """Make a small network with batch norm, whose first ops are its largest."""
    blocks: list[nn.Module] = []
    for wide, channels in ((3, 16), (16, 16), (16, 32)):
        blocks += [nn.Conv2d(wide, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    blocks.insert(6, nn.MaxPool2d(2))
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))


class Recurrent(nn.Module):
    """A language model with LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(2000, 64), nn.Linear(128, 2000)
        self.layers = nn.LSTM(64, 128, 2, dropout=0.2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        logits: torch.Tensor = self.head(self.layers(self.embedding(tokens))[0])
        return logits


def image_loss(model: nn.Module, index: int, images: int = 16, size: int = 48) -> torch.Tensor:
    """Return the loss of a classifier of images."""
    labels = torch.randint(0, 10, (images,), generator=_seed(index + 77))
    return functional.cross_entropy(model(torch.randn(images, 3, size, size, generator=_seed(index))), labels)


def token_loss(model: nn.Module, index: int, texts: int = 4) -> torch.Tensor:
    """Return the loss of a language model of transformers."""
    tokens = torch.randint(0, 1024, (texts, 64), generator=_seed(index))
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def next_token_loss(model: nn.Module, index: int) -> torch.Tensor:
    """Return the loss of `Recurrent`."""
    tokens = torch.randint(0, 2000, (8, 33), generator=_seed(index))
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make_job(
    make: Callable[[], nn.Module],
    find_loss: Callable[[nn.Module, int], torch.Tensor],
    *,
    accumulate: int = 1,
    is_autocast: bool = False,
    evaluate: Callable[[nn.Module, int], torch.Tensor] | None = None,
    **options: Any,
) -> Job:
    """Return a model, its optimizer and its step.

    Args:
        accumulate: backward passes a step.
        evaluate: called without gradients in every `EVERY`-th step.
        options: of AdamW.
    """
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, **options)
    torch.manual_seed(1)  # for dropout

    def step(index: int) -> torch.Tensor:
        if evaluate is not None and index % EVERY == EVERY - 1:
            model.eval()
            with torch.no_grad():
                evaluate(model, index)
            model.train()
        total = torch.zeros(())
        for part in range(accumulate):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
                loss = find_loss(model, index * accumulate + part).float()
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return model, optimizer, step


def _vary(usual: int, last: int) -> Callable[[int], int]:
    return lambda index: last if index % EVERY == EVERY - 1 else usual


JOBS: dict[str, Callable[[], Job]] = {
    "convolutions": lambda: make_job(make_convolutions, image_loss),
    "convolutions, autocast": lambda: make_job(make_convolutions, image_loss, is_autocast=True, foreach=True),
    "convolutions, small last batch": lambda: make_job(
        make_convolutions, lambda model, index: image_loss(model, index, _vary(16, 7)(index))
    ),
    "convolutions, large last batch": lambda: make_job(
        make_convolutions, lambda model, index: image_loss(model, index, _vary(16, 20)(index))
    ),
    "MobileNet-v3": lambda: make_job(make_mobilenet, lambda model, index: image_loss(model, index, 8, 64)),
    "ViT": lambda: make_job(make_vit, lambda model, index: image_loss(model, index, 8, 64), fused=True),
    "ViT, autocast": lambda: make_job(make_vit, lambda model, index: image_loss(model, index, 8, 64), is_autocast=True),
    "GPT-2": lambda: make_job(make_gpt2, token_loss),
    "GPT-2, accumulate 3": lambda: make_job(make_gpt2, token_loss, accumulate=3),
    "GPT-2, evaluation": lambda: make_job(
        make_gpt2, token_loss, evaluate=lambda model, index: token_loss(model, index, 6)
    ),
    "GPT-2, large last batch": lambda: make_job(
        make_gpt2, lambda model, index: token_loss(model, index, _vary(4, 5)(index))
    ),
    "Mixtral": lambda: make_job(make_mixtral, token_loss),
    "LSTM": lambda: make_job(Recurrent, next_token_loss),
}


def take_result(job: Job, losses: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of all that training has changed."""
    model, optimizer, _ = job
    found = {name: each.detach().clone() for name, each in model.state_dict(keep_vars=True).items()}
    for position, state in enumerate(optimizer.state.values()):
        found |= {f"{position}: {key}": each.clone() for key, each in state.items() if isinstance(each, torch.Tensor)}
    return found | {f"loss {index}": loss for index, loss in enumerate(losses)}


def count_open() -> int:
    """Return threads and open files of this process."""
    gc.collect()
    return threading.active_count() + len(os.listdir("/proc/self/fd"))


def run_plain(make: Callable[[], Job], steps: int, meter: Any) -> tuple[int, float, dict[str, torch.Tensor]]:
    """Return the peak of plain training, its seconds per step, and its result."""
    gc.collect()
    base_bytes = meter.reset_peak()
    job = make()
    losses, seconds = [], []
    for index in range(steps):
        begin = time.perf_counter()
        losses.append(job[2](index))
        seconds.append(time.perf_counter() - begin)
    return meter.read_peak() - base_bytes, statistics.median(seconds), take_result(job, losses)


def run_within(
    make: Callable[[], Job], budget_bytes: int, steps: int, expected: dict[str, torch.Tensor], profile: Any, meter: Any
) -> dict[str, Any]:
    """Train within a budget. Return what happened.

    The peak is that of steps that begin within the budget: a model that is larger leaves in the first one.
    """
    before = count_open()
    base_bytes = meter.reset_peak()
    row: dict[str, Any] = {"budget_bytes": budget_bytes, "outcome": "works", "seconds": [], "peak_bytes": 0}
    try:
        job = make()
        losses = []
        with elbowroom.fit(job[0], job[1], budget_bytes, profile=profile) as room:
            for index in range(steps):
                begin, begin_bytes = time.perf_counter(), meter.reset_peak() - base_bytes
                with room.step():
                    losses.append(job[2](index))
                row["seconds"].append(time.perf_counter() - begin)
                if begin_bytes <= budget_bytes:
                    row["peak_bytes"] = max(row["peak_bytes"], meter.read_peak() - base_bytes)
            row["modes"] = "".join(record.mode[0] for record in room.journal().steps)
        found = take_result(job, losses)
        if found.keys() != expected.keys() or not all(torch.equal(found[key], expected[key]) for key in found):
            row["outcome"] = "wrong"
    except Infeasible as error:
        row |= {"outcome": "late" if row["seconds"] else "refused", "error": str(error)[:300]}
    except Exception as error:
        row |= {"outcome": "error", "error": f"{type(error).__name__}: {error}"[:300]}
    if row["peak_bytes"] > budget_bytes:
        row["outcome"] = "over"
    room = job = losses = found = None  # type: ignore[assignment]
    row["left_open"] = max(0, count_open() - before)
    return row


def find_gaps(rows: list[dict[str, Any]]) -> list[float]:
    """Return the shares that are refused, or late, although a smaller one works."""
    least = min((row["share"] for row in rows if row["outcome"] == "works"), default=max(SHARES))
    return [row["share"] for row in rows if row["outcome"] in ("refused", "late") and row["share"] > least]


def scan(name: str, shares: list[float], steps: int, profile: Any, meter: Any) -> dict[str, Any]:
    """Run one job within all budgets, and print a line for each."""
    peak_bytes, plain_seconds, expected = run_plain(JOBS[name], steps, meter)
    print(f"{name}: plain peak {peak_bytes / 1e6:.2f} MB, {1e3 * plain_seconds:.0f} ms a step", flush=True)
    rows = []
    for share in sorted(shares, reverse=True):
        row = {"share": share} | run_within(JOBS[name], int(share * peak_bytes), steps, expected, profile, meter)
        rows.append(row)
        slower = statistics.median(row["seconds"][-3:]) / plain_seconds if row["seconds"] else 0.0
        open_ = f", {row['left_open']} left open" if row["left_open"] else ""
        print(f"  {share:5.2f} {row['outcome']:8} {row.get('modes', ''):12} {slower:6.1f} x plain{open_}", flush=True)
    gaps = find_gaps(rows)
    if gaps:
        print(f"  gaps: {gaps}")
    return {"job": name, "plain_peak_bytes": peak_bytes, "plain_seconds": plain_seconds, "gaps": gaps, "rows": rows}


def main() -> None:
    """Scan all jobs, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(JOBS), choices=list(JOBS), metavar="NAME")
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    logging.getLogger("elbowroom").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    profile = elbowroom.probe("cpu")
    meter = register_meter()
    results = []
    for name in given.only:
        results.append(scan(name, given.shares, given.steps, profile, meter))
        write_results(given.output, results)
    outcomes = [row["outcome"] for each in results for row in each["rows"]]
    counts = {each: outcomes.count(each) for each in ("works", "refused", "late", "over", "wrong", "error")}
    left_open = sum(row["left_open"] > 0 for each in results for row in each["rows"])
    print(f"{len(outcomes)} trainings: {counts}; gaps {sum(len(each['gaps']) for each in results)}; open {left_open}")
    if given.check and (counts["over"] or counts["wrong"] or counts["error"] or left_open):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

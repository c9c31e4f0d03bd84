"""How far below the working set of its largest op does a step run, in slices, and what does that cost?

    python benchmarks/slices.py [--model vgg16] [--batch 16] [--budgets 600MB 400MB] [--steps 3] [--output FILE]
        [--tokens 512] [--update default] [--no-limit]

Prints the smallest budget for whole ops (`elbowroom.smallest_budget`), and for each budget, in a process of its own:
the seconds of the last step, the peak, the ops that ran in slices, and whether parameters and optimizer state have the
bits of the plain run. With `--inexact`, slices may change the order of sums (`exact=False`), and the largest difference
of a parameter is printed. The smallest budget also runs under a limit on data size (`RLIMIT_DATA`), set after the first
step, before which the model itself takes more: what the process had before the model, the budget and 5 % of it. Plain
PyTorch runs under the same limit, and is expected to die. `--update foreach` or `fused`: how the optimizer updates.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import pathlib
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import torch
from processes import PartFailed, run_apart
from resident_limit import read_status, warm_up
from state_limit import SLACK, hash_state
from writing import write_results

import elbowroom
from elbowroom.units import format_bytes, parse_bytes
from elbowroom.workloads._packages import import_package

Step = Callable[[int], torch.Tensor]

BATCHES = {"vgg16": 16, "resnet50": 16, "gpt2": 2, "vit_b_16": 8}


UPDATES: dict[str, dict[str, bool]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
"""Options of optimizers."""


def make(name: str, batch: int, tokens: int, update: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, Step]:
    """Return a model with fixed parameters, its optimizer and its step, which returns the loss."""
    torch.manual_seed(0)
    how = UPDATES[update]
    if name == "gpt2":
        transformers = import_package("transformers")
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **how)
    else:
        model = getattr(import_package("torchvision").models, name)()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **how)

    def step(index: int) -> float:
        torch.manual_seed(100 + index)
        if name == "gpt2":
            ids = torch.randint(0, 50257, (batch, tokens))
            loss = model(input_ids=ids, labels=ids).loss
        else:
            images = torch.randn(batch, 3, 224, 224)
            loss = torch.nn.functional.cross_entropy(model(images), torch.randint(0, 1000, (batch,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def measure(options: argparse.Namespace, budget_bytes: int, *, is_limited: bool) -> dict[str, Any]:
    """Train within a budget, in this process; 0 for plain PyTorch."""
    import_package("transformers"), import_package("torchvision")
    warm_up()
    (data_bytes,) = read_status("VmData")
    model, optimizer, step = make(options.model, options.batch, options.tokens, options.update)
    room = elbowroom.fit(model, optimizer, budget_bytes or "1TiB", exact=not options.inexact)
    losses, seconds = [], []
    for index in range(options.steps):
        begin = time.perf_counter()
        if budget_bytes:
            with room.step():
                losses.append(step(index))
        else:
            losses.append(step(index))
        seconds.append(time.perf_counter() - begin)
        if is_limited and index == 0:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            limit_bytes = data_bytes + int((1 + SLACK) * parse_bytes(os.environ["SLICES_LIMIT"]))
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found: dict[str, Any] = {"losses": list(map(float, losses)), "all_seconds": seconds}
    found["digest"] = hash_state(model, optimizer)
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    path = pathlib.Path(os.environ["SLICES_FOLDER"], "plain.pt")
    if not budget_bytes and not is_limited:
        torch.save(weights, path)
    else:
        found["largest_difference"] = float((weights - torch.load(path)).abs().max())
    if budget_bytes:
        records = room.journal().steps
        found["peak_bytes"] = max(record.peak_bytes or 0 for record in records)
        found["sliced"] = dict(room._metering.sliced.counts)
        found["offloaded_bytes"], found["reloaded_bytes"] = records[-1].offloaded_bytes, records[-1].reloaded_bytes
    return found


def describe(row: dict[str, Any], plain: dict[str, Any]) -> str:
    """Return one line."""
    limit = " (hard limit)" if row["is_limited"] else ""
    what = f"{format_bytes(row['budget_bytes'])}{limit}" if row["budget_bytes"] else f"plain{limit}"
    if "failed" in row:
        return f"{what}: died: {row['failed'][:200]}"
    text = f"{what}: last step {row['all_seconds'][-1]:.2f} s"
    if row["budget_bytes"]:
        text += f", {row['all_seconds'][-1] / plain['all_seconds'][-1]:.2f} of plain"
        text += f", peak {format_bytes(row['peak_bytes'])}"
        text += f"; {sum(row['sliced'].values())} ops in slices, moves {format_bytes(row['offloaded_bytes'])} out"
        same = row["digest"] == plain["digest"]
        text += "; same bits" if same else f"; parameters differ by up to {row['largest_difference']:.1e}"
    return text


def main() -> None:
    """Run plain PyTorch and each budget, print a line for each, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(BATCHES), default="vgg16")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--budgets", nargs="+", default=["600MB", "400MB"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--update", choices=list(UPDATES), default="default")
    parser.add_argument("--inexact", action="store_true")
    parser.add_argument("--no-limit", action="store_true", help="without the runs under a hard limit")
    parser.add_argument("--part", nargs=2, metavar=("BYTES", "LIMITED"), help="one part, in this process")
    parser.add_argument("--floor", action="store_true", help="the smallest budget for whole ops, in this process")
    parser.add_argument("--output")
    options = parser.parse_args()
    options.batch = options.batch or BATCHES[options.model]
    if options.floor:
        model, optimizer, step = make(options.model, options.batch, options.tokens, options.update)
        print(json.dumps({"floor_bytes": elbowroom.smallest_budget(model, optimizer, lambda: step(0))}), flush=True)
        return
    if options.part:
        budget_bytes, is_limited = map(int, options.part)
        print(json.dumps(measure(options, budget_bytes, is_limited=bool(is_limited))), flush=True)
        os._exit(0)  # the state may not fit, so that nothing can be brought back
    budgets = [parse_bytes(text) for text in options.budgets]
    shared = ["--model", options.model, "--batch", options.batch, "--steps", options.steps]
    shared += ["--tokens", options.tokens, "--update", options.update]
    floor = run_apart(__file__, *shared, "--floor")["floor_bytes"]
    print(f"{options.model}, batch {options.batch}: whole ops need {format_bytes(floor)}", flush=True)
    results: list[dict[str, Any]] = []
    parts = [(0, False), *((each, False) for each in budgets)]
    parts += [] if options.no_limit else [(min(budgets), True), (0, True)]
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"SLICES_LIMIT": str(min(budgets)), "SLICES_FOLDER": folder}
        for budget_bytes, is_limited in parts:
            row: dict[str, Any] = {"model": options.model, "batch": options.batch, "update": options.update}
            row |= {"floor_bytes": floor, "budget_bytes": budget_bytes, "is_limited": is_limited}
            exactness = ["--inexact"] if options.inexact else []
            try:
                row |= run_apart(__file__, *shared, *exactness, "--part", budget_bytes, int(is_limited))
            except PartFailed as error:
                row["failed"] = str(error).strip().splitlines()[-1]
            results.append(row)
            print(describe(row, results[0]), flush=True)
            write_results(options.output, results)


if __name__ == "__main__":
    main()

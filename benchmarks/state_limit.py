"""How small a budget trains a model whose state is several times as large, and what does that cost?

    python benchmarks/state_limit.py [--model gpt2-medium] [--budgets 5GB 3GB 1.5GB] [--steps 6] [--output FILE.json]

GPT-2 with AdamW in fp32, batch 1, sequence 128: model state (parameters, gradients, optimizer state) is almost all
that a step needs. Each budget is a process of its own. `seconds`: median of the planned steps; `link_seconds`: bytes
moved in one step over the rates of the link to the spill file, which no plan can go below once the link is the limit.
`digest`: of all parameters and optimizer state after the last step; all processes must agree with the plain one.

The smallest budget also runs under a limit on data size (`RLIMIT_DATA`), set once the model is made, whose making takes
more for a moment: what the process had before that, the budget and 5 % of it. Plain PyTorch runs under the same limit,
and is expected to die.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import os
import pathlib
import resource
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import torch
from processes import PartFailed, run_apart
from resident_limit import read_status, warm_up
from writing import write_results

import elbowroom
from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.ir.journal import Mode
from elbowroom.units import format_bytes, parse_bytes
from elbowroom.workloads._packages import import_package

SIZES = {"gpt2": {}, "gpt2-medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16}}
SLACK = 0.05
CHUNK = 1 << 20


def make(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model with fixed parameters, and its optimizer."""
    transformers = import_package("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **SIZES[name]))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def run_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, index: int) -> float:
    """Train on one batch. Return the loss."""
    torch.manual_seed(100 + index)
    tokens = torch.randint(0, 50257, (1, 128))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def hash_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of parameters and optimizer state, a few MiB at a time."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter, *optimizer.state[parameter].values()):
            for part in tensor.detach().flatten().split(CHUNK):
                found.update(part.clone().numpy())
    return found.hexdigest()


def measure(name: str, budget_bytes: int, steps: int, *, is_limited: bool) -> dict[str, Any]:
    """Train within a budget, in this process; 0 for plain PyTorch."""
    import_package("transformers")
    warm_up()
    (data_bytes,) = read_status("VmData")
    model, optimizer = make(name)
    room = elbowroom.fit(model, optimizer, budget_bytes or "1TiB")
    if is_limited:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        limit_bytes = data_bytes + int((1 + SLACK) * parse_bytes(os.environ["STATE_LIMIT"]))
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.RLIM_INFINITY))
    losses, seconds = [], []
    for index in range(steps):
        begin = time.perf_counter()
        if budget_bytes:
            with room.step():
                losses.append(run_step(model, optimizer, index))
        else:
            losses.append(run_step(model, optimizer, index))
        seconds.append(time.perf_counter() - begin)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found: dict[str, Any] = {"losses": losses, "all_seconds": seconds, "digest": hash_state(model, optimizer)}
    if not budget_bytes:
        found["seconds"] = statistics.median(seconds[2:])
        return found
    records = room.journal().steps
    planned = [index for index, record in enumerate(records) if record.mode is Mode.PLANNED]
    last = records[-1]
    link = room.planned.costs.link if room.planned is not None else None
    found |= {
        "seconds": statistics.median(seconds[index] for index in planned) if planned else None,
        "modes": [str(record.mode) for record in records],
        "peak_bytes": max(record.peak_bytes or 0 for record in records),
        "offloaded_bytes": last.offloaded_bytes,
        "reloaded_bytes": last.reloaded_bytes,
        "stall_seconds": last.stall_seconds,
    }
    if link is not None and room.planned is not None:
        found["forecast_seconds"] = room.planned.forecast.step_seconds
        out_seconds = offload_seconds(link, last.offloaded_bytes)
        found["link_seconds"] = out_seconds + reload_seconds(link, last.reloaded_bytes)
    return found


def describe(row: dict[str, Any], plain: dict[str, Any]) -> str:
    """Return one line."""
    limit = " (hard limit)" if row["is_limited"] else ""
    what = f"{format_bytes(row['budget_bytes'])}{limit}" if row["budget_bytes"] else f"plain{limit}"
    if "failed" in row:
        return f"{what}: died: {row['failed'][:100]}"
    text = f"{what}: {row['seconds']:.2f} s a step"
    if row["budget_bytes"]:
        text += (
            f", {row['seconds'] / plain['seconds']:.2f} of plain, peak {format_bytes(row['peak_bytes'])}; moves "
            f"{format_bytes(row['offloaded_bytes'])} out and {format_bytes(row['reloaded_bytes'])} back, "
            f"{row.get('link_seconds', 0.0):.2f} s of the link"
        )
    return text + ("" if row["digest"] == plain["digest"] else "; DIFFERENT RESULTS")


def main() -> None:
    """Run plain PyTorch and each budget, print a line for each, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SIZES), default="gpt2-medium")
    parser.add_argument("--budgets", nargs="+", default=["5GB", "4GB", "3GB", "2GB", "1.5GB"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--part", nargs=2, metavar=("BYTES", "LIMITED"), help="one part, in this process")
    parser.add_argument("--output")
    options = parser.parse_args()
    if options.part:
        budget_bytes, is_limited = map(int, options.part)
        print(json.dumps(measure(options.model, budget_bytes, options.steps, is_limited=bool(is_limited))), flush=True)
        os._exit(0)  # the state does not fit, so that nothing can be brought back
    budgets = [parse_bytes(text) for text in options.budgets]
    os.environ["STATE_LIMIT"] = str(min(budgets))
    results: list[dict[str, Any]] = []
    parts = [(0, False), *((each, False) for each in budgets), (min(budgets), True), (0, True)]
    for budget_bytes, is_limited in parts:
        row: dict[str, Any] = {"model": options.model, "budget_bytes": budget_bytes, "is_limited": is_limited}
        arguments = ("--model", options.model, "--steps", options.steps)
        try:
            row |= run_apart(__file__, *arguments, "--part", budget_bytes, int(is_limited))
        except PartFailed as error:
            row["failed"] = str(error).strip().splitlines()[-1]
        results.append(row)
        print(describe(row, results[0]), flush=True)
        write_results(options.output, results)


if __name__ == "__main__":
    main()

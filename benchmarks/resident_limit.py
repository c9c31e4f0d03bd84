"""Does a job stay within its budget by what the system counts? Resident memory, under a hard limit on data size.

    python benchmarks/resident_limit.py [--only NAME ...] [--rounds 5] [--output FILE.json]

Each model runs twice, each time in a process of its own.

The first one finds the plain step's peak; the budget is a share of that. Then a plain step and a step in a room take
turns, with the same allocator, which keeps its pages from one to the next. `ratio`: the median of the rounds' seconds
in the room over plain ones; `processor_ratio`: the same of the processor time of all threads, which is less noisy where
other jobs run. No rounds, no ratios.

The second one first makes a step of a small model of the same kind, and trains a small chain of layers within a budget,
so that code and libraries are loaded and loops are compiled: `own_bytes` are resident then, without any model. From
then on the process may have the data that it has at that moment, the budget and 5 % of it (`RLIMIT_DATA`). It builds
the model, makes a room and trains. `resident_bytes`: the highest resident memory from then on, beyond `own_bytes`: the
model, and all that the room keeps for itself, are in it. `cold_bytes`: the same, beyond a process that has made the
small step and no room. `arena_bytes`: the most that was mapped in the arena; `peak_bytes`: what the ledger counted;
`page_faults`: of the last step.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import pathlib
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import torch
from processes import PartFailed, count_faults, run_apart
from writing import write_results

import elbowroom
from elbowroom.hooks.cpu_ledger import CpuLedger
from elbowroom.hooks.meter import read_resident_peak, reset_resident_peak
from elbowroom.native import library
from elbowroom.units import format_bytes
from elbowroom.workloads import Workload, build

SMALL_IMAGE = {"batch": 2, "image_size": 64}
SPECS: dict[str, dict[str, Any]] = {
    "resnet50": {"spec": "torchvision:resnet50", "batch": 16, "share": 0.5, "small": SMALL_IMAGE},
    "gpt2": {
        "spec": "transformers:gpt2",
        "batch": 4,
        "sequence_length": 256,
        "share": 0.8,
        "small": {"batch": 2, "sequence_length": 64, "layers": 2},
    },
    "efficientnet_b0": {"spec": "torchvision:efficientnet_b0", "batch": 16, "share": 0.5, "small": SMALL_IMAGE},
    "mobilenet_v3_large": {"spec": "torchvision:mobilenet_v3_large", "batch": 32, "share": 0.6, "small": SMALL_IMAGE},
    "vit_b_16": {
        "spec": "torchvision:vit_b_16",
        "batch": 8,
        "optimizer": "sgd",
        "share": 0.7,
        "small": {"batch": 1},
    },
    "unet": {"spec": "benchmarks.unet:build", "batch": 2, "image_size": 256, "share": 0.6, "small": SMALL_IMAGE},
    "lstm": {"spec": "benchmarks.resident_limit:make_lstm", "batch": 64, "share": 0.6, "small": {"batch": 4}},
}
SLACK = 0.05
STEPS = 6


def make_lstm(batch: int = 64) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """A language model of two recurrent layers, unrolled over 128 tokens."""
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(5000, 256), torch.nn.LSTM(256, 512, 2, batch_first=True), torch.nn.Linear(512, 5000)]
    embedding, recurrent, head = layers
    model = torch.nn.ModuleList(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(5000, (batch, 129))

    def step() -> torch.Tensor:
        hidden, _ = recurrent(embedding(tokens[:, :-1]))
        loss = torch.nn.functional.cross_entropy(head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def make(name: str, *, is_small: bool = False) -> Workload:
    """A workload, or a small one of the same kind."""
    spec = {key: value for key, value in SPECS[name].items() if key not in ("share", "small")}
    return build(**{**spec, **(SPECS[name]["small"] if is_small else {})})


def read_status(*names: str) -> list[int]:
    """Figures of this process in bytes, from /proc/self/status."""
    lines = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return [int(lines[name].split()[0]) << 10 for name in names]


def measure_peak(workload: Workload) -> int:
    """The peak of a plain step with what is there before, by the ledger."""
    ledger = CpuLedger()
    ledger.adopt(workload.model.parameters())
    ledger.adopt(workload.model.buffers())
    ledger.adopt(workload.batch.values())
    states = workload.optimizer.state.values()
    ledger.adopt(each for state in states for each in state.values() if isinstance(each, torch.Tensor))
    workload.step()
    peak_bytes = int(ledger.scope.peak_bytes)
    ledger.close()
    return peak_bytes


def measure_pairs(name: str, rounds: int) -> dict[str, Any]:
    """Seconds of plain steps and of steps in a room, in this process."""
    plain = make(name)
    for _ in range(2):
        plain.step()
    peak_bytes = measure_peak(plain)
    budget_bytes = int(peak_bytes * SPECS[name]["share"])
    found: dict[str, Any] = {"plain_peak_bytes": peak_bytes, "budget_bytes": budget_bytes}
    if not rounds:
        return found
    CpuLedger().scope.limit_bytes = 1 << 50  # while there is this limit nobody gives back the plain step's pages
    workload = make(name)
    room = elbowroom.fit(workload.model, workload.optimizer, budget_bytes)

    def step_in_room() -> None:
        with room.step():
            workload.step()

    for _ in range(4):
        step_in_room()
    taken: dict[str, list[tuple[float, float]]] = {"plain": [], "room": []}
    for _ in range(rounds):
        for label, step in (("plain", plain.step), ("room", step_in_room)):
            begin, before = time.perf_counter(), time.process_time()
            step()
            taken[label].append((time.perf_counter() - begin, time.process_time() - before))
    room.detach()
    pairs = list(zip(taken["room"], taken["plain"], strict=True))
    return found | {
        "seconds": {label: [each[0] for each in steps] for label, steps in taken.items()},
        "ratio": statistics.median(ours[0] / base[0] for ours, base in pairs),
        "processor_ratio": statistics.median(ours[1] / base[1] for ours, base in pairs),
    }


def warm_up() -> None:
    """Train a chain of small layers within a budget that needs a plan, and leave nothing of it."""
    layers = [layer for _ in range(20) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with elbowroom.fit(model, optimizer, "20MiB") as room:  # of 41
        for _ in range(4):
            with room.step():
                model(torch.randn(4096, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert room.planned is not None and room.planned.plan.decisions


def measure_resident(name: str, budget_bytes: int) -> dict[str, Any]:
    """Train within a budget and under a hard limit, in this process."""
    make(name, is_small=True).step()
    gc.collect()
    (cold_bytes,) = read_status("VmRSS")
    warm_up()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    arena = library.load().get_arena()
    arena.reset_peaks()
    own_bytes, data_bytes = read_status("VmRSS", "VmData")
    mapped_bytes = arena.statistics()["mapped_bytes"]
    limit_bytes = data_bytes + int(budget_bytes * (1 + SLACK))
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    workload = make(name)
    reset_resident_peak()
    highest_bytes = 0
    with elbowroom.fit(workload.model, workload.optimizer, budget_bytes) as room:
        for _ in range(STEPS):
            highest_bytes = max(highest_bytes, read_resident_peak())  # each step's meter lets the mark begin anew
            faults = count_faults()
            with room.step():
                workload.step()
            faults = count_faults() - faults
        highest_bytes = max(highest_bytes, *(record.resident_bytes or 0 for record in room.journal().steps))
        records = room.journal().steps
    return {
        "own_bytes": own_bytes,
        "limit_bytes": limit_bytes - data_bytes,
        "resident_bytes": highest_bytes - own_bytes,
        "cold_bytes": highest_bytes - cold_bytes,
        "arena_bytes": arena.statistics()["mapped_peak_bytes"] - mapped_bytes,
        "peak_bytes": max(record.peak_bytes or 0 for record in records),
        "page_faults": faults,
        "modes": [str(record.mode) for record in records],
        "within": highest_bytes - own_bytes <= budget_bytes * (1 + SLACK),
    }


def describe(row: dict[str, Any]) -> str:
    """One line."""
    if "failed" in row:
        return f"{row['name']}: FAILED: {row['failed']}"
    budget_bytes, ratio = row["budget_bytes"], ""
    if "ratio" in row:
        ratio = f", step {row['ratio']:.3f} of plain (of processor time {row['processor_ratio']:.3f})"
    return (
        f"{row['name']:20} budget {format_bytes(budget_bytes):>10}, resident "
        f"{row['resident_bytes'] / budget_bytes:.3f} of it (with libraries {row['cold_bytes'] / budget_bytes:.3f}), "
        f"peak {row['peak_bytes'] / budget_bytes:.3f}, {row['page_faults']} page faults{ratio}"
        f"{'' if row['within'] else ', NOT WITHIN'}"
    )


def main() -> None:
    """Run each model twice, print a line for each, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SPECS), default=list(SPECS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", nargs=2, metavar=("NAME", "BUDGET"), help="one part, here; 0: the pairs")
    parser.add_argument("--output")
    options = parser.parse_args()
    if options.part:
        name, budget_bytes = options.part[0], int(options.part[1])
        found = measure_resident(name, budget_bytes) if budget_bytes else measure_pairs(name, options.rounds)
        print(json.dumps(found))
        return
    results = []
    for name in options.only:
        row: dict[str, Any] = {"name": name, "batch": SPECS[name]["batch"]}
        try:
            row.update(run_apart(__file__, "--part", name, 0, "--rounds", options.rounds))
            row.update(run_apart(__file__, "--part", name, row["budget_bytes"]))
        except PartFailed as error:
            row["failed"] = str(error)
        print(describe(row), flush=True)
        results.append(row)
        write_results(options.output, results)


if __name__ == "__main__":
    main()

"""Does a room change the bits of random programs, or let them take more than their budget?

    python benchmarks/random_programs.py [--programs 1000] [--first 0] [--seconds 60] [--minutes 30]
        [--output FILE.json] [--check]

A program is a random sequence of ops (`random_ops.py`): views and writes to them, `out=`, `.data`, dropout,
checkpoints, double and repeated backward passes, hooks, threads, convolutions, recurrent layers, indexing, failing ops.
It is trained for some steps without a room, and then in rooms: in dynamic ones of several budgets, in two that capture
and plan their steps, one of them with a limited tier below, and in two in which everything that may leave does so at
each allocation: what autograd has saved, and model state and all results of ops as well. Losses, gradients and
parameters have to be the same to the last bit, and in no step may the bytes that a meter outside of ours sees be more
than the budget: it stands before the allocator and counts what that hands out (`tests/native/outside_meter.cpp`).
`Infeasible`, `TierFull` and `Thrashing` are results as well, as long as the meter saw no more than the budget by then.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import pathlib
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from random_ops import Instruction, Model, run_program, write_program
from writing import write_results

import elbowroom
from elbowroom.errors import Infeasible, Thrashing, TierFull
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.native import library
from elbowroom.runtime import slice_choice
from elbowroom.slicing import probe

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.native import outside_meter  # noqa: E402
from tests.pressure import ask_at_every_request, let_everything_go, let_results_go  # noqa: E402

PLANNED_STEPS, OTHER_STEPS = 4, 2
HUGE = 1 << 40
REFUSALS = tuple(each.__name__ for each in (Infeasible, Thrashing, TierFull))
SHARES = (0.85, 0.6, 0.35)
"""Of what a plain step takes beside what is there before and after it: budgets."""
RESERVE_BYTES = 64 << 10
"""Of each budget, for what is so small that it never leaves."""


class Bench:
    """Runs programs, and meters them.

    Args:
        meter: the library that counts.
        profile: of this machine.
    """

    def __init__(self, meter: str, profile: HardwareProfile) -> None:
        library.load().make_scope().close()  # the ledger is registered, and the meter before it
        self._meter, self._profile = ctypes.CDLL(meter), profile
        self._meter.reset_peak.restype = self._meter.read_peak.restype = ctypes.c_int64
        self._meter.register_meter()
        for module in (probe, slice_choice):  # the meter would count files as memory
            module.memory_in_files = lambda folder: contextlib.nullcontext()  # type: ignore[attr-defined]

    def train(
        self, program: list[Instruction], seed: int, budget: int | None, steps: int, **options: Any
    ) -> dict[str, Any]:
        """Train a program for some steps; without a budget in no room."""
        gc.collect()
        base = self._meter.reset_peak()
        torch.manual_seed(seed)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        found: dict[str, Any] = {"values": [], "peaks": [], "rests": [], "error": "", "moved": 0, "modes": ""}
        room = None
        try:
            if budget is not None:
                room = elbowroom.fit(model, optimizer, budget, profile=self._profile, **options)
            for step in range(steps):
                found["rests"].append(self._meter.reset_peak() - base)
                try:
                    with room.step() if room is not None else contextlib.nullcontext():
                        loss = run_program(model, program, seed, step)
                        optimizer.step()
                finally:
                    found["peaks"].append(self._meter.read_peak() - base)
                values = [loss, *(each.grad for each in model.parameters()), *model.state_dict().values()]
                found["values"].append([keep(each) for each in values])
                optimizer.zero_grad()
        except Exception as error:
            found["error"] = type(error).__name__
            found["text"] = str(error)[:300]
        if room is not None:
            records = room.journal().steps
            found["moved"] = sum(each.offloaded_bytes + each.recomputed for each in records)
            found["modes"] = " ".join(each.mode.value for each in records)
            room.detach()
        return found


def keep(value: torch.Tensor | None) -> np.ndarray[Any, Any]:
    """Return a copy that no allocator of PyTorch's has made."""
    return np.empty(0) if value is None else value.detach().numpy().copy()


def is_same(one: list[Any], other: list[Any]) -> bool:
    """Whether two runs made the same as far as both went; one NaN is as good as another."""
    pairs = (pair for steps in zip(one, other, strict=False) for pair in zip(*steps, strict=True))
    return all(
        x.shape == y.shape and (x.tobytes() == y.tobytes() or np.array_equal(x, y, equal_nan=True)) for x, y in pairs
    )


def judge(plain: dict[str, Any], found: dict[str, Any], budget: int | None) -> list[str]:
    """Say what is wrong with a run in a room."""
    wrong = []
    is_refused = found["error"] in REFUSALS
    if not is_refused and found["error"] != plain["error"]:
        wrong.append(f"error: {plain['error']!r} became {found['error']}: {found.get('text')}")
    if not is_same(plain["values"], found["values"]):
        wrong.append("other bits")
    if budget is not None and max(found["peaks"], default=0) > budget:
        wrong.append(f"over: {max(found['peaks'])} of {budget} bytes, peaks {found['peaks']}, {found['modes']}")
    return wrong


def run_all_ways(bench: Bench, seed: int) -> list[dict[str, Any]]:
    """Run one program in all ways, and say what became of it."""
    program = write_program(seed)
    plain = bench.train(program, seed, None, PLANNED_STEPS)
    rest, peak = max(plain["rests"]), max(plain["peaks"])
    results = []

    def try_way(way: str, budget: int, is_metered: bool, steps: int = OTHER_STEPS, **options: Any) -> None:
        found = bench.train(program, seed, budget, steps, min_offload_bytes=1, **options)
        wrong = judge(plain, found, budget if is_metered else None)
        if "other bits" in wrong and not is_same(plain["values"], bench.train(program, seed, None, steps)["values"]):
            wrong = ["unstable without a room"]
        refused = found["error"] in REFUSALS
        results.append(
            {"program": seed, "way": way, "budget": budget, "refused": refused, "error": plain["error"],
             "moved": found["moved"], "modes": found["modes"], "wrong": wrong}
        )  # fmt: skip

    budgets = [rest + RESERVE_BYTES + int(share * (peak - rest)) for share in SHARES]
    for share, budget in list(zip(SHARES, budgets, strict=True))[seed % 2 : seed % 2 + 2]:
        policy = ("predictive", "dtr", "lru")[(seed + int(100 * share)) % 3]
        try_way(f"dynamic {share}", budget, True, mode="dynamic", policy=policy)
    strategy = ("auto:effort=0.1", "offload_all", "recompute_all")[seed % 3]
    try_way(f"planned {strategy}", budgets[seed // 3 % 2], True, PLANNED_STEPS, strategy=strategy)
    for part, name in enumerate(("nothing", "half", "all")):
        if seed % 3 == part:
            budget = budgets[seed // 3 % 3]
            below = max(0, peak - budget) * part // 2
            way = f"with room for {name} of the rest below"
            try_way(way, budget, True, PLANNED_STEPS, strategy="auto:effort=0.1", host_bytes=below)
    for way, make_room in (("pressed", let_everything_go), ("results", let_results_go)):
        with pytest.MonkeyPatch.context() as patch:
            ask_at_every_request(patch, make_room)
            try_way(way, HUGE, False, mode="dynamic", policy=("dtr", "lru")[seed % 2])
    return results


def work(options: argparse.Namespace) -> None:
    """Run programs, and print what became of each."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    bench = Bench(options.meter, elbowroom.load(HardwareProfile, options.profile))
    for seed in range(options.first, options.first + options.programs):
        if time.time() > options.stop_at:
            return
        faulthandler.dump_traceback_later(options.seconds, exit=True)
        results = run_all_ways(bench, seed)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"program": seed, "results": results}), flush=True)


def campaign(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all programs in a process of their own; where it dies, another one goes on behind."""
    results: list[dict[str, Any]] = []
    first, end = options.first, options.first + options.programs
    while first < end and time.time() < options.stop_at:
        command = [sys.executable, __file__, "--work", "--first", str(first), "--programs", str(end - first)]
        command += ["--profile", options.profile, "--meter", options.meter, "--seconds", str(options.seconds)]
        command += ["--stop-at", str(options.stop_at)]
        with (
            tempfile.TemporaryFile("w+") as said,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                read = json.loads(line)
                results += read["results"]
                first = read["program"] + 1
                for each in read["results"]:
                    if each["wrong"]:
                        print(f"program {each['program']}, {each['way']}: {each['wrong']}", flush=True)
            process.wait()
            said.seek(0)
            text = said.read()[-2000:].replace(str(ROOT), "").replace(sys.prefix, "")
        if process.returncode:
            print(f"program {first}: died: {text}", flush=True)
            results.append({"program": first, "way": "", "wrong": [f"died: {text}"]})
            first += 1
    return results


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--profile", help="of this machine; measured if left out")
    parser.add_argument("--seconds", type=float, default=120.0, help="that one program may take in all ways")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no other program begins")
    parser.add_argument("--output")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--meter", help=argparse.SUPPRESS)
    parser.add_argument("--stop-at", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return 0
    options.stop_at = time.time() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        options.meter = str(outside_meter.build(pathlib.Path(folder)))
        if options.profile is None:
            options.profile = str(pathlib.Path(folder) / "profile.json")
            elbowroom.save(elbowroom.probe(), options.profile)
        results = campaign(options)
    summary: Counter[tuple[str, str]] = Counter()
    for each in results:
        way = each["way"].split(":")[0]
        summary[way, "runs"] += 1
        summary[way, "refused"] += bool(each.get("refused"))
        summary[way, "moved"] += bool(each.get("moved"))
        summary[way, "failed without a room as well"] += bool(each.get("error"))
        for what in each["wrong"]:
            summary[way, what.split(":")[0]] += 1
    run = {"first": options.first, "programs": len({each["program"] for each in results})}
    print(f"{run['programs']} programs run, from {run['first']} on")
    counts = [{"way": way, "what": what, "count": count} for (way, what), count in sorted(summary.items())]
    for count in counts:
        print(f"{count['way']}: {count['count']} {count['what']}")
    write_results(options.output, [run, *counts, *(each for each in results if each["wrong"])])
    return 1 if options.check and any(each["wrong"] for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())

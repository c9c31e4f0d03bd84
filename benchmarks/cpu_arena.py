"""What does the CPU arena cost, and how much memory does the process take? Beside glibc's malloc in three settings.

    python benchmarks/cpu_arena.py [--only NAME] [--ways glibc arena] [--rounds 5] [--pairs 15] [--output FILE.json]

Plain PyTorch, no room: training steps with AdamW. `glibc`: as it comes; `kept` and `released`: as
`tune_allocator` sets it without and with `release_pages`; `arena`: blocks of 16 KiB and more from the
arena, the others from malloc. Each run is a process of its own, and ways take turns; ratios are taken round by round.

A run first makes a step of a small model of the same kind, so that code and libraries are loaded, and frees it. What is
resident then is the start. `resident_bytes` is the highest resident memory from then on, building the model included,
without the start; `file_bytes` of it are pages of files (code) that came later. `live_bytes` is the highest sum of the
arena's blocks, which is the same job's in every way. Seconds are medians over the steps after the first two;
`processor_seconds` are those of all threads, and less noisy where other jobs run.

Processes differ by some per cent. So `pairs` are steps in one process, in turn with the arena and without: what a step
takes beyond parameters and optimizer state comes from one or the other.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from processes import count_faults, run_apart
from writing import write_results

from elbowroom.workloads import build

SPECS: dict[str, dict[str, Any]] = {
    "resnet50": {"spec": "torchvision:resnet50", "batch": 8, "small": {"batch": 1, "image_size": 64}},
    "gpt2": {
        "spec": "transformers:gpt2",
        "batch": 2,
        "sequence_length": 256,
        "small": {"batch": 1, "sequence_length": 16, "layers": 1},
    },
    "efficientnet_b0": {"spec": "torchvision:efficientnet_b0", "batch": 16, "small": {"batch": 1, "image_size": 64}},
    "densenet121": {"spec": "torchvision:densenet121", "batch": 8, "small": {"batch": 1, "image_size": 64}},
}
WAYS = ("glibc", "kept", "released", "arena")
UNMEASURED_STEPS = 2

# malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
_LARGE_BLOCK_BYTES = 4 << 20
_KEPT_BYTES = (1 << 31) - (1 << 20)


def tune_allocator(*, release_pages: bool) -> bool:
    """Tell glibc what to do with freed memory from now on. Returns whether it listened.

    By default it maps large blocks one by one and gives each back when it is freed, with a threshold that moves with
    the program. Every block then costs a page fault per 4 KiB when it is next used.

    Args:
        release_pages: give every large block back at once, so that resident memory follows the live bytes closely;
            otherwise keep freed memory for the next allocation, which saves those page faults.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # another C library
    if release_pages:
        return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES))
    kept = mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    return bool(kept and mallopt(_M_TOP_PAD, 64 << 20))


def read_status(*names: str) -> list[int]:
    """Figures of this process in bytes, from /proc/self/status."""
    lines = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return [int(lines[name].split()[0]) << 10 for name in names]


def set_allocator(way: str) -> Any:
    """Take an allocator from now on. Returns the arena, if it is that."""
    if way == "arena":
        from tests.native.arena_module import load

        load().use_planned_allocator()
        return load().get_arena()
    if way != "glibc":
        tune_allocator(release_pages=way == "released")
    return None


def measure(name: str, way: str, steps: int) -> dict[str, Any]:
    """One run, in this process."""
    spec = dict(SPECS[name])
    small = spec.pop("small")
    arena = set_allocator(way)
    build(**{**spec, **small}).step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if arena is not None:
        arena.trim(0)
        arena.reset_peaks()
    start_bytes, start_file_bytes = read_status("VmRSS", "RssFile")
    start_live_bytes = arena.statistics()["live_bytes"] if arena is not None else 0
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    workload = build(**spec)
    rows = []
    for _ in range(steps):
        before, begin, faults = time.process_time(), time.perf_counter(), count_faults()
        loss = workload.step()
        now = time.perf_counter(), time.process_time(), count_faults()
        rows.append((now[0] - begin, now[1] - before, now[2] - faults))
    peak_bytes, file_bytes = read_status("VmHWM", "RssFile")
    seconds, processor_seconds, page_faults = zip(*rows[UNMEASURED_STEPS:], strict=True)
    return {
        "name": name,
        "way": way,
        "resident_bytes": peak_bytes - start_bytes,
        "file_bytes": file_bytes - start_file_bytes,
        "step_seconds": statistics.median(seconds),
        "processor_seconds": statistics.median(processor_seconds),
        "page_faults": statistics.median(page_faults),
        "loss": float(loss).hex(),
        "live_bytes": arena.statistics()["live_peak_bytes"] - start_live_bytes if arena is not None else None,
        "arena": arena.statistics() if arena is not None else None,
    }


def measure_pairs(name: str, pairs: int) -> dict[str, Any]:
    """Steps with the arena and without in turn, in this process."""
    from tests.native.arena_module import load

    spec = {key: value for key, value in SPECS[name].items() if key != "small"}
    load().use_planned_allocator(False)
    workload = build(**spec)
    ratios: dict[str, list[float]] = {"step_seconds": [], "processor_seconds": []}
    for number in range(-UNMEASURED_STEPS, pairs):
        taken = {}
        for is_used in (True, False) if number % 2 else (False, True):
            load().use_planned_allocator(is_used)
            before, begin = time.process_time(), time.perf_counter()
            workload.step()
            taken[is_used] = time.perf_counter() - begin, time.process_time() - before
        if number >= 0:
            for field, arena, glibc in zip(ratios, taken[True], taken[False], strict=True):
                ratios[field].append(arena / glibc)
    found = {f"{field}_ratio": statistics.median(each) for field, each in ratios.items()}
    return {"name": name, "way": "arena in turn with glibc", "pairs": pairs, **found}


def summarise(name: str, rounds: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Medians over the rounds, beside glibc as it comes."""
    found = []
    live_bytes = next((each["arena"]["live_bytes"] for each in rounds if "arena" in each), None)
    first = next(iter(rounds[0]))
    for way in rounds[0]:
        runs = [each[way] for each in rounds]
        row = {"name": name, "way": way, "rounds": len(runs), "live_bytes": live_bytes}
        for field in ("resident_bytes", "file_bytes", "step_seconds", "processor_seconds", "page_faults"):
            row[field] = statistics.median(run[field] for run in runs)
        row["most_resident_bytes"] = max(run["resident_bytes"] for run in runs)
        for field in ("step_seconds", "processor_seconds"):
            row[f"{field}_ratio"] = statistics.median(each[way][field] / each[first][field] for each in rounds)
        row["same_loss"] = all(each[way]["loss"] == each[first]["loss"] for each in rounds)
        row["arena"] = runs[-1]["arena"]
        resident = f"{row['resident_bytes'] / 2**20:6.0f} MiB resident"
        if live_bytes:
            resident += f" ({row['resident_bytes'] / live_bytes:.3f} of the live peak)"
        print(
            f"{name:16} {way:9} {resident}, {row['step_seconds']:.3f} s a step ({row['step_seconds_ratio']:.3f} of "
            f"{first}'s; of processor time {row['processor_seconds_ratio']:.3f}), {row['page_faults']:.0f} faults"
            f"{'' if row['same_loss'] else ', ANOTHER LOSS'}",
            flush=True,
        )
        found.append(row)
    return found


def main() -> None:
    """Run all ways of each model in turn, and write down what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SPECS), default=list(SPECS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=15, help="of steps with and without the arena in one process")
    parser.add_argument("--measure", nargs=2, metavar=("NAME", "WAY"), help="one run in this process; pairs are a way")
    parser.add_argument("--output", help="results as JSON")
    options = parser.parse_args()
    if options.measure:
        name, way = options.measure
        print(json.dumps(measure_pairs(name, options.pairs) if way == "pairs" else measure(name, way, options.steps)))
        return
    results = []
    for name in options.only:
        rounds = []
        for number in range(options.rounds):
            turn = options.ways if number % 2 == 0 else options.ways[::-1]
            runs = {way: run_apart(__file__, "--measure", name, way, "--steps", options.steps) for way in turn}
            rounds.append({way: runs[way] for way in options.ways})
        if rounds:
            results += summarise(name, rounds)
        if options.pairs:
            results.append(run_apart(__file__, "--measure", name, "pairs", "--pairs", options.pairs))
            print(results[-1], flush=True)
    write_results(options.output, results)


if __name__ == "__main__":
    main()

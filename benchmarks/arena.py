"""The arena's library under load: random requests in the tens of millions, and the requests of real training steps.

    python benchmarks/arena.py --parts random times real league --output benchmarks/results/arena.json

random: blocks are marked and looked at, in programs with the address sanitizer and with the thread sanitizer. times:
what a request costs beside malloc. real: the allocations of training on this CPU, from building the model on, as the
profiler reports them. league: the steps of the league's models as they are captured for cards. The last two go through
the C interface as a program on a device would send them, step after step, on host memory that nobody touches; beside it
what the library's pool alone and PyTorch's allocator (its model, in two settings) would reserve for the same requests.
What the library reserves is the peak of the last step, in which it follows its plan; the others give nothing back.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import torch
from league import DEFAULT_CACHE, MODELS, find_job, read_results, save_results

from elbowroom.cuda_allocator.build import LIBRARIES, SOURCES, build_library, find_compiler
from elbowroom.cuda_allocator.library import Counts, Memory
from elbowroom.cuda_allocator.use import StepTracker
from elbowroom.layout.caching import CachingAllocator
from elbowroom.layout.lifetimes import list_buffers
from elbowroom.layout.pools import ExpandableAllocator
from elbowroom.workloads import build

TESTS = pathlib.Path(__file__).parents[1] / "tests"

STEPS = 6
"""Of each model: three until its plan is followed, and three by it."""

REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet-50, 8 images": ("torchvision:resnet50", {"batch": 8, "optimizer": "sgd"}),
    "VGG-16, 4 images": ("torchvision:vgg16", {"batch": 4, "optimizer": "sgd"}),
    "DenseNet-121, 8 images": ("torchvision:densenet121", {"batch": 8, "optimizer": "sgd"}),
    "Inception-v3, 8 images": ("torchvision:inception_v3", {"batch": 8, "optimizer": "sgd"}),
    "U-Net, 2 images": ("unet:build", {"batch": 2, "optimizer": "sgd", "image_size": 128}),
    "BERT-base, 4 x 128": ("transformers:bert-base-uncased", {"batch": 4, "sequence_length": 128}),
    "GPT-2 small, 2 x 256": ("transformers:gpt2", {"batch": 2, "sequence_length": 256}),
}

SERVED = ("requests", "hits", "apart", "missed", "blocked", "unplanned")
"""What is counted of the last step."""

Event = tuple[str, int, int]
"""take (block, bytes), give (block), begin or end of a step."""


# Random requests ------------------------------------------------------------------------------------------------------


def compile_driver(folder: pathlib.Path, *flags: str) -> pathlib.Path:
    """The driver of the tests, with the library in it."""
    made = folder / ("driver" + "".join(flags).replace("/", ""))
    sources = [TESTS / "native" / "arena_driver.c", *sorted(SOURCES.glob("*.c"))]
    command = [*find_compiler(), "-std=c11", "-pthread", "-g", f"-I{SOURCES}", *flags, "-o", made, *sources, *LIBRARIES]
    subprocess.run([str(each) for each in command], check=True)
    return made


def drive(driver: pathlib.Path, *arguments: object) -> dict[str, Any]:
    """What it has counted; it ends with an error where something is wrong."""
    done = subprocess.run([driver, *map(str, arguments)], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def try_random(millions: float, folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Steps alone, steps beside other threads, a device that is too small; the last two under the thread sanitizer."""
    address = compile_driver(folder, "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    thread = compile_driver(folder, "-O1", "-fsanitize=thread")
    cases: tuple[tuple[str, pathlib.Path, float, int, int], ...] = (
        ("steps", address, 0.8, 1, 1 << 36),
        ("steps beside three threads", address, 0.12, 4, 1 << 30),
        ("a device that is too small", address, 0.04, 1, 1 << 22),
        ("steps beside three threads, thread sanitizer", thread, 0.04, 4, 1 << 30),
    )
    for name, driver, share, threads, capacity_bytes in cases:
        found = drive(driver, int(share * millions * 1e6), threads, 7, capacity_bytes)
        yield {"part": "random", "name": name, "threads": threads, "capacity_bytes": capacity_bytes, **found}


def time_requests(millions: float, folder: pathlib.Path) -> dict[str, Any]:
    """Nanoseconds of processor time of a request together with giving the block back, without what the driver takes."""
    driver = compile_driver(folder, "-O2")
    count = int(millions * 1e6)
    ways = ("planned", "pool", "malloc", "nothing")
    least = {way: min(drive(driver, count, 1, 7, 1 << 36, way)["seconds"] for _ in range(3)) for way in ways}
    found = {f"{way}_ns": round((least[way] - least["nothing"]) / count * 1e9, 1) for way in ways[:3]}
    return {
        "part": "times",
        "name": "ns a request",
        "requests": count,
        "driver_ns": least["nothing"] / count * 1e9,
        **found,
    }


# Requests of training -------------------------------------------------------------------------------------------------


def record_training(spec: str, options: dict[str, Any]) -> list[Event]:
    """All that goes through PyTorch's CPU allocator from building a model to the end of its last step."""
    torch.manual_seed(0)
    config = torch.autograd.profiler.profile(use_cpu=True, profile_memory=True, acc_events=False).config()
    activities = {torch._C._profiler.ProfilerActivity.CPU}
    torch._C._autograd._prepare_profiler(config, activities)
    torch._C._autograd._enable_profiler(config, activities, {torch._C._profiler.RecordScope.USER_SCOPE})
    workload = build(spec, **options)
    steps = []
    for _ in range(STEPS):
        begin = time.time_ns()
        workload.step()
        steps.append((begin, time.time_ns()))
    pending: list[Any] = torch._C._autograd._disable_profiler().experimental_event_tree()
    found: list[tuple[int, Event]] = [(begin, ("begin", 0, 0)) for begin, _ in steps]
    found += [(end, ("end", 0, 0)) for _, end in steps]
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == torch._C._profiler._EventType.Allocation and event.extra_fields.device.type == "cpu":
            fields = event.extra_fields
            what = ("take", fields.ptr, fields.alloc_size) if fields.alloc_size > 0 else ("give", fields.ptr, 0)
            found.append((event.start_time_ns, what))
    return [event for _, event in sorted(found, key=lambda each: each[0])]


def list_events(model: str, cache: pathlib.Path) -> list[Event]:
    """The step of a captured trace, again and again; what outlives it is given back before the next one begins."""
    trace, _ = find_job(model, "rtx4090", cache)
    lasting = {storage.id for storage in trace.storages if storage.created < 0}
    buffers = list_buffers(trace)
    rows = sorted(
        (at, takes, buffer.id, buffer.nbytes)
        for buffer in buffers
        if buffer.id not in lasting
        for at, takes in ((buffer.lower, True), (buffer.upper, False))
    )
    events: list[Event] = [("take", buffer.id, buffer.nbytes) for buffer in buffers if buffer.id in lasting]
    for _ in range(STEPS):
        step: list[Event] = [
            ("take" if takes else "give", name, nbytes if takes else 0) for _, takes, name, nbytes in rows
        ]
        events += [("begin", 0, 0), *step, ("end", 0, 0)]
    return events


def send(
    events: Sequence[Event], take: Callable[[int], int], give: Callable[[int], Any], mark: Callable[[str], Any]
) -> None:
    """Send events to whoever serves them; blocks that were there before are unknown, and skipped."""
    addresses: dict[int, int] = {}
    for what, block, nbytes in events:
        if what == "take":
            addresses[block] = take(nbytes)
        elif what == "give":
            if block in addresses:
                give(addresses.pop(block))
        else:
            mark(what)


def measure(part: str, name: str, events: list[Event]) -> dict[str, Any]:
    """The same events to the library with its steps, to its pool alone, and to the models of PyTorch's allocator."""
    memory = Memory(build_library())
    keeper = StepTracker(memory, 0)
    steps: list[Counts] = []

    def mark(what: str) -> None:
        if what == "begin":
            memory.reset_peaks()
            steps.append(memory.count())
            keeper.begin()
        else:
            keeper.end()

    send(events, lambda nbytes: memory.take(nbytes) or 0, memory.give, mark)
    now, before = memory.count(), steps[-1]
    pool = Memory(build_library())
    send(events, lambda nbytes: pool.take(nbytes) or 0, pool.give, lambda what: None)
    others = {"caching": CachingAllocator(), "expandable": ExpandableAllocator()}
    for other in others.values():
        send(events, other.take, other.give, lambda what: None)
    outside = now.reserved_bytes - now.arena_bytes
    found = {
        "part": part, "name": name,
        **{field: getattr(now, field) - getattr(before, field) for field in SERVED},
        "arena_bytes": now.arena_bytes, "bound_bytes": keeper.bound_bytes, "outside_bytes": outside,
        "reserved_bytes": now.reserved_peak_bytes, "allocated_peak_bytes": now.allocated_peak_bytes,
        "pool_bytes": pool.count().reserved_peak_bytes,
        **{f"{other}_bytes": allocator.reserved_bytes for other, allocator in others.items()},
    }  # fmt: skip
    reserved, arena, bound = found["reserved_bytes"], found["arena_bytes"], max(found["bound_bytes"], 1)
    saved = ", ".join(f"{each} {1 - reserved / found[f'{each}_bytes']:.1%}" for each in ("pool", *others))
    print(
        f"{name:28} {found['hits']}+{found['apart']} of {found['requests']}, arena {arena / 2**20:.0f} MiB, "
        f"{arena / bound:.4f} of its bound, reserved {reserved / found['allocated_peak_bytes']:.4f} of the peak; "
        f"less than {saved}",
        flush=True,
    )
    return found


def main() -> None:
    """Run the parts, and write down what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("random", "times", "real", "league")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--millions", type=float, default=30, help="random requests in millions")
    parser.add_argument("--models", nargs="+", help="of the real ones and the league's; all by default")
    parser.add_argument("--cache", type=pathlib.Path, default=DEFAULT_CACHE, help="where captured traces are kept")
    parser.add_argument("--output", help="results; those of parts that are not run stay as they are")
    options = parser.parse_args()
    results = [each for each in read_results(options.output) if each["part"] not in options.parts]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if "random" in options.parts:
            for found in try_random(options.millions, folder):
                print(found, flush=True)
                results.append(found)
        if "times" in options.parts:
            results.append(time_requests(3, folder))
            print(results[-1], flush=True)
    for part, names in (("real", REAL), ("league", MODELS)):
        for name in names if part in options.parts else ():
            if options.models and name not in options.models:
                continue
            events = record_training(*REAL[name]) if part == "real" else list_events(name, options.cache)
            results.append(measure(part, name, events))
    save_results(options.output, results)


if __name__ == "__main__":
    main()

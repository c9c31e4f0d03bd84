"""How much room the copies of planned steps take below the device: beside the most bytes of copies at one time.

    python benchmarks/copies.py --parts plans --output benchmarks/results/copies.json    # the league's models, forecast
    python benchmarks/copies.py --parts runs --output benchmarks/results/copies.json     # real steps, on this CPU

Plans: the arena that is laid out; what a free list would take that is told of no plan; and what slabs did that were
filled in the same way, chunk by chunk. Runs: the spill file's size after each of several real steps, planned and
dynamic, and the slabs for the same requests. `--check`: nothing planned takes more than 2 % over the most at one time.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from league import add_options, find_job, read_results, save_results

import elbowroom
from elbowroom.cli.lists import read_budgets
from elbowroom.errors import Infeasible
from elbowroom.ir.journal import Mode
from elbowroom.ir.placement import CopySlot
from elbowroom.layout.free_list import FreeList
from elbowroom.simulator.planned import PreparedTrace
from elbowroom.tiers import pinned
from elbowroom.tiers.pinned import HostSlabs
from elbowroom.workloads import build

MOST_OVER = 1.02
STEPS = 8
SETTLED = 4
"""Steps of a run before the first that is judged: captured, planned, and planned once more with the room given back."""

SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet-50": ("torchvision:resnet50", {"batch": 4, "image_size": 96, "optimizer": "sgd"}),
    "DenseNet-121": ("torchvision:densenet121", {"batch": 4, "image_size": 96, "optimizer": "sgd"}),
    "MobileNet-v3": ("torchvision:mobilenet_v3_large", {"batch": 8, "image_size": 96}),
    "U-Net": ("unet:build", {"batch": 1, "image_size": 96}),
    "GPT-2": ("transformers:gpt2", {"batch": 2, "sequence_length": 96, "layers": 4}),
    "BERT": ("transformers:bert-base-uncased", {"batch": 4, "sequence_length": 80, "layers": 4}),
    "passes": ("copies:build_passes", {}),
}
"""What is really run: small enough for two cores and a minute."""


class Pageable:
    """Pins nothing, in place of `tiers.pinned.CudaPinning`."""

    def pin(self, address: int, nbytes: int) -> bool:
        return True

    def unpin(self, address: int) -> None:
        pass


def build_passes() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """A ResNet-50 on images of several sizes in one step, each pass begun before the one before it goes back."""
    workload = build("torchvision:resnet50", batch=2, image_size=64, optimizer="sgd")
    model, optimizer = workload.model, workload.optimizer

    def step() -> torch.Tensor:
        losses: list[torch.Tensor] = []
        for pixels in (64, 128, 96, 112):
            images = torch.randn(2, 3, pixels, pixels)
            losses.append(torch.nn.functional.cross_entropy(model(images), torch.tensor([1, 2])))
            if len(losses) > 1:
                losses.pop(0).backward()
        loss = losses.pop()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


# -- the most at one time, and what it takes ---------------------------------------------------------------------------

Request = tuple[bool, int, int, int | None]
"""Whether it takes; which copy; its bytes; where it was planned to lie."""


def list_requests(copy_slots: Sequence[CopySlot]) -> list[Request]:
    """What a step asks of one tier, in order."""
    events = [(copy_slot.end, False, index) for index, copy_slot in enumerate(copy_slots)]
    events += [(copy_slot.begin, True, index) for index, copy_slot in enumerate(copy_slots)]
    return [(takes, index, copy_slots[index].nbytes, copy_slots[index].offset) for _, takes, index in sorted(events)]


def count_most(requests: Sequence[Request]) -> int:
    """Most bytes of copies at one time, as they were asked for."""
    most = there = 0
    for takes, _, nbytes, _ in requests:
        there += nbytes if takes else -nbytes
        most = max(most, there)
    return most


def fill_list(requests: Sequence[Request]) -> int:
    """The end of a free list that is told of no plan."""
    free, offsets = FreeList(), dict[int, int]()
    for takes, copy, nbytes, _ in requests:
        if takes:
            offsets[copy] = free.take(nbytes) or 0
        else:
            free.give(offsets.pop(copy), nbytes)
    return free.end_bytes


def make_nothing(nbytes: int) -> torch.Tensor:
    """Memory that is not there: more is laid out here than this machine has."""
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def fill_slabs(requests: Sequence[Request], arena_bytes: int | None) -> int:
    """Bytes of the slabs: one that is fitted to a plan, or chunks where there is none. Nothing is written to them."""
    host, blocks = HostSlabs(1 << 50, pinning=Pageable()), dict[int, Any]()
    if arena_bytes is not None:
        host.prepare(arena_bytes, gives_back=True, settle=lambda: None)
    for takes, copy, nbytes, at in requests:
        if takes:
            blocks[copy] = host.reserve(nbytes, at if arena_bytes is not None else None)
        else:
            host.free(blocks.pop(copy))
    return host.slab_bytes


def judge(requests: Sequence[Request], arena_bytes: int) -> dict[str, Any]:
    """One tier: the most at one time, and over it what each way takes."""
    most = count_most(requests)
    return {
        "copies": sum(takes for takes, *_ in requests), "most_bytes": most, "arena_bytes": arena_bytes,
        "over_most": arena_bytes / most, "free_list": fill_list(requests) / most,
        "slab": fill_slabs(requests, arena_bytes) / most, "chunks": fill_slabs(requests, None) / most,
    }  # fmt: skip


# -- plans -------------------------------------------------------------------------------------------------------------


def measure_plans(options: argparse.Namespace, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The league's models within several budgets, by the planner and by offloading everything."""
    done = {
        (each["model"], each["hardware"], each["share"], each["strategy"]) for each in known if each["part"] == "plans"
    }
    found: list[dict[str, Any]] = []
    for model in options.models:
        for hardware in options.hardware:
            for strategy in ("auto", "offload_all"):
                for share in options.shares if strategy == "auto" else [1.0]:
                    if (model, hardware, share, strategy) not in done:
                        found += _measure_plan(options, model, hardware, share, strategy)
            save_results(options.output, [*known, *found])
    return found


def _measure_plan(
    options: argparse.Namespace, model: str, hardware: str, share: float, strategy: str
) -> list[dict[str, Any]]:
    trace, costs = find_job(model, hardware, options.cache)
    peak = elbowroom.simulate(trace, costs, elbowroom.plan(trace, costs, 1 << 50, strategy="keep_all")).peak_bytes
    try:
        made = elbowroom.plan(trace, costs, int(peak * share), strategy=strategy)
    except Infeasible:
        return []
    replay = PreparedTrace(trace, costs)
    begin = time.perf_counter()
    placement = replay.place(made)
    seconds = time.perf_counter() - begin
    if not placement.copy_slots:
        return []
    cell = {"part": "plans", "model": model, "hardware": hardware, "share": share, "strategy": strategy,
            "seconds": round(seconds, 4),
            **judge(list_requests(placement.copy_slots), placement.lower_bytes)}  # fmt: skip
    cells = [cell, *_measure_overflow(cell, replay, made)]
    for each in cells:
        print(f"{model:13} {hardware:8} {share:.0%} {strategy:11} {each['copies']:4} copies: {each['over_most']:.5f}; "
              f"free list {each['free_list']:.3f}, chunks {each['chunks']:.3f}; {seconds:.3f} s",
              flush=True)  # fmt: skip
    return cells


def _measure_overflow(cell: dict[str, Any], replay: PreparedTrace, made: elbowroom.Plan) -> list[dict[str, Any]]:
    """The same plan where the host has room for half of its copies: both tiers."""
    link = dataclasses.replace(replay.costs.link, upper="host", lower="disk")
    costs = dataclasses.replace(replay.costs, further_links=(link,))
    placement = PreparedTrace(replay.trace, costs, host_bytes=cell["most_bytes"] // 2).place(made)
    found = []
    for tier, is_on_disk, arena in (("host", False, placement.lower_bytes), ("disk", True, placement.disk_bytes)):
        copy_slots = [copy_slot for copy_slot in placement.copy_slots if copy_slot.is_on_disk is is_on_disk]
        if copy_slots:
            found.append({**cell, "tier": tier, **judge(list_requests(copy_slots), arena)})
    return found


# -- real steps --------------------------------------------------------------------------------------------------------


class Watched:
    """What a spill file is asked for, from now on."""

    def __init__(self, room: Any) -> None:
        self.spill = room._transfers._spill
        self._reserve, self._free = self.spill.reserve, self.spill.free
        self.spill.reserve, self.spill.free = self.reserve, self.free
        self._there: dict[int, tuple[int, int, int | None]] = {}
        self.requests: list[Request] = []
        self.astray = self._copies = 0

    def begin(self) -> None:
        """Begin anew, with what is there."""
        self.requests = [(True, *each) for each in self._there.values()]
        self.astray = 0

    def reserve(self, nbytes: int, at: int | None = None) -> int:
        """As the file does."""
        offset: int = self._reserve(nbytes, at)
        self._copies += 1
        self._there[offset] = self._copies, nbytes, at
        self.requests.append((True, self._copies, nbytes, at))
        self.astray += at is not None and at != offset
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """As the file does."""
        self._free(offset, nbytes)
        self.requests.append((False, *self._there.pop(offset)))


def measure_runs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Several real steps of small models, as planned, with everything offloaded, and with nothing planned."""
    profile = elbowroom.probe("cpu", spill_folder=options.spill_folder)
    found = []
    for name in options.runs:
        for way in ("auto", "offload_all", "dynamic"):
            found += _measure_run(name, way, options.spill_folder, profile)
    return found


def _measure_run(name: str, way: str, folder: str | None, profile: Any) -> list[dict[str, Any]]:
    workload = build(SMALL[name][0], **SMALL[name][1])
    budget = _find_budget(workload, profile)
    given = {"mode": "dynamic"} if way == "dynamic" else {"strategy": way}
    room = elbowroom.fit(workload.model, workload.optimizer, budget, profile=profile, spill_folder=folder, **given)
    watched, found = Watched(room), []
    for index in range(STEPS):
        watched.begin()
        watched.spill._free.forget_end()
        with room.step():
            workload.step()
        mode, planned = room.journal().steps[-1].mode, room.planned
        if not watched.requests:
            continue
        most = count_most(watched.requests)
        cell: dict[str, Any] = {
            "part": "runs", "model": name, "way": way, "step": index, "mode": str(mode), "most_bytes": most,
            "copies": sum(takes for takes, *_ in watched.requests), "file_bytes": watched.spill.file_bytes,
            "file": watched.spill.file_bytes / most, "used": watched.spill._free.end_bytes / most,
            "astray": watched.astray, "unplanned": sum(takes and at is None for takes, _, _, at in watched.requests),
        }  # fmt: skip
        if mode is Mode.PLANNED and planned is not None:
            cell["slab"] = fill_slabs(watched.requests, planned.placement.lower_bytes) / most
            cell["forecast_bytes"] = planned.forecast.lower_arena_bytes
        found.append(cell)
    room.detach()
    last = found[-1] if found else {"file": 0.0, "used": 0.0, "copies": 0, "astray": 0}
    print(f"{name:13} {way:11} last step: file {last['file']:.4f}, used {last['used']:.4f} of the most at one time, "
          f"{last['copies']} copies, {last['astray']} astray", flush=True)  # fmt: skip
    return found


def _find_budget(workload: Any, profile: Any) -> int:
    """A third of the way from the smallest budget that works to the plain peak."""
    trace = elbowroom.capture(workload.step, workload.model, workload.optimizer)
    costs = elbowroom.price(trace, profile)
    plain = elbowroom.simulate(trace, costs, elbowroom.plan(trace, costs, 1 << 50, strategy="keep_all")).peak_bytes
    try:
        elbowroom.plan(trace, costs, 1)
    except Infeasible as error:
        return (2 * error.needed_bytes + plain) // 3
    raise AssertionError("a step that needs no byte")


# -- what is promised --------------------------------------------------------------------------------------------------


def find_broken(results: Sequence[dict[str, Any]]) -> list[str]:
    """Where more is taken than is promised."""
    broken = []
    for each in results:
        where = " ".join(
            str(each[name]) for name in ("model", "hardware", "share", "way", "tier", "step") if name in each
        )
        figures = {}
        if each["part"] == "plans":
            figures = {name: each[name] for name in ("over_most", "slab")}
        elif each["mode"] == Mode.PLANNED and each["step"] >= SETTLED:
            figures = {name: each[name] for name in ("file", "slab")}
        broken += [f"{where}: {name} {value:.4f}" for name, value in figures.items() if value > MOST_OVER]
    return broken


def describe(results: Sequence[dict[str, Any]]) -> list[str]:
    """The median and the most of each figure, part by part."""
    lines = []
    for part, names in (("plans", ("over_most", "slab", "free_list", "chunks", "seconds")), ("runs", ("file", "slab"))):
        chosen = [each for each in results if each["part"] == part]
        if part == "runs":
            chosen = [each for each in chosen if each["mode"] == Mode.PLANNED and each["step"] >= SETTLED]
            dynamic = [each["used"] for each in results if each["part"] == part and each["mode"] == Mode.DYNAMIC]
            if dynamic:
                lines.append(f"dynamic steps ({len(dynamic)}): used median {statistics.median(dynamic):.4f}, "
                             f"most {max(dynamic):.4f}")  # fmt: skip
        for name in names if chosen else ():
            figures = [each[name] for each in chosen]
            lines.append(f"{part} ({len(chosen)}): {name} median {statistics.median(figures):.4f}, "
                         f"most {max(figures):.4f}")  # fmt: skip
    return lines


def main() -> None:
    """Run the parts, and write down what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, ["p100", "rtx4090"])
    parser.add_argument("--parts", nargs="+", choices=("plans", "runs"), default=["plans", "runs"])
    parser.add_argument("--budgets", default="20%peak:100%peak:9", help="shares of the plain peak")
    parser.add_argument("--runs", nargs="+", choices=sorted(SMALL), default=list(SMALL), metavar="MODEL")
    parser.add_argument("--spill-folder", help="where the spill file lies")
    options = parser.parse_args()
    pinned._new_memory = make_nothing
    options.shares = [round(share / 10**6, 6) for share in read_budgets(options.budgets, peak_bytes=10**6)]
    results = read_results(options.output)
    if "plans" in options.parts:
        results += measure_plans(options, results)
    if "runs" in options.parts:
        names = set(options.runs)
        results = [each for each in results if each["part"] != "runs" or each["model"] not in names]
        results += measure_runs(options)
    save_results(options.output, results)
    print("\n".join(describe(results)))
    broken = find_broken(results)
    print("\n".join(broken) or "everything that is promised holds")
    sys.exit(1 if options.check and broken else 0)


if __name__ == "__main__":
    main()

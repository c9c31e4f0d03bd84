"""What does a budget cost? Seconds a step within it over seconds of the plain step, paired in one run.

    python benchmarks/step_time.py [--only NAME] [--rounds 5] [--output FILE.json]
    python benchmarks/step_time.py --everything-fits [--only NAME] [--rounds 101] [--output FILE.json]

ResNet-50 (batch 16, 224x224) at 50 % of its plain peak; GPT-2 small (batch 4, sequence 512) halfway between the
smallest budget that works and its plain peak; both with AdamW. Beside it: planned mode with a forced keep-all plan,
and block-wise `torch.utils.checkpoint` on as few blocks as bring the measured peak down to Elbowroom's.

With `--everything-fits`: small models in a room of ten times their peak, where a step should cost what it costs without
one. A second plain copy of the model shows how far the pairing can be trusted. Options of the room are the defaults;
"watched" is a room with `always_watch=True`, which watches every op and save though nothing moves.

All contenders run in one process with the same allocator settings, in turn; ratios are taken round by round. Peaks are
measured by the profiler's allocation events, in steps of their own.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from profiler_meter import ProfilerMeter
from torch.utils.checkpoint import checkpoint
from writing import write_results

import elbowroom
from elbowroom.hooks.cpu_ledger import CpuLedger
from elbowroom.hooks.ledger import NO_LIMIT
from elbowroom.planner.problem import pose
from elbowroom.units import format_bytes
from elbowroom.workloads import Workload, build
from elbowroom.workloads._packages import import_package

SPECS: dict[str, dict[str, Any]] = {
    "resnet50": {"spec": "torchvision:resnet50", "batch": 16, "image_size": 224},
    "gpt2": {"spec": "transformers:gpt2", "batch": 4, "sequence_length": 512},
}

SMALL_SPECS: dict[str, dict[str, Any]] = {
    "mobilenet_v3_small": {"spec": "torchvision:mobilenet_v3_small", "batch": 8},
    "efficientnet_b0": {"spec": "torchvision:efficientnet_b0", "batch": 8},
    "mamba": {"spec": f"{__name__}:make_mamba"},
    "mixture_of_experts": {"spec": f"{__name__}:make_mixture_of_experts"},
    "gpt2_2_layers": {"spec": "transformers:gpt2", "batch": 1, "sequence_length": 32, "layers": 2},
    "lstm_cell_loop": {"spec": f"{__name__}:make_lstm_cell_loop"},
}


def make_lstm_cell_loop() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """A recurrent cell called 32 times by a Python loop: many small ops."""
    cell = torch.nn.LSTMCell(32, 64)
    optimizer = torch.optim.AdamW(cell.parameters())
    inputs = torch.randn(32, 8, 32)

    def step() -> torch.Tensor:
        state = torch.zeros(8, 64), torch.zeros(8, 64)
        for row in inputs:
            state = cell(row, state)
        loss = state[0].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return cell, optimizer, step


def make_language_step(
    model: torch.nn.Module,
) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """A step of a language model on four sequences of 64 tokens."""
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (4, 64))

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def make_mamba() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """A small Mamba."""
    transformers = import_package("transformers")
    config = transformers.MambaConfig(vocab_size=256, hidden_size=128, num_hidden_layers=4)
    return make_language_step(transformers.MambaForCausalLM(config))


def make_mixture_of_experts() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """A small mixture of four experts."""
    transformers = import_package("transformers")
    config = transformers.MixtralConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return make_language_step(transformers.MixtralForCausalLM(config))


class Checkpointed(torch.nn.Module):
    """A block whose inside is computed again in the backward pass, or not."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.active = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self.inner(*args, **kwargs)
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)


def make(name: str) -> Workload:
    """The same workload, from the same seed."""
    options = dict((SPECS | SMALL_SPECS)[name])
    if not options["spec"].startswith(__name__):
        options["optimizer"] = "adamw"
    return build(options.pop("spec"), seed=0, **options)


def wrap_blocks(model: torch.nn.Module) -> list[Checkpointed]:
    """Every residual block or transformer layer of a model, made checkpointable."""
    lists = (
        [model.layer1, model.layer2, model.layer3, model.layer4] if hasattr(model, "layer1") else [model.transformer.h]
    )
    found = []
    for blocks in lists:
        for index, block in enumerate(blocks):
            blocks[index] = Checkpointed(block)
            found.append(blocks[index])
    return found


def list_residents(workload: Workload) -> list[torch.Tensor]:
    """Everything that is there between steps."""
    state = [v for s in workload.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return [*workload.model.parameters(), *workload.model.buffers(), *state, *workload.batch.values()]


def measure_peak(workload: Workload, step: Callable[[], object]) -> int:
    """Peak tensor bytes of one step."""
    meter = ProfilerMeter()
    meter.start(list_residents(workload))
    step()
    meter.stop()
    return meter.peak_bytes


def timed(step: Callable[[], object]) -> float:
    """Seconds of one step."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def counted_apart(step: Callable[[], object]) -> Callable[[], object]:
    """Let no room count what a plain step allocates: all contenders run in one process."""
    ledger = CpuLedger()

    def run() -> None:
        with ledger.counting(NO_LIMIT, lambda *_: False):
            step()

    return run


def in_room(workload: Workload, room: Any) -> Callable[[], object]:
    """A step of a workload inside a room."""

    def step() -> None:
        with room.step():
            workload.step()

    return step


def fit_checkpoints(workload: Workload, target_bytes: int) -> tuple[int, int, int]:
    """The fewest blocks that bring the peak to the target: (blocks, of all, peak); all of them if none do."""
    blocks = wrap_blocks(workload.model)

    def peak_with(count: int) -> int:
        for index, block in enumerate(blocks):
            block.active = index < count
        return measure_peak(workload, workload.step)

    low, high = 0, len(blocks)
    while low < high:
        middle = (low + high) // 2
        if peak_with(middle) <= target_bytes:
            high = middle
        else:
            low = middle + 1
    return high, len(blocks), peak_with(high)


def run(name: str, rounds: int, profile: Any) -> dict[str, Any]:
    """All contenders on one model."""
    plain = make(name)
    plain.step()
    plain.step()
    plain_peak = measure_peak(plain, plain.step)

    other = make(name)  # all models before there is a room, which would count them
    other.step()
    other.step()
    keep, ours = make(name), make(name)
    keep_room = elbowroom.fit(keep.model, keep.optimizer, "1TiB", profile=profile, strategy="keep_all")
    # The first steps are captured within any budget; they also tell the smallest one that works.
    budget = plain_peak // 2
    keep_step = in_room(keep, keep_room)
    for _ in range(3):
        keep_step()
    assert keep_room.planned is not None
    floor = pose(keep_room.planned.trace, keep_room.planned.costs, 1).floor.peak_bytes
    if name == "gpt2":
        budget = (floor + plain_peak) // 2
    room = elbowroom.fit(ours.model, ours.optimizer, budget, profile=profile)
    our_step = in_room(ours, room)
    for _ in range(4):
        our_step()
    assert room.planned is not None
    our_peak = max(record.peak_bytes or 0 for record in room.journal().steps)

    count, blocks, checkpoint_peak = fit_checkpoints(other, our_peak)

    contenders = {
        "plain": counted_apart(plain.step), "keep_all": keep_step,
        "elbowroom": our_step, "checkpoint": counted_apart(other.step),
    }  # fmt: skip
    seconds: dict[str, list[float]] = {label: [] for label in contenders}
    for index in range(rounds):
        order = list(contenders) if index % 2 == 0 else list(reversed(contenders))
        for label in order:
            gc.collect()
            seconds[label].append(timed(contenders[label]))
            print(f"  {name} round {index + 1}/{rounds}: {label} {seconds[label][-1]:.2f} s", flush=True)
    ratios = {
        label: [mine / base for mine, base in zip(times, seconds["plain"], strict=True)]
        for label, times in seconds.items()
    }
    forecast = room.planned.forecast
    result = {
        "model": name,
        "plain_peak_bytes": plain_peak,
        "floor_bytes": floor,
        "budget_bytes": budget,
        "forecast_peak_bytes": forecast.peak_bytes,
        "elbowroom_peak_bytes": our_peak,
        "checkpoint_peak_bytes": checkpoint_peak,
        "checkpointed_blocks": f"{count} of {blocks}",
        "forecast_seconds": forecast.step_seconds,
        "seconds": seconds,
        "ratio_medians": {label: statistics.median(values) for label, values in ratios.items()},
        "ratios": ratios,
        "offloaded_bytes": forecast.offloaded_bytes,
        "recompute_seconds": forecast.recompute_seconds,
    }
    room.detach()
    keep_room.detach()
    return result


def run_fitting(name: str, rounds: int, profile: Any) -> dict[str, Any]:
    """Two plain copies of a small model, and two in rooms with ten times the bytes that it needs; one is watched."""
    plain, again, ours, watched = (make(name) for _ in range(4))
    plain.step()
    plain.step()
    budget = 10 * measure_peak(plain, plain.step)
    room = elbowroom.fit(ours.model, ours.optimizer, budget, profile=profile)
    watching = elbowroom.fit(watched.model, watched.optimizer, budget, profile=profile, always_watch=True)
    contenders = {
        "plain": counted_apart(plain.step), "plain again": counted_apart(again.step), "elbowroom": in_room(ours, room),
        "watched": in_room(watched, watching),
    }  # fmt: skip
    for _ in range(10):  # a room captures and meters its first steps
        for step in contenders.values():
            step()
    seconds: dict[str, list[float]] = {label: [] for label in contenders}
    gc.collect()
    gc.disable()
    for index in range(rounds):
        order = list(contenders)
        for label in order[index % len(order) :] + order[: index % len(order)]:
            seconds[label].append(timed(contenders[label]))
    gc.enable()
    modes = [record.mode.value for record in room.journal().steps]
    metered = sum(record.resident_bytes is not None for record in room.journal().steps[10:])
    watched_modes = [record.mode.value for record in watching.journal().steps]
    room.detach()
    watching.detach()
    ratios = {
        label: [mine / base for mine, base in zip(times, seconds["plain"], strict=True)]
        for label, times in seconds.items()
    }
    medians = {label: statistics.median(values) for label, values in ratios.items()}
    print(
        f"{name}: plain {statistics.median(seconds['plain']) * 1e3:.2f} ms; plain again "
        f"{medians['plain again']:.3f}, Elbowroom {medians['elbowroom']:.3f}, watched {medians['watched']:.3f} of it; "
        f"{metered} of {rounds} steps metered"
    )
    return {
        "model": name,
        "budget_bytes": budget,
        "modes": sorted(set(modes[10:])),
        "watched_modes": sorted(set(watched_modes[10:])),
        "metered_steps": metered,
        "seconds": seconds,
        "ratio_medians": medians,
    }


def main() -> None:
    """Run, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--everything-fits", action="store_true", help="small models with more room than they need")
    parser.add_argument("--only", choices=sorted(SPECS | SMALL_SPECS))
    parser.add_argument("--rounds", type=int, help="5, or 101 with --everything-fits, if not given")
    parser.add_argument("--output")
    options = parser.parse_args()
    # The plain steps allocate as those in a room do, and while there is this limit nobody gives back their pages.
    CpuLedger().scope.limit_bytes = 1 << 50
    profile = elbowroom.probe("cpu")
    results = []
    if options.everything_fits:
        for name in [options.only] if options.only else SMALL_SPECS:
            results.append(run_fitting(name, options.rounds or 101, profile))
        write_results(options.output, results)
        return
    for name in [options.only] if options.only else SPECS:
        results.append(run(name, options.rounds or 5, profile))
        gc.collect()
    for result in results:
        medians = result["ratio_medians"]
        print(
            f"\n{result['model']}: budget {format_bytes(result['budget_bytes'])} of a plain peak of "
            f"{format_bytes(result['plain_peak_bytes'])}, smallest that works {format_bytes(result['floor_bytes'])}\n"
            f"  {'':28}{'peak':>12}{'time over plain':>18}\n"
            f"  {'plain':28}{format_bytes(result['plain_peak_bytes']):>12}{medians['plain']:>18.3f}\n"
            f"  {'keep-all plan (forced)':28}{'':>12}{medians['keep_all']:>18.3f}\n"
            f"  {'Elbowroom':28}{format_bytes(result['elbowroom_peak_bytes']):>12}{medians['elbowroom']:>18.3f}\n"
            f"  {'checkpoint ' + result['checkpointed_blocks'] + ' blocks':28}"
            f"{format_bytes(result['checkpoint_peak_bytes']):>12}{medians['checkpoint']:>18.3f}\n"
            f"  forecast: {format_bytes(result['forecast_peak_bytes'])}, {result['forecast_seconds']:.2f} s a step; "
            f"measured {statistics.median(result['seconds']['elbowroom']):.2f} s"
        )
    write_results(options.output, results)


if __name__ == "__main__":
    main()

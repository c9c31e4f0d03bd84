"""Does a forecast hold? Seconds and bytes of planned steps, as forecast and as measured, on the CPU.

    python benchmarks/forecast.py [--only NAME ...] [--steps 12] [--output FILE.json]

Each model trains with AdamW at a budget 30 % of the way from the smallest that works to its plain peak. The forecast
of a step's seconds is taken twice: from the captured step alone, and after one planned step has been measured (the
second one, since the first finds memory cold). Measured: the median of all later steps.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

from writing import write_results

import elbowroom
from elbowroom.planner.problem import pose
from elbowroom.units import format_bytes, format_seconds
from elbowroom.workloads import build

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "MobileNet-v3": ("torchvision:mobilenet_v3_large", {"batch": 8, "image_size": 128}),
    "DenseNet-121": ("torchvision:densenet121", {"batch": 8, "image_size": 128}),
    "ResNet-18": ("torchvision:resnet18", {"batch": 16, "image_size": 128}),
    "ResNet-50": ("torchvision:resnet50", {"batch": 16, "image_size": 224}),
    "ViT-B": ("timm:vit_base_patch16_224", {"batch": 4}),
    "BERT-base": ("transformers:bert", {"batch": 4, "sequence_length": 128}),
    "GPT-2 small": ("transformers:gpt2", {"batch": 2, "sequence_length": 256}),
}
SHARE = 0.3
CAPTURED, COLD, MEASURED = 2, 1, 1
"""Steps before the ones that count: at most so many captured, one cold, one that corrects the forecast."""


def run(name: str, steps: int, profile: Any) -> dict[str, Any]:
    """Train one model and compare."""
    spec, options = MODELS[name]
    workload = build(spec, optimizer="adamw", seed=0, **options)
    with elbowroom.fit(workload.model, workload.optimizer, "1TiB", profile=profile) as room:
        while room.planned is None:
            with room.step():
                workload.step()
        floor = pose(room.planned.trace, room.planned.costs, 1).floor.peak_bytes
        budget = floor + int(SHARE * (room.planned.forecast.peak_bytes - floor))
    del workload
    workload = build(spec, optimizer="adamw", seed=0, **options)
    forecasts: list[float] = []
    with elbowroom.fit(workload.model, workload.optimizer, budget, profile=profile) as room:
        while len(forecasts) < COLD + MEASURED + 1 + steps:
            with room.step():
                workload.step()
            if room.planned is not None:
                forecasts.append(room.planned.forecast.step_seconds)
        records = room.journal().steps[-steps:]
        peak = room.planned.forecast.peak_bytes
        measured_peak = max(record.peak_bytes or 0 for record in room.journal().steps if record.mode == "planned")
    seconds = statistics.median(record.seconds for record in records)
    return {
        "model": name,
        **options,
        "budget_bytes": budget,
        "forecast_peak_bytes": peak,
        "measured_peak_bytes": measured_peak,
        "forecast_seconds_from_capture": forecasts[0],
        "forecast_seconds_after_one_step": forecasts[COLD + MEASURED],
        "measured_seconds": seconds,
        "seconds": [record.seconds for record in room.journal().steps],
        "modes": sorted({str(record.mode) for record in records}),
    }


def main() -> None:
    """Run, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(MODELS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output")
    options = parser.parse_args()
    profile = elbowroom.probe("cpu")
    results = []
    heads = ("peak: forecast", "measured", "step: from capture", "after one step", "measured")
    print(f"{'':14}" + "".join(f"{head:>20}" for head in heads), flush=True)
    for name in options.only or MODELS:
        result = run(name, options.steps, profile)
        results.append(result)
        first, later, measured = (
            result[key]
            for key in ("forecast_seconds_from_capture", "forecast_seconds_after_one_step", "measured_seconds")
        )
        peak, measured_peak = result["forecast_peak_bytes"], result["measured_peak_bytes"]
        cells = (
            format_bytes(peak),
            f"{format_bytes(measured_peak)} {measured_peak / peak:.4f}",
            f"{format_seconds(first)} {first / measured:.3f}",
            f"{format_seconds(later)} {later / measured:.3f}",
            format_seconds(measured),
        )
        print(f"{name:14}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
        gc.collect()
    write_results(options.output, results)


if __name__ == "__main__":
    main()

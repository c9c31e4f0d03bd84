"""What the benchmarks of planners share: models on machines, captured once; and results that grow from run to run.

Batches are such that the plain step needs about twice the memory of the card, so that a budget of half its peak is
the card itself. Nothing is allocated: steps are captured on fake tensors and priced for cards that need not be here.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from writing import write_results

import elbowroom
from elbowroom.hardware.shipped import load_shipped
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace

HARDWARE: Mapping[str, str] = {"p100": "float32", "v100": "float32", "rtx4090": "bfloat16", "h200": "bfloat16"}
"""Shipped profiles, and what models are trained in on each."""

CNN, TRANSFORMER = {"optimizer": "sgd"}, {"optimizer": "adamw"}

MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int, int]]] = {
    "ResNet-50": ("torchvision:resnet50", CNN, (400, 1152, 6784)),
    "ResNet-101": ("torchvision:resnet101", CNN, (264, 784, 4608)),
    "ResNet-152": ("torchvision:resnet152", CNN, (188, 560, 3328)),
    "VGG-16": ("torchvision:vgg16", CNN, (424, 1120, 6784)),
    "Inception-v3": ("torchvision:inception_v3", CNN, (352, 984, 5824)),
    "Inception-v4": ("timm:inception_v4", CNN, (196, 568, 3328)),
    "DenseNet-121": ("torchvision:densenet121", CNN, (256, 752, 4416)),
    "U-Net": ("unet:build", {**CNN, "image_size": 256}, (84, 248, 1472)),
    "BERT-large": ("transformers:bert-large-uncased", {**TRANSFORMER, "sequence_length": 512}, (12, 22, 144)),
    "GPT-2 medium": ("transformers:gpt2-medium", {**TRANSFORMER, "sequence_length": 1024}, (4, 6, 40)),
}
"""What each is built from, and its batch on cards of 16, 24 and 141 GB."""

CARDS = {"p100": 0, "v100": 0, "rtx4090": 1, "h200": 2}
DEFAULT_CACHE = pathlib.Path(tempfile.gettempdir()) / "elbowroom-traces"


def find_batch(model: str, hardware: str) -> int:
    """Samples in the batch of a model on a card."""
    return MODELS[model][2][CARDS[hardware]]


@functools.lru_cache(maxsize=1)
def find_job(model: str, hardware: str, cache: pathlib.Path) -> tuple[Trace, Costs]:
    """The step of a model and what it costs on a card; captured, if it is not in the cache."""
    spec, options, _ = MODELS[model]
    batch, dtype = find_batch(model, hardware), HARDWARE[hardware]
    path = cache / f"{model.replace(' ', '-')}-{batch}-{dtype}.json.gz"
    if path.exists():
        trace = elbowroom.load(Trace, path)
    else:
        print(f"capturing {model}, {batch} samples in {dtype}", file=sys.stderr, flush=True)
        trace = capture(spec, {**options, "batch": batch, "dtype": dtype, "device": "cpu"})
        cache.mkdir(parents=True, exist_ok=True)
        elbowroom.save(trace, path)
    return trace, elbowroom.price(trace, load_shipped(hardware))


def capture(spec: str, options: dict[str, Any]) -> Trace:
    """One step on fake tensors; the model itself is fake too, but for those of timm, which cannot be."""
    import contextlib

    from torch._subclasses.fake_tensor import FakeTensorMode

    from elbowroom.workloads import build

    real = spec.startswith("timm:")
    with contextlib.nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True):
        workload = build(spec, **options)
    return elbowroom.capture(workload.step, workload.model, workload.optimizer, name=spec)


class Slice:
    """The time this run has."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    def has(self, seconds: float) -> bool:
        """Whether something that takes so long may still be begun."""
        return time.monotonic() + seconds < self.end


def add_options(parser: argparse.ArgumentParser, hardware: list[str]) -> None:
    """The options that these benchmarks share."""
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS), metavar="MODEL")
    parser.add_argument("--hardware", nargs="+", choices=sorted(HARDWARE), default=hardware, metavar="PROFILE")
    parser.add_argument("--cache", type=pathlib.Path, default=DEFAULT_CACHE, help="where captured traces are kept")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long; 0 runs nothing")
    parser.add_argument("--output", help="results, added to what the file has already")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a demand does not hold")


def read_results(path: str | None) -> list[dict[str, Any]]:
    """What earlier runs have written; nothing where there is no file."""
    if path is None or not os.path.exists(path):
        return []
    found: list[dict[str, Any]] = json.loads(pathlib.Path(path).read_text())["results"]
    return found


def save_results(path: str | None, results: list[dict[str, Any]]) -> None:
    """Write results in one piece: a run that is killed leaves the file of the one before."""
    if path is not None:
        write_results(f"{path}.part", results)
        os.replace(f"{path}.part", path)

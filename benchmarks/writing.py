"""How benchmarks write down what they measured."""

from __future__ import annotations

import json
import platform
from typing import Any

import torch


def write_results(path: str | None, results: list[dict[str, Any]]) -> None:
    """Results and what they were measured on, as JSON; nothing without a path."""
    if path is None:
        return
    where = {"machine": platform.processor(), "torch": torch.__version__, "threads": torch.get_num_threads()}
    with open(path, "w") as file:
        json.dump({**where, "results": results}, file, indent=1)

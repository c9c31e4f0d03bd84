"""Steps in the logs of TENSILE's authors: several times as long as the figures of their card predict."""

from __future__ import annotations

import dataclasses

from elbowroom.ir.costs import Costs

LOGGED_SECONDS = {
    "VGG-16": 29.1 / 50, "Inception-v3": 18.2 / 50, "Inception-v4": 32.8 / 50, "ResNet-50": 19.0 / 50,
    "DenseNet-121": 60.6 / 50,
}  # fmt: skip
"""A plain step with 16 samples."""


def slow_down(costs: Costs, factor: float) -> Costs:
    """Return costs with longer op times."""
    return dataclasses.replace(costs, op_seconds=tuple(each * factor for each in costs.op_seconds))

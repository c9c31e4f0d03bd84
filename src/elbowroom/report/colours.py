"""Colours of classes, choices, lanes and lines, the same in every picture."""

from __future__ import annotations

CLASS_COLOURS = {
    "parameter": "#4e79a7",
    "optimizer_state": "#76b7b2",
    "gradient": "#f28e2b",
    "buffer": "#9c755f",
    "input": "#a0a0a0",
    "activation": "#59a14f",
    "temporary": "#edc948",
    "workspace": "#b07aa1",
    "replays": "#ff9da7",
}
"""By class of bytes, from the bottom of a stack up."""

CHOICE_COLOURS = {"keep": "#59a14f", "offload": "#2f6fb0", "recompute": "#d95f8c", "-": "#b9bec6"}
"""By the decision for a storage; "-" if there is none."""

LANE_COLOURS = {
    "compute": "#7d8ca3",
    "recompute": "#d95f8c",
    "stall": "#c1121f",
    "offload": "#2f6fb0",
    "reload": "#6baed6",
    "disk": "#8c6d31",
}
"""By lane of a timeline."""

BUDGET = "#111111"
PLAIN = "#555555"
MANAGED = "#c1121f"
BOUND = "#111111"
"""Lines: the budget, the plain step, the step within the budget, and the bound."""

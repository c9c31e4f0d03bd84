"""vDNN: offload the inputs of layers while these layers run; prefetch each while a later one runs backward.

In the forward pass the copy of a layer's input begins with that layer, and at the end of the layer the step waits for
it (the barrier of both streams at every layer), so a layer takes as long as the slower of its op and its copy. The
device's copy is released with the last layer that reads it. In the backward pass each layer begins by prefetching the
input of the closest earlier layer whose input is away and not requested yet, not looking past the next convolution; at
most one copy is under way.

Policies: `all` offloads the inputs of every layer, `conv` those of convolutions, whatever the budget; `dyn` tries none,
conv and all, and takes the first that fits.

Source: M. Rhu, N. Gimelshein, J. Clemons, A. Zulfiqar, S. W. Keckler, "vDNN: virtualized deep neural networks for
scalable, memory-efficient neural network design", MICRO 2016, section III. The paper's `dyn` also chooses the
algorithms of convolutions, fastest first; a trace has one algorithm for each, so that has no counterpart here.
Inferred: what a layer is in a trace (`planner.heuristics.layers`); several inputs of one layer move together. More
favourable than the paper: the step waits for a prefetch when its layer is needed, not at the end of the layer that
requested it. What a layer saves besides its inputs (the indices of a pooling, the mask of a dropout) stays, as the
paper moves inputs only.
"""

from __future__ import annotations

import bisect
from typing import Literal

from elbowroom.ir.plan import Choice, Plan
from elbowroom.planner.heuristics.layers import Layer, find_layers
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.draft import Draft, Drafter, Option
from elbowroom.planner.schedule.timing import list_moments

Policy = Literal["none", "conv", "all"]


def make_plan(problem: Problem, *, policy: Literal["dyn", "all", "conv"] = "dyn") -> Plan:
    """Return the policy's plan; for `dyn` the first that fits, or the one with the lowest peak if none does.

    Args:
        policy: offload the inputs of all layers, of convolutions, or of as few of these kinds as fit.
    """
    drafter = problem.drafter
    tried: tuple[Policy, ...] = ("none", "conv", "all") if policy == "dyn" else (policy,)
    lowest: tuple[int, Plan] | None = None
    for each in tried:
        plan = drafter.finish(_draft(drafter, each), "vdnn", problem.budget_bytes)
        assert plan is not None  # it drops nothing
        forecast = drafter.replay.run(plan)
        if problem.fits(forecast):
            return plan
        if lowest is None or forecast.peak_bytes < lowest[0]:
            lowest = forecast.peak_bytes, plan
    assert lowest is not None
    return lowest[1]


def _draft(drafter: Drafter, policy: Policy) -> Draft:
    layers = find_layers(drafter.replay.trace)
    moved = _choose(drafter, layers, policy)
    backs = _prefetch(layers, moved)
    moments = list_moments(drafter.replay.trace)
    ticks = [layer.tick for layer in layers]
    draft: Draft = {}
    for position, storages in moved.items():
        for storage in storages:
            gap = drafter.gaps[storage, 0]
            running = bisect.bisect(ticks, gap.opens)
            barrier = bisect.bisect(moments, ticks[running]) if running < len(ticks) else len(moments)
            if barrier < len(moments):
                back = backs.get(position, gap.closes)
                draft[storage, 0] = Option(Choice.OFFLOAD, release=moments[barrier], back=back)
    return draft


def _choose(drafter: Drafter, layers: tuple[Layer, ...], policy: Policy) -> dict[int, list[int]]:
    """Return the inputs that move, by the last layer that reads them: the first to need them again."""
    last: dict[int, int] = {}
    chosen: set[int] = set()
    for position, layer in enumerate(layers):
        for storage in layer.inputs:
            if (storage, 0) not in drafter.gaps:
                continue
            last[storage] = position
            if policy == "all" or (policy == "conv" and layer.is_convolution):
                chosen.add(storage)
    moved: dict[int, list[int]] = {}
    for storage in sorted(chosen):
        moved.setdefault(last[storage], []).append(storage)
    return moved


def _prefetch(layers: tuple[Layer, ...], moved: dict[int, list[int]]) -> dict[int, int]:
    """Return, by position of a layer, the tick at which its inputs are requested; absent if no layer requests them."""
    backs: dict[int, int] = {}
    for current in reversed(range(len(layers))):
        if layers[current].backward < 0:
            continue
        for position in reversed(range(current)):
            if position in moved and position not in backs:
                backs[position] = layers[current].backward
                break
            if layers[position].is_convolution:
                break
    return backs

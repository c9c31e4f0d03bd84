"""Finds the module and the source line in which a request was refused."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from elbowroom.errors import Infeasible
from elbowroom.hooks.module_paths import ModulePaths, get_accumulated, list_raised

MOST_NODES = 64
"""Backward nodes to visit in the search for a parameter."""


@dataclasses.dataclass(frozen=True)
class _Evidence:
    """Location of an op in a backward pass: the parameter whose gradient comes next."""

    parameter: torch.Tensor | None


def note_evidence(error: Infeasible, completion: Callable[[Infeasible], None] | None = None) -> Infeasible:
    """Attach to an error what `locate_shortage` needs, where the request is refused. Returns the error.

    Args:
        completion: see `Infeasible`.
    """
    error.evidence = _Evidence(_find_nearby_parameter())
    error.completion = completion
    return error


def locate_shortage(error: Infeasible, model: torch.nn.Module) -> None:
    """Add the module and the source line to an error that has ended a step.

    Both come from the traceback. In a backward pass, whose frames are PyTorch's, the module is the one that owns the
    parameter whose gradient comes next.
    """
    evidence, error.evidence = error.evidence, None
    if not isinstance(evidence, _Evidence):
        return
    paths = ModulePaths(model)
    module, line = paths.look(list_raised(error)).origin
    nearby = None if module is not None or evidence.parameter is None else paths.find_owner(evidence.parameter)
    if nearby is None:
        error.locate(module, line)
    else:
        error.locate(nearby, line, is_near=True)


def _find_nearby_parameter() -> torch.Tensor | None:
    """Return the parameter nearest in the graph to the backward node that runs in this thread, or None."""
    node: Any = torch._C._current_autograd_node()
    queue, seen = deque([node] if node is not None else []), {id(node): node}  # keeps nodes alive: ids stay unique
    for _ in range(MOST_NODES):
        if not queue:
            break
        node = queue.popleft()
        if (parameter := get_accumulated(node)) is not None:
            return parameter
        for following, _ in node.next_functions:
            if following is not None and id(following) not in seen:
                seen[id(following)] = following
                queue.append(following)
    return None

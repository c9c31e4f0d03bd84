"""Finds the module and the line in which a request was refused."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import torch

from elbowroom.errors import Infeasible
from elbowroom.hooks.module_paths import ModulePaths, get_accumulated, list_raised

MOST_NODES = 64
"""Backward nodes that are looked at to find a parameter."""


@dataclasses.dataclass(frozen=True)
class _Evidence:
    """Evidence of where an op runs: in a backward pass, the parameter whose gradient comes next."""

    parameter: torch.Tensor | None


def note_evidence(error: Infeasible) -> Infeasible:
    """Note, where a request is refused, what `locate_shortage` needs to know. Returns the error."""
    error.evidence = _Evidence(_find_nearby_parameter())
    return error


def locate_shortage(error: Infeasible, model: torch.nn.Module) -> None:
    """Add the module to an error that has ended a step, and the line of the program.

    They are those of the functions that it has ended. In a backward pass these are PyTorch's; there the module is the
    one that has the parameter whose gradient comes next.
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
    """The parameter that is the fewest nodes away from the backward node that runs in this thread, if one does."""
    node: Any = torch._C._current_autograd_node()
    queue, seen = deque([node] if node is not None else []), {id(node): node}  # kept, so that no other has its id
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

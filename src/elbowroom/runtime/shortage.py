"""The error for an op that finds no room, with what takes the room."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from elbowroom.errors import Infeasible
from elbowroom.hooks.module_paths import ModulePaths, get_accumulated, list_raised

MOST_NODES = 64
"""Backward nodes that are looked at to find a parameter."""


@dataclasses.dataclass(frozen=True)
class _Evidence:
    """What tells where an op runs: in a backward pass, the parameter whose gradient comes next."""

    parameter: torch.Tensor | None


def explain_shortage(
    op: str,
    nbytes: int,
    missing_bytes: int,
    limit_bytes: int,
    residents: Iterable[torch.UntypedStorage],
    round_up: Callable[[int], int],
    stuck: Mapping[int, int],
    refusal: str,
) -> Infeasible:
    """Infeasible for one op: a lower bound, since nothing is known of the ops after it.

    Args:
        op, nbytes: what is about to run, and what it allocates.
        missing_bytes: how much of that does not fit into `limit_bytes`.
        residents: parameters, gradients and optimizer state.
        round_up: bytes to bytes of a block.
        stuck: bytes of what could not be moved, by storage.
        refusal: why.
    """
    state = {id(each): each for each in residents}
    state_bytes = sum(round_up(each.nbytes()) for each in state.values())
    in_the_way = [
        ("the op's own results and workspace", nbytes),
        ("parameters, gradients and optimizer state", state_bytes),
    ]
    if stuck:
        in_the_way.append((f"what cannot leave since {refusal}", sum(stuck.values())))
    error = Infeasible(
        needed_bytes=limit_bytes + missing_bytes, budget_bytes=limit_bytes, op=op, is_whole_step=False,
        in_the_way=tuple(in_the_way), state_bytes=state_bytes,
    )  # fmt: skip
    error.evidence = _Evidence(_find_nearby_parameter())
    return error


def explain_growth(requested_bytes: int, missing_bytes: int, budget_bytes: int) -> Infeasible:
    """Return the error that refuses a request in a step in which nothing may leave, since everything fitted so far."""
    error = Infeasible(
        needed_bytes=budget_bytes + missing_bytes,
        budget_bytes=budget_bytes,
        is_whole_step=False,
        op=f"a request of {requested_bytes} bytes",
        note="Nothing moves in this step, since it began like those in which everything fitted. The next one is "
        "watched from its beginning; with always_watch=True all are.",
    )
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

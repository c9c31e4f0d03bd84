"""The error for an op that finds no room, with what takes the room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from elbowroom.errors import Infeasible


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
    return Infeasible(
        needed_bytes=limit_bytes + missing_bytes, budget_bytes=limit_bytes, op=op, is_whole_step=False,
        in_the_way=tuple(in_the_way), state_bytes=state_bytes,
    )  # fmt: skip

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


def explain_growth(requested_bytes: int, missing_bytes: int, budget_bytes: int) -> Infeasible:
    """Return the error that refuses a request in a step in which nothing may leave, since everything fitted so far."""
    return Infeasible(
        needed_bytes=budget_bytes + missing_bytes,
        budget_bytes=budget_bytes,
        is_whole_step=False,
        op=f"a request of {requested_bytes} bytes, in a step that began like those in which everything fitted, so that "
        "nothing moves in it (the next one is watched from its beginning; with always_watch=True all are)",
    )

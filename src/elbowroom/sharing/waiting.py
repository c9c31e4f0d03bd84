"""Explains to a waiting job who holds the device, and how long it may take."""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.sharing.job_record import JobRecord
from elbowroom.sharing.lease_table import Remainder
from elbowroom.units import format_bytes, format_seconds

MOST_NAMED = 4
"""Holders named in a message; the others are counted."""


def explain_wait(
    job: JobRecord,
    jobs: Sequence[JobRecord],
    remainders: Sequence[Remainder],
    outside_bytes: int,
    quantum_seconds: float | None,
) -> str:
    """Return a sentence for a job without a lease.

    Args:
        jobs: all jobs of the broker.
        remainders: of jobs without a connection.
        outside_bytes: held by programs that do not know of the broker.
        quantum_seconds: after which the job is due; None if no job is paused for another.
    """
    holders = sorted((each for each in jobs if each.held_bytes and each is not job), key=lambda each: -each.held_bytes)
    named = [f"{each.name} (pid {each.pid}) {format_bytes(each.held_bytes)}" for each in holders[:MOST_NAMED]]
    if len(holders) > MOST_NAMED:
        rest_bytes = sum(each.held_bytes for each in holders[MOST_NAMED:])
        named.append(f"{len(holders) - MOST_NAMED} others {format_bytes(rest_bytes)}")
    named += [f"{each.name} (pid {each.pid}, disconnected) {format_bytes(each.nbytes)}" for each in remainders]
    if outside_bytes:
        named.append(f"programs outside of the broker {format_bytes(outside_bytes)}")
    text = f"{job.name} waits for {format_bytes(job.floor_bytes)} of the shared device"
    if named:
        text += ", which is held by: " + "; ".join(named)
    endings = [
        (each.steps_left - each.steps) * each.step_seconds
        for each in holders
        if each.steps_left is not None and each.step_seconds
    ]
    if endings:
        text += f". At the present pace the first of them ends in {format_seconds(max(0.0, min(endings)))}"
    if quantum_seconds is None:
        return f"{text}. No job is paused for it: it runs once those before it have ended."
    return f"{text}. It is due to run after {format_seconds(quantum_seconds)} of waiting."

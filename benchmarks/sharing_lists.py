"""Job lists for the simulation of shared devices: real fronts, arrivals and lengths from a seed."""

from __future__ import annotations

import json
import pathlib
import random
from typing import Any

FRONTS = pathlib.Path(__file__).parent / "results" / "sharing_fronts.json"

DEVICE_BYTES = 12 << 30
"""Less than a fifth of the plain peaks of `JOBS` jobs."""

JOBS = 24

BUSY_SHARES = (0.05, 0.35)
"""Share of a plain step in which a job computes on the device; otherwise it loads data, logs, evaluates, or waits."""

PLAIN_SECONDS = (6.0, 0.7)
"""Mean and deviation of the logarithm of a job's seconds at its fastest: a median of 400 s."""

SECONDS_BETWEEN_ARRIVALS = 10.0


def load_fronts() -> list[dict[str, Any]]:
    """Return the jobs that `sharing_fronts.py` has written."""
    found: list[dict[str, Any]] = json.loads(FRONTS.read_text())["results"]
    return found


def make_list(
    seed: int, *, jobs: int = JOBS, busy_shares: tuple[float, float] = BUSY_SHARES, device_bytes: int = DEVICE_BYTES
) -> dict[str, Any]:
    """Return a job list, as `elbowroom share --simulate` reads it."""
    draw = random.Random(seed)
    arrival = 0.0
    listed = []
    for number in range(jobs):
        kind = draw.choice(load_fronts())
        _, plain_seconds, plain_busy = kind["front"][-1]
        host_seconds = plain_busy / draw.uniform(*busy_shares) - plain_busy
        front = [[nbytes, seconds + host_seconds, busy] for nbytes, seconds, busy in kind["front"]]
        steps = max(1, round(draw.lognormvariate(*PLAIN_SECONDS) / (plain_seconds + host_seconds)))
        name = f"{kind['spec'].partition(':')[2]}-{number}"
        listed.append({
            "name": name, "arrival_seconds": arrival, "steps": steps, "front": front,
            "state_bytes": kind["state_bytes"],
        })  # fmt: skip
        arrival += draw.expovariate(1 / SECONDS_BETWEEN_ARRIVALS)
    return {"device_bytes": device_bytes, "jobs": listed}

"""Compares predictions of a step that has not run with the step: python benchmarks/cold_start.py, twice or more.

Op times come from the roofline alone ("cold"), or from what earlier runs measured on this machine where there is such a
time ("stored"). Every run adds its own.
"""

from __future__ import annotations

import statistics

import elbowroom
from elbowroom import workloads
from elbowroom.cost.price import price
from elbowroom.hardware.past_times import PastTimes

JOBS = {"transformers:gpt2": {"batch": 2, "layers": 2}, "torchvision:resnet18": {"batch": 4}}
STEPS, FIRST_STEPS = 10, 4
BUDGET = "16GiB"


def main() -> None:
    """Print the seconds of each job: predicted cold, predicted with stored times, and measured."""
    profile = elbowroom.probe("cpu")
    for spec, options in JOBS.items():
        job = workloads.build(spec, device="cpu", **options)
        trace = elbowroom.capture(job.step, job.model, job.optimizer)
        cold = sum(price(trace, profile).op_seconds)
        stored = sum(price(trace, profile, past=PastTimes(profile).load()).op_seconds)
        with elbowroom.fit(job.model, job.optimizer, BUDGET, profile=profile) as room:
            for _ in range(STEPS):
                with room.step():
                    job.step()
            measured = statistics.median(record.seconds for record in room.journal().steps[FIRST_STEPS:])
        print(f"{spec}: cold {cold:.2f} s, stored {stored:.2f} s, measured {measured:.2f} s")


if __name__ == "__main__":
    main()

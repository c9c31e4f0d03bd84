"""How long does planning take, and in how much memory, by the number of ops?

    elbowroom capture transformers:gpt2 --layers 170 --batch 4 --sequence-length 512 -o gpt2-170.json.gz
    python benchmarks/long_traces.py gpt2-170.json.gz ... [--hardware v100] [--budgets 60%peak] [--strategy auto]
        [--output FILE.json]

Traces are read and priced before the clock starts, and one small plan is made, so that the machine code is loaded.
Timed is the verb `plan`, from the trace to the judged plan. Memory is the most that this process has ever had resident,
torch not being in it.
"""

from __future__ import annotations

import argparse
import resource
import time

from writing import write_results

import elbowroom
from elbowroom.cli.lists import read_budgets
from elbowroom.hardware.shipped import load_shipped
from elbowroom.ir.trace import Trace
from elbowroom.planner.bounds.bound import find_bound
from elbowroom.planner.problem import pose


def main() -> None:
    """Plan, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--hardware", default="v100")
    parser.add_argument("--budgets", default="60%peak")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--output")
    options = parser.parse_args()
    profile = load_shipped(options.hardware)
    results = []
    for place, path in enumerate(options.traces):
        trace = elbowroom.load(Trace, path)
        costs = elbowroom.price(trace, profile)
        peak_bytes = pose(trace, costs, 1).plain.peak_bytes
        for budget in read_budgets(options.budgets, peak_bytes=peak_bytes):
            if not place and not results:
                elbowroom.plan(trace, costs, budget, strategy=options.strategy)
            begin = time.perf_counter()
            made = elbowroom.plan(trace, costs, budget, strategy=options.strategy)
            seconds = time.perf_counter() - begin
            step = elbowroom.simulate(trace, costs, made).step_seconds
            gap = find_bound(pose(trace, costs, budget)).over(step)
            resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            results.append({
                "trace": trace.name, "ops": len(trace.ops), "hardware": options.hardware, "strategy": options.strategy,
                "budget_share": budget / peak_bytes, "planning_seconds": seconds, "gap": gap,
                "resident_bytes": resident_bytes,
            })  # fmt: skip
            print(f"{trace.name}, {len(trace.ops)} ops at {budget / peak_bytes:.0%}: planned in {seconds:.2f} s, "
                  f"{gap:.2%} over the bound, {resident_bytes / 1e9:.2f} GB resident", flush=True)  # fmt: skip
    if options.output:
        write_results(options.output, results)


if __name__ == "__main__":
    main()

"""Memory of real ranks beside its forecast: two processes with gloo on this machine's CPU.

    python benchmarks/ranks_on_gloo.py [--output FILE.json]

Six blocks of 8 MiB with AdamW, under `DistributedDataParallel` and `fully_shard`, each with and without what saves
memory.
A rank's peak is that of its last steps in a room whose budget everything fits, as the room's own ledger counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from writing import write_results

import elbowroom
from elbowroom.hardware.shipped import load_network, load_shipped
from elbowroom.ir.costs import Costs
from elbowroom.ir.parallelism import Parallel, Parallelism
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace
from elbowroom.simulator.ranks.simulate_ranks import simulate_ranks

WIDTH, BLOCKS, SAMPLES, RANKS, STEPS = 512, 6, 256, 2, 6
CASES: tuple[tuple[Parallel, dict[str, bool]], ...] = (
    (Parallel.DATA, {"gradient_as_bucket_view": False}),
    (Parallel.DATA, {"gradient_as_bucket_view": True}),
    (Parallel.SHARDED, {"reshard_after_forward": True}),
    (Parallel.SHARDED, {"reshard_after_forward": False}),
)


class Net(nn.Module):
    """Residual blocks of two products, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks, one after another."""
        for block in self.h:
            x = x + block(x)
        return self.head(x)


def spread(model: nn.Module, kind: Parallel, options: dict[str, bool]) -> nn.Module:
    """The model on all ranks."""
    if kind is Parallel.DATA:
        return nn.parallel.DistributedDataParallel(model, **options)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.h:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


def run_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """One step on random numbers."""
    loss = model(torch.randn(SAMPLES, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def run_rank(rank: int, folder: str, kind: Parallel, options: dict[str, bool], found: Any) -> None:
    """Train in a room, and report the peak of the last step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    model = spread(Net(), kind, options)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with elbowroom.fit(model, optimizer, "8GiB", always_watch=True) as room:
        for _ in range(STEPS):
            with room.step():
                run_step(model, optimizer)
        found.put((rank, room.journal().steps[-1].peak_bytes))
    dist.barrier()
    dist.destroy_process_group()


def measure(kind: Parallel, options: dict[str, bool]) -> list[int]:
    """The peak of each rank."""
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run_rank, args=(rank, folder, kind, options, found), daemon=True)
            for rank in range(RANKS)
        ]
        for each in ranks:
            each.start()
        peaks = dict(found.get(timeout=150) for _ in ranks)
        for each in ranks:
            each.join()
    return [peaks[rank] for rank in range(RANKS)]


def price_step() -> tuple[Trace, Costs]:
    """The step of one device; blocks are rounded up as on a CPU."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    trace = elbowroom.capture(lambda: run_step(model, optimizer), model, optimizer, name="six blocks")
    return trace, dataclasses.replace(elbowroom.price(trace, load_shipped("h100")), alignment_bytes=64)


def main() -> None:
    """Print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="write the results to this file")
    arguments = parser.parse_args()
    trace, costs = price_step()
    plan = Plan(trace_digest=costs.trace_digest, strategy="keep_all", budget_bytes=0, decisions=(), segments=())
    results = []
    for kind, options in CASES:
        parallelism = Parallelism(kind=kind, ranks=RANKS, **options)
        forecast = simulate_ranks(trace, costs, plan, load_network("pcie4-eth25"), parallelism).peak_bytes
        peaks = measure(kind, options)
        shares = ", ".join(f"{peak / forecast:.4f}" for peak in peaks)
        print(f"{kind:8}{options!s:36} forecast {forecast / 2**20:7.2f} MiB, measured {shares} of it", flush=True)
        results.append({"kind": kind, "options": options, "forecast_bytes": forecast, "peak_bytes": peaks})
    write_results(arguments.output, results)


if __name__ == "__main__":
    main()

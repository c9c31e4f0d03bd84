"""The function `simulate_ranks`: forecasts one step of several ranks on a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elbowroom.ir.costs import Costs
from elbowroom.ir.network import Network
from elbowroom.ir.parallelism import Parallel, Parallelism, RanksForecast
from elbowroom.ir.plan import Plan
from elbowroom.ir.sliced_trace import apply_cuts
from elbowroom.ir.trace import Trace
from elbowroom.simulator.ranks.data_parallel import simulate_data_parallel
from elbowroom.simulator.ranks.pipelined import simulate_pipelined
from elbowroom.simulator.ranks.rank_step import RankStep
from elbowroom.simulator.ranks.sharded import simulate_sharded

_SIMULATIONS: Mapping[Parallel, Callable[[RankStep, Network, Parallelism], RanksForecast]] = {
    Parallel.DATA: simulate_data_parallel,
    Parallel.SHARDED: simulate_sharded,
    Parallel.PIPELINED: simulate_pipelined,
}


def simulate_ranks(
    trace: Trace,
    costs: Costs,
    plan: Plan,
    network: Network,
    parallelism: Parallelism,
    *,
    host_bytes: int | None = None,
) -> RanksForecast:
    """Forecast one step of a job whose ranks repeat or share the step of `trace` under `plan`.

    One data-parallel or sharded rank has the forecast of `simulate`. The trace is of one forward pass, one backward
    pass and one update, as one device does them; in a pipeline it is of one micro-batch.

    Args:
        host_bytes: as for `simulate`.

    Raises:
        UsageError: the ranks do not fill the network's nodes, or are no multiple of the stages; the model has fewer
            blocks than stages; the step has no gradients; or the plan moves the model's state.
        TraceError: costs or plan belong to another trace.
    """
    step = RankStep(*apply_cuts(trace, costs, plan), host_bytes=host_bytes)
    return _SIMULATIONS[parallelism.kind](step, network, parallelism)

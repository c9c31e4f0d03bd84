"""TENSILE: one peak over all jobs, lowered largest block first.

Every job starts at its plain peak. While the sum of the peaks exceeds the device, the largest reduction that any front
offers is taken, whatever it costs in seconds. Jobs that do not fit at their floors wait, at most n (q + 2 s).

Inferred: TENSILE plans inside one process and knows each tensor; here a step of a front stands for the tensors that
leave between its two points. Its weights limit how much of a job is swapped; here they divide the size of a reduction.

Source: K. Zhang, H. Wang, H. Hu, S. Zou, J. Qiu, T. Li, Z. Wang, "TENSILE: A tensor granularity dynamic GPU memory
scheduling method toward multiple dynamic workloads system", IEEE TKDE, 2023 (arXiv 2105.13336).
"""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.sharing.demand import Demand, admit_in_order, sort_by_turn


def allot(demands: Sequence[Demand], capacity_bytes: int) -> dict[int, int]:
    """Admit jobs by turn, and lower the sum of their peaks until it fits."""
    admitted = admit_in_order(sort_by_turn(demands), capacity_bytes)
    places = {each.job: len(each.front) - 1 for each in admitted}

    def count_bytes(demand: Demand) -> int:
        return demand.front[places[demand.job]].nbytes

    def count_reduction(demand: Demand) -> float:
        place = places[demand.job]
        return (demand.front[place].nbytes - demand.front[place - 1].nbytes) / demand.weight if place else 0.0

    while sum(map(count_bytes, admitted)) > capacity_bytes:
        places[max(admitted, key=count_reduction).job] -= 1
    return {each.job: count_bytes(each) for each in admitted}

"""The model's state by class: where it is at the forecast peak, and the seconds that moving it takes."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence

from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.lifetimes import Lifetimes
from elbowroom.ir.plan import Plan
from elbowroom.ir.state import MoveKind, StateMove, list_away, list_moves
from elbowroom.ir.trace import Role, Trace
from elbowroom.report.columns import align, wrap
from elbowroom.simulator.clock import Lanes
from elbowroom.simulator.planned import PreparedTrace
from elbowroom.units import format_bytes, format_seconds

CLASSES = {
    Role.PARAMETER: "parameters",
    Role.GRADIENT: "gradients",
    Role.OPTIMIZER_STATE: "optimizer state",
    Role.BUFFER: "buffers, other",
}
"""Names of the classes. The last one has memory outside of the step's ops, too."""

DISK = "disk"
"""Name of the last tier in profiles."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateClass:
    """One class of the model's state under a plan, forecast.

    Attributes:
        name: one of `CLASSES`.
        device_bytes, host_bytes, disk_bytes: where its bytes are at the peak, each counted once.
        offloaded_bytes, reloaded_bytes: moved in each step.
        hidden_seconds: part of its transfers that does not lengthen the step.
        exposed_seconds: seconds by which its moves lengthen the step: waits for its transfers, and compute time that is
            lost while bytes are copied.
    """

    name: str
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    offloaded_bytes: int
    reloaded_bytes: int
    hidden_seconds: float
    exposed_seconds: float


def count_state(
    trace: Trace, costs: Costs, plan: Plan, forecast: Forecast, host_bytes: int | None = None
) -> tuple[StateClass, ...]:
    """Return the classes of the model's state that the step has, in the order of `CLASSES`.

    Args:
        host_bytes: as for `simulator.simulate.simulate`.

    Cost: one simulation of the plan.
    """
    return _StateCount(trace, costs, plan, forecast, host_bytes).list_classes()


class _StateCount:
    """Bytes and seconds of the state's classes."""

    def __init__(self, trace: Trace, costs: Costs, plan: Plan, forecast: Forecast, host_bytes: int | None) -> None:
        self._trace = trace
        self._costs = costs
        prepared = PreparedTrace(trace, costs, host_bytes=host_bytes)
        self._overflow = prepared.find_overflow(plan)
        self._state_copies = prepared.follow_state(plan)
        self._held: Counter[tuple[Role, str]] = Counter()
        self._moved: Counter[tuple[Role, MoveKind]] = Counter()
        self._seconds: defaultdict[Role, float] = defaultdict(float)
        self._exposed: defaultdict[Role, float] = defaultdict(float)
        self._count_places(plan, forecast.peak_tick)
        for move in list_moves(trace, plan):
            if move.kind in (MoveKind.COPY, MoveKind.RELOAD):
                self._count_move(move)
        for storage, seconds in self._state_copies.exposed_seconds.items():
            self._exposed[trace.storages[storage].role] += seconds

    def list_classes(self) -> tuple[StateClass, ...]:
        roles = {home.role for home in self._trace.storages}
        return tuple(
            StateClass(
                name=name,
                device_bytes=self._held[role, "device"],
                host_bytes=self._held[role, "host"],
                disk_bytes=self._held[role, DISK],
                offloaded_bytes=self._moved[role, MoveKind.COPY],
                reloaded_bytes=self._moved[role, MoveKind.RELOAD],
                hidden_seconds=max(0.0, self._seconds[role] - self._exposed[role]),
                exposed_seconds=self._exposed[role],
            )
            for role, name in CLASSES.items()
            if role in roles
        )

    def _count_places(self, plan: Plan, tick: int) -> None:
        lifetimes, away = Lifetimes(self._trace, plan), list_away(self._trace, plan)
        for home in self._trace.storages:
            if home.role not in CLASSES:
                continue
            nbytes = -(-home.nbytes // self._costs.alignment_bytes) * self._costs.alignment_bytes
            if lifetimes.is_there(home.id, tick):
                self._held[home.role, "device"] += nbytes
            elif any(begin <= tick < end for begin, end in away.get(home.id, ())):
                self._held[home.role, DISK if self._is_on_disk(home.id) else "host"] += nbytes

    def _count_move(self, move: StateMove) -> None:
        home, link = self._trace.storages[move.storage], self._costs.link
        self._moved[home.role, move.kind] += home.nbytes
        is_copy = move.kind is MoveKind.COPY
        overflow = self._overflow
        if overflow is None or home.id not in self._state_copies.on_disk:
            seconds = (offload_seconds if is_copy else reload_seconds)(link, home.nbytes)
        elif is_copy:
            seconds = Lanes(link).send_through(overflow.disk, overflow.piece_bytes, home.nbytes, 0.0)
        else:
            _, seconds = Lanes(link).fetch_through(overflow.disk, overflow.piece_bytes, home.nbytes, 0.0)
        self._seconds[home.role] += seconds

    def _is_on_disk(self, storage: int) -> bool:
        return self._costs.link.lower == DISK or storage in self._state_copies.on_disk


def tabulate_state(classes: Sequence[StateClass]) -> list[str]:
    """Return a table of the classes, without columns in which all is zero; moved bytes count both ways."""
    rows = [["", "on device", "on host", "on disk", "moved", "hidden", "exposed"]]
    for each in classes:
        moved_bytes = each.offloaded_bytes + each.reloaded_bytes
        places = (each.device_bytes, each.host_bytes, each.disk_bytes, moved_bytes)
        cells = [format_bytes(nbytes) if nbytes else "-" for nbytes in places]
        cells += [format_seconds(each) if each else "-" for each in (each.hidden_seconds, each.exposed_seconds)]
        rows.append([each.name, *cells])
    used = [column for column in range(1, len(rows[0])) if column == 1 or any(row[column] != "-" for row in rows[1:])]
    what = "The model's state at the forecast peak"
    if len(used) > 1:
        what += ", and its moves in a step (exposed: seconds by which they lengthen it)"
    table = align([[row[0], *(row[column] for column in used), ""] for row in rows], "<" + ">" * len(used), "  ")
    return [*wrap(what), "", *table]

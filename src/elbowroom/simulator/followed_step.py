"""Details of a simulated step, for pictures and exports."""

from __future__ import annotations

import dataclasses

from elbowroom.ir.forecast import Forecast
from elbowroom.ir.timeline import Activity
from elbowroom.simulator.allocator_model import Rerun, Stay


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FollowedStep:
    """A simulated step in detail.

    Attributes:
        activities: transfers, waits and replays, on the clock of `entry_seconds`.
        entry_seconds: begin of each entry without the time outside of ops, and the end of the last one.
        stays: blocks on the device, except for those inside ops and replays.
        reruns: replays.
    """

    forecast: Forecast
    activities: tuple[Activity, ...]
    entry_seconds: tuple[float, ...]
    stays: tuple[Stay, ...]
    reruns: tuple[Rerun, ...]

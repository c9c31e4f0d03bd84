"""RankStep: the step of one device that all ranks repeat or share, with its phases, gradients and live bytes.

forward pass | backward pass                     | update
0            | backward: the first need          | update: the first op of the optimizer, or on all gradients
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from elbowroom.cost.shapes import is_floating
from elbowroom.errors import UsageError
from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import STATE_ROLES, Op, Role, Trace
from elbowroom.simulator.allocator_model import Stay
from elbowroom.simulator.planned import PreparedTrace
from elbowroom.simulator.ranks.turns import list_gradients, list_touched

LiveBytes = npt.NDArray[np.int64]


class RankStep:
    """Step of one device under a plan, as the ranks of a job carry it out.

    Attributes:
        forecast: of the step alone on its device.
        stays: blocks on the device.
        rounded: bytes of each storage, rounded up as by the device's allocator.
        backward, update: ticks at which these phases begin.
        gradients: in the order in which they are ready.

    Raises:
        UsageError: the step has no backward pass or makes no gradients, or the plan moves the model's state.
        TraceError: the costs or the plan belong to another trace.
    """

    def __init__(self, trace: Trace, costs: Costs, plan: Plan, host_bytes: int | None = None) -> None:
        if plan.state:
            raise UsageError(
                "this plan moves the model's state, which the ranks of a job share or shard: give a plan made with "
                "--manages activations"
            )
        self.trace, self.costs = trace, costs
        prepared = PreparedTrace(trace, costs, host_bytes=host_bytes)
        followed = prepared.follow(plan)
        self.forecast: Forecast = followed.forecast
        self.stays = followed.stays
        self.rounded: list[int] = prepared.rounded.tolist()
        if not trace.needs:
            raise UsageError(
                f"{trace.name} has no backward pass, so its ranks have no gradients to exchange: capture a step of "
                "training"
            )
        self.backward = trace.needs[0].tick
        self.gradients = list_gradients(trace)
        if not self.gradients:
            raise UsageError(
                f"no op of {trace.name} makes the gradient of a parameter, so its ranks have nothing to exchange: "
                "capture a step whose backward pass trains parameters"
            )
        self.update = self.gradients[-1].ready

    @functools.cached_property
    def entry_seconds(self) -> npt.NDArray[np.float64]:
        """Duration of each entry, time outside of ops included."""
        return np.diff(np.asarray(self.forecast.begin_seconds))

    @functools.cached_property
    def dtypes(self) -> Mapping[int, str]:
        """Floating dtype of each storage that has one.

        Ops on lists show their storages as bytes. What only such an op touches, as a fused optimizer its state, has the
        dtype of its module's parameter of as many bytes.
        """
        found: dict[int, str] = {}
        for op in self.trace.ops:
            for view in (*op.reads, *op.writes):
                if is_floating(view.dtype):
                    found.setdefault(view.storage, view.dtype)
        weights = {
            (home.module, home.nbytes): found[home.id]
            for home in self.trace.storages
            if home.role is Role.PARAMETER and home.id in found
        }
        for home in self.trace.storages:
            if home.role in STATE_ROLES and (home.module, home.nbytes) in weights:
                found.setdefault(home.id, weights[home.module, home.nbytes])
        return found

    def round_up(self, nbytes: int) -> int:
        """Return bytes rounded up as by the device's allocator."""
        alignment_bytes = self.costs.alignment_bytes
        return -(-nbytes // alignment_bytes) * alignment_bytes

    def count_live(self, stays: Iterable[Stay], nbytes: Mapping[int, int] | None = None) -> LiveBytes:
        """Return the bytes of some blocks on the device during each entry.

        Args:
            nbytes: of each storage, in place of its own.
        """
        change = np.zeros(self.trace.end + 1, dtype=np.int64)
        for stay in stays:
            size = self.rounded[stay.storage] if nbytes is None else nbytes[stay.storage]
            if stay.end > max(stay.begin, 0):
                change[max(stay.begin, 0)] += size
                change[min(stay.end, self.trace.end)] -= size
        return np.cumsum(change[:-1])


def touches_state(trace: Trace, op: Op) -> bool:
    """Return True if an op reads or writes parameters, gradients, buffers or optimizer state."""
    return any(trace.storages[storage].role in STATE_ROLES for storage in list_touched(op))

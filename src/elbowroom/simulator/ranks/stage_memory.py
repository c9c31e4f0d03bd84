"""Memory of one stage of a pipeline, from the blocks of the step of one device.

peak = what the stage holds while it works on one micro-batch
       + (micro-batches alive - 1) * what one holds between its forward and its backward pass
       + gradients, if they are added up over micro-batches, and one more while it is added
"""

from __future__ import annotations

import numpy as np

from elbowroom.ir.trace import PERSISTENT_ROLES, Role
from elbowroom.simulator.ranks.pipeline_stages import PipelineStages
from elbowroom.simulator.ranks.rank_step import RankStep


class StageMemory:
    """Bytes that one stage holds.

    A storage belongs to the stages that own it (`PipelineStages.owners`); workspace and replays to that of their entry.
    What a stage receives counts in addition, as its sender's copy is not seen to be freed.

    Attributes:
        activation_bytes: held by one micro-batch between its forward and its backward pass.
    """

    def __init__(self, step: RankStep, stages: PipelineStages, stage: int) -> None:
        self._step = step
        storages = step.trace.storages
        nbytes = dict(enumerate(step.rounded)) | {
            each: step.round_up(int(stages.count_held(each, stage))) for each in stages.spread
        }
        received = stages.cut_bytes[stage - 1] if stage else 0
        own = [stay for stay in step.stays if stage in stages.owners[stay.storage]]
        gradients = [stay for stay in own if storages[stay.storage].role is Role.GRADIENT]
        is_here = (stages.entry_stages == stage) | (np.arange(step.trace.end) >= step.update)
        within_ops = np.asarray(step.forecast.live_bytes) - step.count_live(step.stays)
        self._gradients = step.count_live(gradients)
        self._others = step.count_live(own, nbytes) - self._gradients + within_ops * is_here + received
        self._is_here = is_here
        self._largest_gradient = max((step.rounded[stay.storage] for stay in gradients), default=0)
        forward = np.flatnonzero(is_here[: step.backward])
        turn = int(forward[-1]) + 1 if len(forward) else 0
        self.activation_bytes = received + sum(
            step.rounded[stay.storage]
            for stay in own
            if stay.begin >= 0 and stay.begin < turn < stay.end and storages[stay.storage].role not in PERSISTENT_ROLES
        )

    def count_peak(self, alive: int, *, adds_up: bool) -> int:
        """Return the most bytes at once.

        Args:
            alive: micro-batches whose activations are held, at most.
            adds_up: whether gradients are added up over several micro-batches, and so are there all the time.
        """
        live = self._others.copy()
        live[: self._step.update] += (alive - 1) * self.activation_bytes
        if adds_up:
            live += int(max(self._gradients))
            live[self._step.backward : self._step.update] += self._largest_gradient
        else:
            live += self._gradients
        return int(max(live[self._is_here]))

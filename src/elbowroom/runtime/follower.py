"""Holds a running step against the trace that its plan was made for: the calls of the hooks are the program counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from elbowroom.hooks.hidden import Pausable
from elbowroom.ir.trace import Trace
from elbowroom.runtime.residence import Residence


class Observer(Pausable, Protocol):
    """Told what autograd does, while a step is being captured."""

    def saved(self, tensor: torch.Tensor) -> int: ...
    def needed(self, save: int, given: torch.Tensor) -> None: ...
    def save_released(self, save: int) -> None: ...


class Follower:
    """Gives saves and needs the ticks they have in the trace, for as long as the step follows it.

    Args:
        trace: what is expected; without one nothing is, and ticks only count.
        min_bytes: of smaller storages it does not matter whether they are plain.
        bound: the residences of this step by the trace's ids, which grow as saves are recognised.
        on_drift: told why, once, when the step leaves the trace.
    """

    def __init__(
        self, trace: Trace | None, min_bytes: int, bound: dict[int, Residence], on_drift: Callable[[str], None]
    ) -> None:
        self._trace, self._min_bytes, self._bound, self._on_drift = trace, min_bytes, bound, on_drift

    @property
    def is_following(self) -> bool:
        """Whether the step has been the trace's so far."""
        return self._trace is not None

    def stop(self, why: str) -> None:
        """The step is not the trace's."""
        if self._trace is not None:
            self._trace = None
            self._on_drift(why)

    def follow_save(self, index: int, residence: Residence | None) -> int:
        """The tick of a save. If it is the trace's, its residence is bound to the trace's storage."""
        trace = self._trace
        if trace is None:
            return index
        if index >= len(trace.saves):
            self.stop(f"it saves more than {index} tensors")
            return index
        save = trace.saves[index]
        home = trace.storages[save.storage]
        if residence is not None:
            bound = self._bound.get(home.id)
            if residence.nbytes != home.nbytes:
                self.stop(f"save {index} has {residence.nbytes} bytes, where the trace has {home.nbytes}")
            elif bound is not residence and (bound is not None or residence.id not in (-1, home.id)):
                self.stop(f"save {index} is of another storage than in the trace")
            elif bound is None:
                residence.id = home.id
                self._bound[home.id] = residence
        elif home.nbytes >= self._min_bytes:  # nothing rests on smaller ones: attention's seed lies on the host on CUDA
            self.stop(f"save {index} is no plain tensor, where the trace has {home.nbytes} bytes")
        return save.tick

    def follow_need(self, index: int, save: int) -> int:
        """The tick of a need, the step's `index`th, which asks for a `save`."""
        trace = self._trace
        if trace is None:
            return index
        if index >= len(trace.needs):
            self.stop("it asks for saved tensors again")
            return index
        need = trace.needs[index]
        if need.save != save:
            self.stop(f"need {index} is of save {save}, where the trace has save {need.save}")
        return need.tick

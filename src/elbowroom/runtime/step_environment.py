"""Environment of a room's steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from elbowroom.errors import Infeasible
from elbowroom.hooks.ledger import Ledger
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.residency.access_history import AccessHistory
from elbowroom.runtime.sliced_ops import SlicedOps
from elbowroom.runtime.state_pager import StatePager
from elbowroom.runtime.state_tensors import NamedTensor
from elbowroom.runtime.transfers import Transfers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepEnvironment:
    """Environment of a step, the same for all steps of a room until its budget changes.

    Attributes:
        device: device with the budget. Storages on other devices are ignored.
        budget_bytes: bytes that a step may hold there.
        ledger: counts the bytes that the room holds, and frees memory before a request would exceed the limit.
        transfers: moves storages to the tier below and back.
        list_residents: returns parameters, gradients, buffers and optimizer state.
        profile: profile of this machine.
        history: access history of earlier steps, for the policy. Each step is added, unless it is captured.
        policy: name of the online policy, a member of `residency.policies`.
        min_bytes: smaller storages stay on the device, unless a plan moves them.
        pager: moves model state, unless that stays on the device, and results of ops that run in slices.
        sliced_ops: runs ops in slices that have no room as a whole; None if none do.
        list_kept: returns parameters, buffers and optimizer state, as the job holds them.
        name_residents: returns what `list_residents` does with roles, labels and modules.
        complete_error: completion of the errors of the step, see `Infeasible`.
    """

    device: torch.device
    budget_bytes: int
    ledger: Ledger
    transfers: Transfers
    list_residents: Callable[[], list[torch.Tensor]]
    profile: HardwareProfile
    history: AccessHistory
    policy: str
    min_bytes: int
    pager: StatePager | None = None
    sliced_ops: SlicedOps | None = None
    list_kept: Callable[[], list[torch.Tensor]] = list
    name_residents: Callable[[], Sequence[NamedTensor]] = tuple
    complete_error: Callable[[Infeasible], None] | None = None

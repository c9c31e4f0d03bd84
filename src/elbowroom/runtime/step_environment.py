"""The environment that the steps of a room run in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from elbowroom.hooks.ledger import Ledger
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.residency.access_history import AccessHistory
from elbowroom.runtime.state_pager import StatePager
from elbowroom.runtime.transfers import Transfers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepEnvironment:
    """Environment of a step, the same for all steps of a room until its budget changes.

    Attributes:
        device: the one whose memory is kept within the budget. Storages elsewhere are left alone.
        budget_bytes: that a step may hold there.
        ledger: counts what the room holds, and asks for room before a request that goes over its limit.
        transfers: moves storages to the tier below and back.
        list_residents: returns parameters, gradients, buffers and optimizer state.
        profile: of this machine.
        history: what earlier steps taught the policy. Each step is added, unless it is captured.
        policy: name of the online policy, a member of `residency.policies`.
        min_bytes: smaller storages stay on the device, unless a plan moves them.
        pager: moves model state; None if that stays on the device.
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

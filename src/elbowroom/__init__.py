"""Elbowroom fits a PyTorch training job into the memory you have.

`import elbowroom` is instant: each verb is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elbowroom.api import capture as capture
    from elbowroom.api import fit as fit
    from elbowroom.api import smallest_budget as smallest_budget
    from elbowroom.cost.price import price as price
    from elbowroom.cuda_allocator.use import use_planned_allocator as use_planned_allocator
    from elbowroom.hardware.probe import probe as probe
    from elbowroom.ir.check import check as check
    from elbowroom.ir.files import load as load
    from elbowroom.ir.files import save as save
    from elbowroom.planner.problem import plan as plan
    from elbowroom.shared_lease import wait_for_lease as wait_for_lease
    from elbowroom.simulator.simulate import simulate as simulate

__version__ = "0.1.0"

_VERBS = {
    "fit": "elbowroom.api",
    "capture": "elbowroom.api",
    "smallest_budget": "elbowroom.api",
    "probe": "elbowroom.hardware.probe",
    "price": "elbowroom.cost.price",
    "plan": "elbowroom.planner.problem",
    "check": "elbowroom.ir.check",
    "simulate": "elbowroom.simulator.simulate",
    "save": "elbowroom.ir.files",
    "load": "elbowroom.ir.files",
    "wait_for_lease": "elbowroom.shared_lease",
    "use_planned_allocator": "elbowroom.cuda_allocator.use",
}

_RENAMED = {"use_arena": "use_planned_allocator"}

__all__ = ["__version__", *_VERBS]


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        import warnings

        warnings.warn(f"elbowroom.{name} is now elbowroom.{_RENAMED[name]}", FutureWarning, stacklevel=2)
        name = _RENAMED[name]
    if name not in _VERBS:
        raise AttributeError(f"module 'elbowroom' has no attribute {name!r}")
    return getattr(importlib.import_module(_VERBS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

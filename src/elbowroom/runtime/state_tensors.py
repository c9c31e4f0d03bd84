"""StateTensors: the tensors of a job whose storages a trace names."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from elbowroom.hooks.storage_ids import get_plain_storage
from elbowroom.ir.trace import Role, Trace

NamedTensor = tuple[torch.Tensor, Role, str, str | None]
"""A tensor of the state, its role, its label, and the path of the module that owns it."""


class StateTensors:
    """Finds the tensors of the state of a trace. They are the same in most steps, so what was found is kept.

    Args:
        trace: of a step.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._kept: list[weakref.ref[torch.Tensor]] = []
        self._found: dict[int, weakref.ref[torch.Tensor]] = {}

    def find(
        self, kept: Sequence[torch.Tensor], name_residents: Callable[[], Iterable[NamedTensor]]
    ) -> Mapping[int, torch.Tensor]:
        """Return the tensor of each storage of the state; for a gradient, that of its parameter.

        Args:
            kept: parameters, buffers and optimizer state.
            name_residents: returns these and the gradients with their roles and labels. Called if tensors were
                replaced.
        """
        if len(kept) == len(self._kept) and all(known() is each for known, each in zip(self._kept, kept, strict=True)):
            found = {storage: tensor for storage, known in self._found.items() if (tensor := known()) is not None}
            if len(found) == len(self._found):  # a wrapper may have got other inner tensors
                return found
        found = _match(self._trace, name_residents())
        self._kept = [weakref.ref(each) for each in kept]
        self._found = {storage: weakref.ref(tensor) for storage, tensor in found.items()}
        return found


def _match(trace: Trace, residents: Iterable[NamedTensor]) -> dict[int, torch.Tensor]:
    """Return the tensor of each storage of a trace's state; for a gradient, that of its parameter.

    Tensors with the same role and label are in the order in which the trace lists them.
    """
    tensors: dict[tuple[Role, str, int], list[torch.Tensor]] = {}
    seen = set[int]()
    for tensor, role, label, _ in residents:
        home = get_plain_storage(tensor)
        if home is None or home._cdata in seen:
            continue
        seen.add(home._cdata)
        tensors.setdefault((role, label, home.nbytes()), []).append(tensor)
        if role is Role.PARAMETER:
            tensors.setdefault((Role.GRADIENT, f"gradient of {label}", home.nbytes()), []).append(tensor)
    found: dict[int, torch.Tensor] = {}
    taken: dict[tuple[Role, str, int], int] = {}
    for storage in sorted(trace.state):
        traced = trace.storages[storage]
        key = (traced.role, traced.label, traced.nbytes)
        named = tensors.get(key, ())
        index = 0 if traced.role is Role.GRADIENT else taken.get(key, 0)
        if index < len(named):
            found[storage] = named[index]
            taken[key] = index + 1
    return found

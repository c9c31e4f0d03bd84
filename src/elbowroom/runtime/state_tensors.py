"""StateTensors: the tensors of a job whose storages a trace names."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from elbowroom.hooks.storage_ids import get_plain_storage
from elbowroom.ir.trace import Role, Storage, Trace
from elbowroom.ir.unused_state import list_unused_state

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
    named: dict[tuple[Role, str], list[tuple[torch.Tensor, int]]] = {}
    seen = set[int]()
    for tensor, role, label, _ in residents:
        home = get_plain_storage(tensor)
        if home is not None and home._cdata not in seen:
            seen.add(home._cdata)
            named.setdefault((role, label), []).append((tensor, home.nbytes()))
    traced: dict[tuple[Role, str], list[Storage]] = {}
    for each in trace.storages:
        if (each.role is Role.GRADIENT and each.id in trace.state) or each.created < 0:
            traced.setdefault((each.role, each.label), []).append(each)
    moving = {*trace.state, *(each.id for each in list_unused_state(trace))}
    found: dict[int, torch.Tensor] = {}
    for (role, label), storages in traced.items():
        if role is Role.GRADIENT:  # of one step or the next one
            owners = named.get((Role.PARAMETER, label.removeprefix("gradient of ")), [])[:1]
            pairs = [(each, *owner) for each in storages for owner in owners]
        else:
            pairs = _pair(storages, named.get((role, label), []))
        for each, tensor, nbytes in pairs:
            if each.id in moving and each.nbytes in (nbytes, 0):  # 0: state that the step does not use
                found[each.id] = tensor
    return found


def _pair(
    storages: Sequence[Storage], tensors: Sequence[tuple[torch.Tensor, int]]
) -> list[tuple[Storage, torch.Tensor, int]]:
    """Return storages of one label with the tensors of that label, in order: of all sizes, or of each size."""
    if len(storages) == len(tensors):
        return [(storage, *each) for storage, each in zip(storages, tensors, strict=True)]
    sizes = {nbytes for _, nbytes in tensors}
    return [
        (storage, *each)
        for size in sizes
        for storage, each in zip(
            [one for one in storages if one.nbytes == size], [one for one in tensors if one[1] == size], strict=False
        )
    ]

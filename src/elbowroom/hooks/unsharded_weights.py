"""Notices when FSDP (`fully_shard`) allocates and frees the weights that it gathers from all ranks.

Their storages belong to FSDP: it empties them after a module's forward pass and fills them again before its backward
pass, without an op, while autograd holds views of them. So they are noted like memory that others write to: they never
move, and only replays that a plan has while they are filled read them.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from elbowroom.hooks.exposed_memory import expose
from elbowroom.hooks.storage_ids import Identities

_MODULES = tuple(f"torch.distributed.fsdp._fully_shard.{each}" for each in ("_fsdp_param", "_fsdp_param_group"))


class WeightObserver(Protocol):
    """Is told of gathered weights."""

    def weight_gathered(self, storage: torch.UntypedStorage) -> None:
        """Note that the storage has memory."""
        ...

    def weight_filled(self, storage: torch.UntypedStorage) -> None:
        """Note that the memory has the weight's values."""
        ...

    def weight_freed(self, storage: torch.UntypedStorage) -> None:
        """Note that the storage has none."""
        ...


_weights: Identities[bool] = Identities()
_observers: list[weakref.ref[WeightObserver]] = []


def list_fsdp_parameters(model: torch.nn.Module) -> Iterator[Any]:
    """Yield FSDP's record of each sharded parameter of a model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in groups:
                yield from () if group is None else group.fsdp_params


def note_gathered_weights(model: torch.nn.Module) -> None:
    """Have the weights that FSDP gathers noted, those that are there and all later ones. Permanent."""
    for parameter in list_fsdp_parameters(model):
        for tensor in parameter.all_gather_outputs:
            _note(tensor.untyped_storage())
        if not hasattr(type(parameter).to_unsharded, "tells_observers"):
            type(parameter).to_unsharded = _tell_filled(type(parameter).to_unsharded)
    for name in _MODULES:
        module: Any = sys.modules.get(name)
        if module is None:
            continue
        for function, tell in (("alloc_storage", "weight_gathered"), ("free_storage", "weight_freed")):
            known = getattr(module, function, None)
            if known is not None and not hasattr(known, "tells_observers"):
                setattr(module, function, _wrap(known, tell))


def is_gathered(storage: torch.UntypedStorage) -> bool:
    """Tell whether a storage is that of a weight that FSDP gathers."""
    return _weights.find(storage) is not None


def list_gathered(model: torch.nn.Module) -> list[torch.UntypedStorage]:
    """Return the storages of gathered weights that have memory now."""
    outputs = (tensor for parameter in list_fsdp_parameters(model) for tensor in parameter.all_gather_outputs)
    return [storage for each in outputs if (storage := each.untyped_storage()).nbytes()]


def observe_weights(observer: WeightObserver) -> None:
    """Tell an observer of gathered weights, for as long as it is alive."""
    _observers.append(weakref.ref(observer, _observers.remove))


def _note(storage: torch.UntypedStorage) -> None:
    if not is_gathered(storage):
        _weights.put(storage, True)
        expose(storage)


def _tell(what: str, storage: torch.UntypedStorage) -> None:
    for observer in [each() for each in tuple(_observers)]:
        if observer is not None:
            getattr(observer, what)(storage)


def _tell_filled(to_unsharded: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap what FSDP calls once a weight is gathered."""

    @functools.wraps(to_unsharded)
    def note_filled(parameter: Any) -> None:
        to_unsharded(parameter)
        for tensor in parameter.all_gather_outputs:
            _tell("weight_filled", tensor.untyped_storage())

    note_filled.tells_observers = True  # type: ignore[attr-defined]
    return note_filled


def _wrap(change: Callable[[torch.Tensor], None], tell: str) -> Callable[[torch.Tensor], None]:
    @functools.wraps(change)
    def change_and_tell(tensor: torch.Tensor) -> None:
        change(tensor)
        storage = tensor.untyped_storage()
        _note(storage)
        _tell(tell, storage)

    change_and_tell.tells_observers = True  # type: ignore[attr-defined]
    return change_and_tell

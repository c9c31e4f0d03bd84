"""Ops that a step ran, and how they are run again.

What is replayed is what ran: the functions, scalars and tensors of this very step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from elbowroom.errors import InternalError
from elbowroom.hooks.replayable import iterate_tensors
from elbowroom.hooks.settings import Settings, change_settings, read_settings
from elbowroom.runtime.residence import Geometry, Residence


def check_version(witness: torch.Tensor, shape: Sequence[int], expected: int) -> None:
    """Refuse what was modified in place since it was saved. With any hooks active PyTorch does not check this itself.

    Raises:
        RuntimeError: in PyTorch's own words.
    """
    if witness._version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{witness.dtype} tensor of shape {list(shape)} is at version {witness._version}; expected version "
            f"{expected} instead"
        )


class Slot(NamedTuple):
    """A tensor argument: which storage, and how it lies there.

    `kept` is the storage itself where the program holds it anyway (parameters, buffers, inputs), and `witness` a leaf
    tensor that shares its version counter; `seen` is the residence's version then. Statistics that the op only updates
    are not `is_read`.
    """

    residence: Residence
    geometry: Geometry
    kept: torch.UntypedStorage | None
    witness: torch.Tensor | None
    version: int
    seen: int
    is_read: bool = True


class Call(NamedTuple):
    """One recorded op: its tensors are replaced by slots."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Residence, ...]  # of each tensor that it returns
    written: tuple[Residence, ...]  # of arguments that it writes to, which it need not return
    scratch: tuple[int, ...]  # positions of arguments that the op writes to
    settings: Settings  # that it ran under

    def list_used(self) -> list[Residence]:
        """What it reads and what it returns."""
        return [*(slot.residence for slot in iterate_slots((self.args, self.kwargs))), *self.results]


class Recording:
    """What it takes to compute one storage again: ops that this step ran, and what they read.

    Args:
        calls: ops to choose from, by tick.
        target: what is to be made; only ops that it needs are taken.

    Attributes:
        target: as given.
        calls: the ops, by tick, in order; none if nothing here makes the target.
        leaves: what the replay reads from autograd's claims.
        sources: what it reads of the program's own: parameters, buffers, inputs.
        nbytes: most that it allocates at once; None where nobody has counted.
    """

    nbytes: int | None = None

    def __init__(self, calls: Mapping[int, Call], target: Residence) -> None:
        self.target = target
        needed = {target}
        taken: list[tuple[int, Call]] = []
        for tick in sorted(calls, reverse=True):
            call = calls[tick]
            if not needed.isdisjoint(call.results) or not needed.isdisjoint(call.written):
                taken.append((tick, call))
                needed.update(slot.residence for slot in iterate_slots((call.args, call.kwargs)) if slot.kept is None)
        self.calls = dict(reversed(taken))
        made = {residence for call in self.calls.values() for residence in call.results}
        self.leaves = tuple(residence for residence in needed if residence not in made)
        slots = [slot for _, call in taken for slot in iterate_slots((call.args, call.kwargs)) if slot.is_read]
        self.sources = tuple({slot.residence for slot in slots if slot.kept is not None})
        self._read = [slot for slot in slots if slot.kept is not None or slot.residence in self.leaves]

    def is_current(self) -> bool:
        """Whether nobody has written to what it reads, since the ops read it."""
        return all(slot.residence.version == slot.seen for slot in self._read)


def replay(recordings: Iterable[Recording], outputs: Sequence[Residence]) -> None:
    """Compute the targets of some recordings again, together, and give each of `outputs` its new storage.

    Each intermediate is freed after its last use. Autograd, saved-tensor hooks, autocast and random generators are not
    involved; each op runs under the settings that it ran under before.

    Raises:
        RuntimeError: a parameter or input was modified in place since the forward pass.
    """
    merged = {tick: call for recording in recordings for tick, call in recording.calls.items()}
    calls = [merged[tick] for tick in sorted(merged)]
    last_use = {residence: position for position, call in enumerate(calls) for residence in call.list_used()}
    made: dict[Residence, torch.UntypedStorage] = {}
    wanted = set(outputs)

    def find(slot: Slot) -> torch.Tensor:
        if slot.witness is not None:
            check_version(slot.witness, slot.geometry.shape, slot.version)
        storage = slot.kept
        if storage is None:
            storage = made.get(slot.residence)
        if storage is None:
            storage = slot.residence.find_storage()
        if storage is None:
            raise InternalError(f"a replay reads storage {slot.residence.id}, which is not on the device")
        return slot.geometry.view(storage)

    before = present = read_settings()
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast(), contextlib.ExitStack() as stack:
        stack.callback(lambda: change_settings(present, before))
        for position, call in enumerate(calls):
            present = change_settings(present, call.settings)
            args = list(_fill(call.args, find))
            for index in call.scratch:
                slot = call.args[index]
                if isinstance(slot, Slot) and slot.residence not in made:
                    args[index] = args[index].clone()  # a side effect that must not happen twice
            kwargs = {name: _fill(value, find) for name, value in call.kwargs.items()}
            result = call.func(*args, **kwargs)
            for tensor, residence in zip(iterate_tensors(result), call.results, strict=True):
                made.setdefault(residence, tensor.untyped_storage())
                del tensor
            del args, kwargs, result
            for residence in call.list_used():
                if last_use[residence] == position and residence not in wanted:
                    made.pop(residence, None)
    for residence in outputs:
        residence.storage = made[residence]


def iterate_slots(value: Any) -> list[Slot]:
    """The slots among recorded arguments, through lists, tuples and dicts."""
    if isinstance(value, Slot):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        return [slot for item in value for slot in iterate_slots(item)]
    return []


def _fill(value: Any, find: Callable[[Slot], torch.Tensor]) -> Any:
    if isinstance(value, Slot):
        return find(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_fill(item, find) for item in value)
    return value

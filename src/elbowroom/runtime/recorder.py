"""Records the ops of this very step that a plan wants to replay, and replays them.

What is replayed is what ran: the functions, scalars and tensors of this step, not those of the trace. The trace only
says where to look, and if the step's ops are not the trace's, that is drift.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from elbowroom.errors import InternalError
from elbowroom.hooks.identity import get_plain_storage
from elbowroom.hooks.replayable import find_statistics, find_written, iterate_tensors, touches_tensors
from elbowroom.hooks.settings import Settings, change_settings, read_settings
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import LASTING, Op, Trace
from elbowroom.runtime.residence import Geometry, Residence
from elbowroom.runtime.watcher import Watcher


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
    """A tensor argument or result: which storage, and how it lies there.

    `kept` is the storage itself where the program holds it anyway (parameters, buffers, inputs), and `witness` a leaf
    tensor that shares its version counter.
    """

    residence: Residence
    geometry: Geometry
    kept: torch.UntypedStorage | None
    witness: torch.Tensor | None
    version: int


class Call(NamedTuple):
    """One recorded op: its tensors are replaced by slots."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Slot, ...]
    written: tuple[Slot, ...]  # arguments that the op writes to, which it need not return
    scratch: tuple[int, ...]  # positions of arguments that the op writes to
    settings: Settings  # that it ran under


class Recording:
    """What it takes to compute one storage again: ops that this step ran, and what they read.

    Args:
        calls: ops to choose from, by tick.
        target: what is to be made; only ops that it needs are taken.

    Attributes:
        calls: the ops, by tick, in order; none if nothing here makes the target.
        leaves: what the replay reads from autograd's claims.
        sources: what it reads of the program's own: parameters, buffers, inputs.
    """

    def __init__(self, calls: Mapping[int, Call], target: Residence) -> None:
        needed = {target}
        taken: list[tuple[int, Call]] = []
        for tick in sorted(calls, reverse=True):
            call = calls[tick]
            if any(slot.residence in needed for slot in (*call.results, *call.written)):
                taken.append((tick, call))
                needed.update(slot.residence for slot in iterate_slots((call.args, call.kwargs)) if slot.kept is None)
        self.calls = dict(reversed(taken))
        made = {slot.residence for call in self.calls.values() for slot in call.results}
        self.leaves = tuple(residence for residence in needed if residence not in made)
        slots = [slot for _, call in taken for slot in iterate_slots((call.args, call.kwargs))]
        self.sources = tuple({slot.residence for slot in slots if slot.kept is not None})


def replay(recordings: Iterable[Recording], outputs: Sequence[Residence]) -> None:
    """Compute the targets of some recordings again, together, and give each of `outputs` its new storage.

    Each intermediate is freed after its last use. Autograd, saved-tensor hooks, autocast and random generators are not
    involved; each op runs under the settings that it ran under before.

    Raises:
        RuntimeError: a parameter or input was modified in place since the forward pass.
    """
    merged = {tick: call for recording in recordings for tick, call in recording.calls.items()}
    calls = [merged[tick] for tick in sorted(merged)]
    last_use: dict[Residence, int] = {}
    for position, call in enumerate(calls):
        for slot in iterate_slots((call.args, call.kwargs, call.results)):
            last_use[slot.residence] = position
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
            for tensor, slot in zip(iterate_tensors(result), call.results, strict=True):
                made.setdefault(slot.residence, tensor.untyped_storage())
                del tensor
            del args, kwargs, result
            for slot in iterate_slots((call.args, call.kwargs, call.results)):
                if last_use[slot.residence] == position and slot.residence not in wanted:
                    made.pop(slot.residence, None)
    for residence in outputs:
        residence.storage = made[residence]


class Recorder(Watcher):
    """Watches a step's ops go by in the order of a trace, and records those that the plan replays.

    Args:
        trace, plan: what is expected, and which of it is wanted.
        find_residence: the residence of a storage, made if there is none.
        on_drift: told why, once, if the step's ops are not the trace's.
        before_write, on_write: as for a Watcher.
    """

    def __init__(
        self,
        trace: Trace,
        plan: Plan,
        find_residence: Callable[[torch.UntypedStorage], Residence],
        on_drift: Callable[[str], None],
        before_write: Callable[[torch.Tensor], None],
        on_write: Callable[[torch.Tensor], None],
    ) -> None:
        super().__init__(before_write, on_write)
        self._ops: Sequence[Op] = trace.ops
        self._find_residence, self._on_drift = find_residence, on_drift
        self._wanted = frozenset(tick for segment in plan.segments for tick in segment.ops)
        # Watched until the last op that is replayed, and until the forward pass is over: what an op that is not in the
        # trace does to a leaf would be in the replay.
        last = max(*self._wanted, trace.needs[0].tick)
        self._count = sum(1 for op in trace.ops if op.tick <= last)
        # Every other leaf is claimed by autograd.
        leaves = {leaf for segment in plan.segments for leaf in segment.leaves}
        self._kept = frozenset(leaf for leaf in leaves if trace.storages[leaf].role in LASTING)
        self._names: dict[Any, str] = {}
        self._position = 0
        self._calls: dict[int, Call] = {}

    def stop(self) -> None:
        """Record no more."""
        self._position = self._count

    def make_recording(self, ticks: Sequence[int], target: Residence) -> Recording:
        """How to compute `target` again, with those of the ops at `ticks` that have been recorded so far."""
        return Recording({tick: self._calls[tick] for tick in ticks if tick in self._calls}, target)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._position == self._count or not touches_tensors(func):
            return func(*args, **kwargs)
        op = self._ops[self._position]
        self._position += 1
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = str(func)
        if name != op.name:
            self._on_drift(f"op {self._position - 1} is {name}, where the trace has {op.name}")
            return func(*args, **kwargs)
        if op.tick not in self._wanted:
            return func(*args, **kwargs)
        slots, settings = self._describe(func, op, args, kwargs), read_settings()
        result = func(*args, **kwargs)
        results = tuple(self._slot(tensor, False) for tensor in iterate_tensors(result))
        described, named = slots
        statistics = find_statistics(func, args)
        places = [(position, name) for position, name in find_written(func) if position not in statistics]
        written = [described[position] if position < len(args) else named.get(name) for position, name in places]
        scratch = {position for position, _ in places if position < len(args)}.union(statistics)
        self._calls[op.tick] = Call(
            func, described, named, results, tuple(iterate_slots(written)), tuple(sorted(scratch)), settings
        )
        return result

    def _describe(
        self, func: Any, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        skipped = find_statistics(func, args)
        reads = iter(op.reads)

        def describe(value: Any, keep: bool = False) -> Any:
            if isinstance(value, torch.Tensor):
                view = None if keep else next(reads, None)
                return self._slot(value, keep or view is None or view.storage in self._kept)
            if isinstance(value, (list, tuple)):
                return type(value)(describe(item, keep) for item in value)
            return value

        described = tuple(describe(value, position in skipped) for position, value in enumerate(args))
        return described, {key: describe(value) for key, value in kwargs.items()}

    def _slot(self, tensor: torch.Tensor, keep: bool) -> Slot:
        storage = get_plain_storage(tensor)
        if storage is None:
            raise InternalError(f"a replayed op has a tensor that is no plain block of bytes: {tensor.layout}")
        residence, geometry = self._find_residence(storage), Geometry.of(tensor)
        if not keep:
            return Slot(residence, geometry, None, None, tensor._version)
        # A tensor with a graph would hold the graph that holds us; the leaf it is a view of does not.
        leaf = tensor if tensor._base is None else tensor._base
        return Slot(residence, geometry, storage, leaf if leaf.grad_fn is None else None, tensor._version)


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

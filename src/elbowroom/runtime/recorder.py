"""Records the ops of this very step that a plan wants to replay, and replays them.

What is replayed is what ran: the functions, scalars and tensors of this step, not those of the trace. The trace only
says where to look, and if the step's ops are not the trace's, that is drift.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elbowroom.errors import InternalError
from elbowroom.hooks.identity import get_plain_storage, is_shared
from elbowroom.hooks.kinds import Kind
from elbowroom.hooks.replayable import find_statistics, find_written, iterate_tensors
from elbowroom.hooks.settings import read_settings
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import LASTING, Op, Trace
from elbowroom.runtime.calls import Call, Recording, Slot, iterate_slots
from elbowroom.runtime.residence import Geometry, Residence
from elbowroom.runtime.watcher import Run


class Recorder:
    """Watches a step's ops go by in the order of a trace, and records those that the plan replays.

    Args:
        trace, plan: what is expected, and which of it is wanted.
        find_residence: the residence of a storage, made if there is none.
        on_drift: told why, once, if the step's ops are not the trace's; says who runs ops from then on.
    """

    def __init__(
        self,
        trace: Trace,
        plan: Plan,
        find_residence: Callable[[torch.UntypedStorage], Residence],
        on_drift: Callable[[str], Run],
    ) -> None:
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
        self._position = 0
        self._calls: dict[int, Call] = {}
        self._unsafe: set[int] = set()  # ticks of ops that the trace did not show to be so

    def make_recording(self, ticks: Sequence[int], target: Residence) -> Recording:
        """How to compute `target` again, with those of the ops at `ticks` that have been recorded so far.

        Without calls if one of them may not be replayed.
        """
        if not self._unsafe.isdisjoint(ticks):
            return Recording({}, target)
        return Recording({tick: self._calls[tick] for tick in ticks if tick in self._calls}, target)

    def run(
        self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Sequence[torch.Tensor] = ()
    ) -> Any:
        """Run an op, and record it if it is wanted."""
        if self._position == self._count or not kind.is_traced:
            return kind.call(*args, **kwargs)
        op = self._ops[self._position]
        self._position += 1
        if kind.name != op.name:
            run = self._on_drift(f"op {self._position - 1} is {kind.name}, where the trace has {op.name}")
            return run(kind, args, kwargs, targets)
        if op.tick not in self._wanted:
            return kind.call(*args, **kwargs)
        func = kind.func
        slots, settings = self._describe(func, op, args, kwargs), read_settings()
        if any(slot.is_read and slot.kept is not None and is_shared(slot.kept) for slot in iterate_slots(slots)):
            self._unsafe.add(op.tick)  # others may write to what it reads, unseen
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        results = tuple(self._find_residence(self._find_storage(tensor)) for tensor in iterate_tensors(result))
        described, named = slots
        statistics = find_statistics(func, args)
        places = [(position, name) for position, name in find_written(func) if position not in statistics]
        written = [described[position] if position < len(args) else named.get(name) for position, name in places]
        scratch = {position for position, _ in places if position < len(args)}.union(statistics)
        self._calls[op.tick] = Call(
            func,
            described,
            named,
            results,
            tuple(slot.residence for slot in iterate_slots(written)),
            tuple(sorted(scratch)),
            settings,
        )
        return result

    def _describe(
        self, func: Any, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        skipped = find_statistics(func, args)
        reads = iter(op.reads)

        def describe(value: Any, keep: bool = False) -> Any:
            if isinstance(value, torch.Tensor):
                if keep:
                    return self._slot(value, True)._replace(is_read=False)
                view = next(reads, None)
                return self._slot(value, view is None or view.storage in self._kept)
            if isinstance(value, (list, tuple)):
                return type(value)(describe(item, keep) for item in value)
            return value

        described = tuple(describe(value, position in skipped) for position, value in enumerate(args))
        return described, {key: describe(value) for key, value in kwargs.items()}

    def _slot(self, tensor: torch.Tensor, keep: bool) -> Slot:
        storage = self._find_storage(tensor)
        residence, geometry = self._find_residence(storage), Geometry.of(tensor)
        if not keep:
            return Slot(residence, geometry, None, None, tensor._version, residence.version)
        # A tensor with a graph would hold the graph that holds us; the leaf it is a view of does not.
        leaf = tensor if tensor._base is None else tensor._base
        return Slot(
            residence, geometry, storage, leaf if leaf.grad_fn is None else None, tensor._version, residence.version
        )

    def _find_storage(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = get_plain_storage(tensor)
        if storage is None:
            raise InternalError(f"a replayed op has a tensor that is no plain block of bytes: {tensor.layout}")
        return storage

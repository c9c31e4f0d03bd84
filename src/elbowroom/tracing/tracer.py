"""Records a step: a dispatch mode for its ops, and three methods that the saved-tensor hooks call.

Used for fake and for real tensors. Weak references observe when the program frees a storage, so the saved-tensor hooks
should not hold a saved tensor: the program's references and autograd's are told apart by counting them then (`stays`).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from elbowroom.hooks.exposed_memory import is_shared
from elbowroom.hooks.meter import Meter
from elbowroom.hooks.module_paths import UNKNOWN, Origin, find_module_path
from elbowroom.hooks.storage_ids import Identities, get_plain_storage, is_on, list_parts
from elbowroom.hooks.unsharded_weights import is_gathered
from elbowroom.ir.trace import Need, Op, Role, Save, Storage, Trace, View
from elbowroom.ops.replayable import find_barrier, find_statistics, find_written, iterate_tensors, touches_tensors
from elbowroom.tracing.origins import OpOrigins
from elbowroom.tracing.residents import Resident
from elbowroom.tracing.slicing import RecordedOps, find_slicing
from elbowroom.tracing.ticks import Ticks

OWNED = frozenset((Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE))
"""Roles of storages that one module owns, to which ops of the optimizer are attributed."""

UNSEEN_BYTES = 1 << 14
"""Allowance in every trace for allocations outside of ops: generator states, the scalars of a loop. Measured: at most a
few hundred bytes."""


class _Seen:
    """A storage while it is being traced."""

    __slots__ = ("created", "id", "is_of_owner", "label", "nbytes", "origin", "released", "role", "version")

    def __init__(self, storage: int, nbytes: int, role: Role, created: int, label: str, origin: Origin) -> None:
        self.id = storage
        self.nbytes = nbytes
        self.role = role
        self.created = created
        self.label = label
        self.origin = origin
        self.released: int | None = None
        self.version = 0
        self.is_of_owner = False  # computed from storages that a single module owns

    def freeze(self, end: int, saved: set[int]) -> Storage:
        """Return the storage of the trace. `saved`: storages that autograd saved."""
        is_activation = self.role is Role.TEMPORARY and self.id in saved
        return Storage(
            id=self.id,
            nbytes=self.nbytes,
            role=Role.ACTIVATION if is_activation else self.role,
            created=self.created,
            released=end if self.released is None else self.released,
            label=self.label,
            module=self.origin.module,
            line=self.origin.line,
        )


class Tracer(TorchDispatchMode):
    """Records one step.

    Args:
        name: display name.
        device: storages on other devices are not traced.
        model: its modules call the ops.
        residents: tensors that exist before the step: parameters, buffers, optimizer state.
        meter: measures each op.
        fake: whether the step runs on fake tensors.

    Attributes:
        ticks: of the entries.
        recorded: ops so far.
        saves: tick, storage and release of each save so far.
        origins: of the ops in the model.
        pauses: number of active contexts whose ops are not part of the step.
        own_seconds: host time spent in tracing.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        model: torch.nn.Module,
        residents: Iterable[Resident],
        *,
        meter: Meter | None = None,
        fake: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._get_storage = functools.partial(get_plain_storage, fake=fake)
        self._name = name
        self._device = device
        self._meter = meter
        self.origins = OpOrigins(model)
        self.own_seconds = 0.0
        self.ticks = Ticks()
        self._lock = threading.Lock()  # several backward passes may run in threads, and no two entries share a tick
        self.pauses = 0
        self._seen: list[_Seen] = []
        self._identities: Identities[_Seen] = Identities(self._died)
        self._returned: Identities[_Seen] = Identities()  # storages given to autograd in place of the originals
        self.recorded = RecordedOps()
        self.saves: list[list[int]] = []  # tick, storage, released
        self._needs: list[list[int]] = []  # tick, save, released
        self._open_needs: Identities[list[int]] = Identities(self._needs_released)
        for tensor, role, label, module in residents:
            if is_on(tensor, device):
                self._identify(tensor, role, -1, label, Origin(module, ""))

    # -- ops ------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return self.record_op(func, args, kwargs, lambda: func(*args, **kwargs))

    def record_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any], least_bytes: int = 0
    ) -> Any:
        """Record an op, which `call` runs, and return its result. `least_bytes`: that it takes as a whole."""
        if self.pauses or not touches_tensors(func):
            return call()
        entered, origin = time.perf_counter(), self.origins.find()
        reads, why = self._list_reads((*args, *kwargs.values()), find_statistics(func, args))
        begin = time.perf_counter()
        result = _measure(self._meter, call, least_bytes)
        end = time.perf_counter()
        written = [
            tensor
            for position, name in find_written(func)
            for tensor in iterate_tensors(args[position] if position < len(args) else kwargs.get(name))
        ]
        barrier, flops = find_barrier(func, args, kwargs) or why, count_flops(func, args, kwargs, result)
        slicing = find_slicing(func, args, kwargs, result)
        with self._lock:
            self.recorded.add(self._record(str(func), origin, tuple(reads), written, result, barrier, flops), slicing)
        self.own_seconds += time.perf_counter() - end + begin - entered
        return result

    def run_region(
        self, name: str, inputs: Sequence[Any], written: Sequence[torch.Tensor], call: Callable[[], Any]
    ) -> Any:
        """Run a compiled region, which is recorded as one op, and return its result."""
        if self.pauses:
            return call()
        origin = self.origins.find()
        reads, _ = self._list_reads(inputs, ())
        with self.ticks.region():
            result = _measure(self._meter, call)
        why = "compiled code may have side effects"
        with self._lock:
            self.recorded.add(self._record(name, origin, tuple(reads), written, result, why, 0), None)
        return result

    def _list_reads(self, values: Iterable[Any], skipped: Sequence[int]) -> tuple[list[View], str]:
        """Return views of an op's tensor arguments, without `skipped` ones; and why it may not be replayed, or ""."""
        reads, why = [], ""
        for position, value in enumerate(values):
            if position in skipped:
                continue
            for tensor in iterate_tensors(value):
                view = self._view(tensor)
                if view is None:
                    why = "reads a tensor on another device, or without a plain storage"
                else:
                    reads.append(view)
                    why = why or find_risk(self._get_storage(tensor))
        return reads, why

    def _record(
        self,
        name: str,
        origin: Origin,
        reads: tuple[View, ...],
        changed: Iterable[torch.Tensor],
        result: Any,
        barrier: str,
        flops: int,
    ) -> Op:
        """Return an op, which ends its tick. `changed`: tensors that it wrote to in place."""
        tick = self.ticks.now
        written = self._count_writes(changed)
        used = [self._seen[storage] for storage in (*(view.storage for view in reads), *written)]
        owner = find_owner(used) if origin.module is None else None
        is_owned = owner is not None
        if is_owned:
            origin = Origin(owner, origin.line)
        writes = []
        results = list(iterate_tensors(result))
        for tensor in (*results, *(part for each in results for part in list_parts(each))):
            view = self._view(tensor, tick, name, origin)
            if view is not None and (self._seen[view.storage].created == tick or view.storage in written):
                writes.append(view)  # other results are views of existing storages
                self._seen[view.storage].is_of_owner |= is_owned and self._seen[view.storage].created == tick
        known = {view.storage for view in writes}
        for storage in written:
            if storage not in known:
                seen = self._seen[storage]
                writes.append(View(storage=storage, version=seen.version, dtype="uint8", shape=(seen.nbytes,)))
        self.ticks.take()
        return Op(
            tick=tick, name=name, reads=reads, writes=tuple(writes), flops=flops, barrier=barrier,
            module=origin.module, line=origin.line,
        )  # fmt: skip

    def _count_writes(self, changed: Iterable[torch.Tensor]) -> list[int]:
        """Return the storages that an op wrote to in place."""
        written: list[int] = []
        for tensor in changed:
            seen = self._find(tensor)
            if seen is not None and seen.id not in written:
                written.append(seen.id)
                seen.version += 1
                seen.nbytes = max(seen.nbytes, tensor.untyped_storage().nbytes())  # an `out=` may have grown
        return written

    # -- saved tensors --------------------------------------------------------------------------------------------

    def saved(self, tensor: torch.Tensor, index: int | None = None) -> int:
        """Record that autograd saves `tensor`. Return the index of the save. `index`: given if it is known."""
        seen = self._find(tensor) or self._identify(tensor, Role.INPUT, -1, "input")
        with self._lock:
            missed = 0 if index is None else index - len(self.saves)  # interrupted, before they came here
            self.saves += [[self.ticks.take(), -1, -1] for _ in range(missed)]
            self.saves.append([self.ticks.take(), -1 if seen is None else seen.id, -1])
            return len(self.saves) - 1

    def needed(self, save: int, given: torch.Tensor) -> None:
        """Record that autograd unpacks a save and is `given` this tensor."""
        with self._lock:
            self._needs.append([self.ticks.take(), save, -1])
            index = len(self._needs) - 1
        storage = self._get_storage(given)
        if storage is not None:
            if self.lookup(storage) is None and self.saves[save][1] >= 0:
                self._returned.put(storage, self._seen[self.saves[save][1]])
            if (open_needs := self._open_needs.find(storage)) is None:
                self._open_needs.put(storage, open_needs := [])
            open_needs.append(index)

    def stays(self, save: int, is_held: Callable[[], bool]) -> None:
        """Expect a saved storage to stay, so that it is not freed when the program lets go of it: `is_held` tells."""
        storage = self.saves[save][1]
        if storage < 0:
            return  # it is not traced
        seen = self._seen[storage]

        def let_go() -> bool:
            if is_held():
                return False
            self._died(seen)
            return True

        self.ticks.watch(let_go)

    def save_released(self, save: int) -> None:
        """Record that the graph node frees a save."""
        if self.saves[save][2] < 0:
            self.saves[save][2] = self.ticks.find_release()

    def gradient(self, tensor: torch.Tensor, parameter: str) -> None:
        """Record a parameter's gradient, which the step may free before its end."""
        seen = self._find(tensor)
        if seen is not None and seen.created >= 0:
            seen.role, seen.label = Role.GRADIENT, f"gradient of {parameter}"
            seen.origin = Origin(find_module_path(parameter), "")

    # -- the result -----------------------------------------------------------------------------------------------

    def finish(self, survivors: Iterable[Resident]) -> Trace:
        """End the step. `survivors`: residents after the step; they set the roles of storages that it made."""
        for tensor, role, label, module in survivors:
            seen = self._find(tensor)
            if seen is not None and seen.created >= 0:
                seen.role, seen.label = role, label
                seen.origin = Origin(module, "")
        end = self.ticks.now
        self._identities.close()
        self._open_needs.close()
        # Storages on other devices, and tensors without a plain storage, cannot be moved: their saves have 0 bytes.
        void = Storage(id=len(self._seen), nbytes=0, role=Role.TEMPORARY, created=-1, released=end, label="untraced")
        saved = {storage for _, storage, _ in self.saves}
        storages = [seen.freeze(end, saved) for seen in self._seen]
        if -1 in saved:
            storages.append(void)
        storages.append(
            Storage(
                id=len(storages), nbytes=UNSEEN_BYTES, role=Role.BUFFER, created=-1, released=end, label="unseen by ops"
            )
        )
        return Trace(
            name=self._name,
            device=self._device.type,
            ops=tuple(self.recorded.ops),
            storages=tuple(storages),
            saves=tuple(
                Save(tick=tick, storage=storage if storage >= 0 else void.id, released=_or_end(released, end))
                for tick, storage, released in self.saves
            ),
            needs=tuple(
                Need(tick=tick, save=save, released=_or_end(released, end)) for tick, save, released in self._needs
            ),
            end=end,
            slicing=tuple(self.recorded.slicing),
        )

    # -- storages -------------------------------------------------------------------------------------------------

    def _find(self, tensor: torch.Tensor) -> _Seen | None:
        storage = self._get_storage(tensor)
        return None if storage is None else self.lookup(storage)

    def lookup(self, storage: torch.UntypedStorage) -> _Seen | None:
        """Return what is known of a storage; None if no op has used it."""
        return self._identities.find(storage) or self._returned.find(storage)

    def _identify(
        self, tensor: torch.Tensor, role: Role, created: int, label: str, origin: Origin = UNKNOWN
    ) -> _Seen | None:
        storage = self._get_storage(tensor)
        if storage is None or not is_on(tensor, self._device):
            return None
        seen = self.lookup(storage)
        if seen is None:
            if created < 0 and self._meter is not None:
                self._meter.adopt_input(storage)  # first: there may be no room for it
            seen = _Seen(len(self._seen), storage.nbytes(), role, created, label, origin)
            self._seen.append(seen)
            self._identities.put(storage, seen)
        return seen

    def _view(
        self, tensor: torch.Tensor, created: int = -1, label: str = "input", origin: Origin = UNKNOWN
    ) -> View | None:
        role = Role.INPUT if created < 0 else Role.TEMPORARY
        seen = self._identify(tensor, role, created, label, origin)
        if seen is None:
            return None
        dtype = str(tensor.dtype).removeprefix("torch.")
        return View(storage=seen.id, version=seen.version, dtype=dtype, shape=tuple(map(int, tensor.shape)))

    def _died(self, seen: _Seen) -> None:
        if seen.released is None:
            seen.released = self.ticks.find_release()

    def _needs_released(self, needs: list[int]) -> None:
        for need in needs:
            self._needs[need][2] = self.ticks.find_release()


def find_owner(used: Iterable[_Seen]) -> str | None:
    """Return the module that owns some of these storages, or their sources; None unless exactly one does."""
    owners = {seen.origin.module for seen in used if seen.role in OWNED or seen.is_of_owner} - {None}
    return owners.pop() if len(owners) == 1 else None


def find_risk(storage: torch.UntypedStorage | None) -> str:
    """Return why an op that reads a storage may not be replayed; "" if it may be. `gathered_weights` tells of those."""
    is_risky = storage is not None and not is_gathered(storage) and is_shared(storage)
    return "code outside PyTorch may write to its inputs" if is_risky else ""


def count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the floating-point operations of a matrix-like op; 0 for memory-bound ops."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=result))
    except (TypeError, ValueError, AssertionError, IndexError):
        return 0  # the formula does not accept this overload's arguments: price the op by its bytes


def _measure(meter: Meter | None, run: Callable[[], Any], least_bytes: int = 0) -> Any:
    begun = None if meter is None else meter.begin_op()
    result = run()
    if meter is not None:
        meter.end_op(begun, least_bytes)
    return result


def _or_end(tick: int, end: int) -> int:
    return end if tick < 0 else tick

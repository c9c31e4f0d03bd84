"""Trace: the record of one training step, without values.

A step is a sequence of entries, each with its own tick: ops, saves (autograd packs a saved tensor) and needs (it
unpacks it).

    tick      0    1     2    3     4   ...   9     10    11
    entry    op  save   op  save   op        need   op   need
                  |           '---- storage 7 -------|---> handle released at 12
                  '------------------ gap -----------'

A storage is alive from the entry that created it until its last holder lets go. Holders are the program (`released`),
the autograd graph (`Save.released`) and, for what autograd has just asked for, the running backward node
(`Need.released`). "Released at tick t" means: gone before entry t begins.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import reprlib
from collections.abc import Mapping
from typing import NamedTuple

from elbowroom.ir.gaps import Gap, find_gaps
from elbowroom.ir.slicing import OpSlicing
from elbowroom.ir.updates import BEGIN, END
from elbowroom.ir.use import StorageUse, UseKind
from elbowroom.units import format_bytes

Span = tuple[int, int]
"""Ticks (begin, end): from the beginning of one entry to that of another."""


class Role(enum.StrEnum):
    """Role of a storage in training."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    BUFFER = "buffer"
    INPUT = "input"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"


PERSISTENT_ROLES = frozenset(Role) - {Role.ACTIVATION, Role.TEMPORARY}
"""Roles of storages that the program holds independently of autograd."""

STATE_ROLES = PERSISTENT_ROLES - {Role.INPUT}
"""Roles of a model's state."""

MIN_STATE_BYTES = 1 << 14
"""Smaller storages of a model's state always stay on the device."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A block of bytes that tensors are views of.

    Attributes:
        id: position in `Trace.storages`.
        nbytes: size requested from the allocator.
        created: tick of the op that made it; -1 if it existed before the step.
        released: the program's last reference is gone before this tick; `Trace.end` if it outlives the step.
        label: display name: the parameter's name, or the op that made it.
        module, line: as for the op that made it; for parameters, buffers, gradients and optimizer state, the module
            that owns the parameter or buffer, and "".
    """

    id: int
    nbytes: int
    role: Role
    created: int
    released: int
    label: str
    module: str | None = dataclasses.field(default=None, compare=False)
    line: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One tensor argument or result of an op: its storage, version, dtype and shape.

    `version` counts the writes to the storage before a read, or including this one for a write; creation is version 0.
    """

    storage: int
    version: int
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One ATen call.

    Attributes:
        name: overload name of the dispatcher, "aten.convolution.default".
        reads: tensor arguments.
        writes: tensors it makes or modifies; a result that is a view of an argument is neither.
        flops: floating-point operations of a matrix-like op, 0 for others.
        barrier: why this op must not be replayed ("" if it may be).
        module: path of the module that called it, as in `torch.nn.Module.named_modules` ("" for the model itself); for
            an op of the backward pass, the module whose forward pass created its node. None outside of modules.
        line: "file:line" of the innermost caller outside of PyTorch; for an op of the backward pass, of the code that
            created its node. "" if unknown.
    """

    tick: int
    name: str
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    flops: int
    barrier: str
    module: str | None = dataclasses.field(default=None, compare=False)
    line: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Autograd saved a tensor. `released`: its graph node freed it before this tick."""

    tick: int
    storage: int
    released: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Autograd unpacked a save. `save`: index in `Trace.saves`. `released`: the result was freed before this tick."""

    tick: int
    save: int
    released: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """The contents of a storage are in memory from the beginning of entry `begin` to that of entry `end`.

    `fully_shard` frees the weights that it has gathered, and gathers the same contents again, without an op.
    """

    storage: int
    begin: int
    end: int


class Write(NamedTuple):
    """One write to a storage: its tick, the resulting version, and the index of the op in `Trace.ops`."""

    tick: int
    version: int
    op: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """Record of one step. Derived properties are computed on first access and cached.

    Attributes:
        name: display name.
        device: device type that it was captured on, "cpu" or "cuda".
        ops, saves, needs: each in order of tick.
        storages: by id.
        end: one past the last tick.
        slicing: ways to run ops in slices, by tick; ops with none are left out.
        presences: of storages whose contents come and go without an op; of others, they are there throughout.
    """

    name: str
    device: str
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    saves: tuple[Save, ...]
    needs: tuple[Need, ...]
    end: int
    slicing: tuple[OpSlicing, ...] = dataclasses.field(default=(), compare=False)
    presences: tuple[Presence, ...] = ()

    def __repr__(self) -> str:
        activation_bytes = sum(storage.nbytes for storage in self.storages if storage.role is Role.ACTIVATION)
        return (
            f"<Trace of {reprlib.repr(self.name)} on {self.device}: {len(self.ops)} ops, "
            f"{len(self.storages)} storages, {len(self.saves)} saves, {len(self.needs)} needs, "
            f"{format_bytes(activation_bytes)} of activations>"
        )

    @functools.cached_property
    def claims(self) -> Mapping[int, tuple[Span, ...]]:
        """Autograd's claims on every saved storage, by storage id, in order.

        A claim begins with a save and ends before the tick at which the last handle is released; a later save begins
        another claim.
        """
        return _find_claims(self.saves)

    @functools.cached_property
    def uses(self) -> Mapping[int, tuple[StorageUse, ...]]:
        """Saves that begin a claim, and needs, of every saved storage, by storage id, in order."""
        return _find_uses(self)

    @functools.cached_property
    def gaps(self) -> Mapping[int, tuple[Gap, ...]]:
        """Gaps of every storage that was saved and is needed again, by storage id. A gap lies within one claim."""
        needed = dict.fromkeys(self.saves[need.save].storage for need in self.needs)
        return {storage: find_gaps(self.uses[storage]) for storage in needed}

    @functools.cached_property
    def movable(self) -> frozenset[int]:
        """Storages whose saved contents may leave the device.

        Excluded are storages that live across steps (`state`), and storages written after they were saved:
        autograd must find the later contents, which a copy or a replay lacks.
        """
        return _find_movable(self)

    @functools.cached_property
    def state(self) -> frozenset[int]:
        """Storages of the model's state that may leave the device: of at least `MIN_STATE_BYTES`, and used by an op."""
        return frozenset(self.state_uses)

    @functools.cached_property
    def state_uses(self) -> Mapping[int, tuple[StorageUse, ...]]:
        """Uses of the model's state, by storage id, in order: the ops that read or write it.

        A save or need is no use: autograd keeps the tensor itself, and the op that follows reads it. A use is of kind
        OPTIMIZER if the op also reads or writes optimizer state, and of kind OP otherwise.
        """
        return _find_state_uses(self)

    @functools.cached_property
    def state_gaps(self) -> Mapping[int, tuple[Gap, ...]]:
        """Gaps between the uses of the model's state, by storage id. There are none within an update.

        A storage that exists before and after the step also has a gap from its last use to its first use in the next
        step. So has a gradient that the step makes and leaves behind. In the next step it is the gradient that the step
        begins with (`earlier_gradients`): the gap closes at that one's first use, or when it is released, at tick 0 if
        the trace has none.
        """
        return {storage: _find_state_gaps(self, storage) for storage in sorted(self.state)}

    @functools.cached_property
    def updates(self) -> Mapping[int, tuple[Span, ...]]:
        """Ticks at which updates of the model's state begin and end, by storage id, which stays throughout."""
        return _find_updates(self.ops)

    @functools.cached_property
    def state_ticks(self) -> tuple[int, ...]:
        """Ticks at which the model's state can move: ops that read or write some of it, but for those of an update.

        So a move that fails does so before the update or after it.
        """
        spans = {span for spans in self.updates.values() for span in spans}
        within = {tick for begin, end in spans for tick in range(begin + 1, end)}
        if within:
            within -= {tick for gaps in self.state_gaps.values() for gap in gaps for tick in (gap.opens, gap.closes)}
        return tuple(sorted({use.tick for uses in self.state_uses.values() for use in uses} - within))

    @functools.cached_property
    def earlier_gradients(self) -> Mapping[int, int]:
        """The gradient of the same parameter that the step began with, by id of one that the step makes and keeps."""
        return _find_earlier_gradients(self)

    def is_reloaded(self, gap: Gap) -> bool:
        """Return False if a storage of the model's state is released where its gap closes, and so never comes back."""
        if not gap.is_wrapping or self.storages[gap.storage].created < 0:
            return True
        return self.earlier_gradients.get(gap.storage) in self.state

    @functools.cached_property
    def present(self) -> Mapping[int, tuple[Span, ...]]:
        """Spans of `presences`, by storage id, in order."""
        found: dict[int, list[Span]] = {}
        for each in sorted(self.presences, key=lambda each: each.begin):
            found.setdefault(each.storage, []).append((each.begin, each.end))
        return {storage: tuple(spans) for storage, spans in found.items()}

    def has_contents(self, storage: int, tick: int) -> bool:
        """Return False if the contents of a storage are not in memory at a tick although it is alive."""
        spans = self.present.get(storage)
        return spans is None or any(begin <= tick < end for begin, end in spans)

    @functools.cached_property
    def writes(self) -> tuple[tuple[Write, ...], ...]:
        """Writes to each storage, by storage id, in order."""
        return _find_writes(self)


def release_unneeded(trace: Trace) -> Trace:
    """Return the same trace, but with saves that are never needed released at once.

    Such storages (a generator's activations, of which only `detach()` is used) have no gap, so plans keep them. A
    policy can offload them, so this trace shows the memory that a step needs without a plan.
    """
    needed = {need.save for need in trace.needs}
    saves = tuple(
        save if index in needed else dataclasses.replace(save, released=min(save.released, save.tick + 1))
        for index, save in enumerate(trace.saves)
    )
    return dataclasses.replace(trace, saves=saves)


def _find_claims(saves: tuple[Save, ...]) -> dict[int, tuple[Span, ...]]:
    found: dict[int, list[Span]] = {}
    for save in saves:
        claims = found.setdefault(save.storage, [])
        if claims and save.tick < claims[-1][1]:
            begin, end = claims[-1]
            claims[-1] = (begin, max(end, save.released))
        else:
            claims.append((save.tick, save.released))
    return {storage: tuple(claims) for storage, claims in found.items()}


def _find_uses(trace: Trace) -> dict[int, tuple[StorageUse, ...]]:
    found = {
        storage: [StorageUse(begin, storage, UseKind.SAVE) for begin, _ in claims]
        for storage, claims in trace.claims.items()
    }
    for need in trace.needs:
        storage = trace.saves[need.save].storage
        found[storage].append(StorageUse(need.tick, storage, UseKind.NEED))
    return {storage: tuple(sorted(uses, key=lambda use: use.tick)) for storage, uses in found.items()}


def _find_movable(trace: Trace) -> frozenset[int]:
    spoiled = {
        storage
        for storage, claims in trace.claims.items()
        for write in trace.writes[storage]
        if write.tick > claims[0][0] and write.version > 0
    }
    return frozenset(
        storage
        for storage in trace.claims
        if storage not in spoiled and trace.storages[storage].role not in PERSISTENT_ROLES
    )


def _find_state_uses(trace: Trace) -> dict[int, tuple[StorageUse, ...]]:
    found: dict[int, list[StorageUse]] = {}
    for op in trace.ops:
        touched = [trace.storages[each] for each in sorted({view.storage for view in (*op.reads, *op.writes)})]
        is_update = any(home.role is Role.OPTIMIZER_STATE for home in touched)
        kind = UseKind.OPTIMIZER if is_update else UseKind.OP
        for home in touched:
            if home.role in STATE_ROLES and home.nbytes >= MIN_STATE_BYTES:
                found.setdefault(home.id, []).append(StorageUse(op.tick, home.id, kind))
    return {storage: tuple(uses) for storage, uses in found.items()}


def _find_updates(ops: tuple[Op, ...]) -> dict[int, tuple[Span, ...]]:
    found: dict[int, list[Span]] = {}
    begun: Op | None = None
    for op in ops:
        if op.name == BEGIN:
            begun = op
        elif op.name == END and begun is not None:
            for storage in {view.storage for view in begun.reads} & {view.storage for view in op.reads}:
                found.setdefault(storage, []).append((begun.tick, op.tick))
            begun = None
    return {storage: tuple(spans) for storage, spans in found.items()}


def _find_state_gaps(trace: Trace, storage: int) -> tuple[Gap, ...]:
    home, uses = trace.storages[storage], trace.state_uses[storage]
    is_kept = home.released == trace.end
    updates = trace.updates.get(storage, ())
    gaps = find_gaps(uses, wraps=is_kept and home.created < 0, held=updates)
    if not (is_kept and home.created >= 0 and home.role is Role.GRADIENT):
        return gaps
    earlier = trace.earlier_gradients.get(storage)
    closes = 0
    if earlier is not None:
        closes = trace.state_uses[earlier][0].tick if earlier in trace.state else trace.storages[earlier].released
    return (*gaps, Gap(storage=storage, index=len(gaps), opens=uses[-1].tick, closes=min(closes, uses[-1].tick)))


def _find_earlier_gradients(trace: Trace) -> dict[int, int]:
    gradients = [home for home in trace.storages if home.role is Role.GRADIENT and home.nbytes >= MIN_STATE_BYTES]
    earlier: dict[tuple[str, int], list[int]] = {}
    for home in gradients:
        if home.created < 0 and home.released < trace.end:
            earlier.setdefault((home.label, home.nbytes), []).append(home.id)
    made: dict[tuple[str, int], list[int]] = {}
    for home in gradients:
        if home.created >= 0 and home.released == trace.end:
            made.setdefault((home.label, home.nbytes), []).append(home.id)
    return {found[0]: earlier[key][0] for key, found in made.items() if len(found) == len(earlier.get(key, ())) == 1}


def _find_writes(trace: Trace) -> tuple[tuple[Write, ...], ...]:
    found: list[list[Write]] = [[] for _ in trace.storages]
    for index, op in enumerate(trace.ops):
        for view in op.writes:
            found[view.storage].append(Write(op.tick, view.version, index))
    return tuple(map(tuple, found))

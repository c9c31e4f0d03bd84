"""Small traces of training steps, made up: chains, residual nets and U-nets; and machines to price them on. No torch.

A net is a list of layers, each reading earlier ones. `make_trace` runs it forward and backward the way autograd would:

    forward   op save op save ... op
    backward                         need op need op ...     (last layer first)

The program lets go of an activation after its last forward use; autograd holds what it saved until its node has run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from hypothesis import strategies as some

from elbowroom.ir.costs import Costs
from elbowroom.ir.digest import digest
from elbowroom.ir.hardware import Link
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Need, Op, Role, Save, Storage, Trace, View

KIB = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One op forward and one backward.

    Attributes:
        inputs: layers it reads, by position; -1 is the batch.
        nbytes: of its result.
        parameter_bytes: of its weight; 0 for none.
        keeps: what backward needs: "i" its inputs, "o" its result, in any combination.
        in_place: it overwrites its (only) input, which nothing else reads and no one has saved.
        barrier: why it must not be replayed.
    """

    inputs: tuple[int, ...]
    nbytes: int
    parameter_bytes: int = 0
    keeps: str = "i"
    in_place: bool = False
    barrier: str = ""


class Program:
    """Writes down what a step does, entry by entry."""

    def __init__(self) -> None:
        self.tick = 0
        self._storages: list[Storage] = []
        self._ops: list[Op] = []
        self._saves: list[Save] = []
        self._needs: list[Need] = []
        self._versions: list[int] = []

    def resident(self, nbytes: int, role: Role, label: str = "") -> int:
        """A storage that is there before the step and after it."""
        return self._storage(nbytes, role, -1, label or str(role))

    def op(
        self, name: str, reads: Sequence[int], nbytes: int, *, role: Role = Role.ACTIVATION, barrier: str = ""
    ) -> int:
        """An op with a result of its own."""
        read = tuple(self._view(storage) for storage in reads)
        made = self._storage(nbytes, role, self.tick, name)
        self._add_op(name, read, (self._view(made),), barrier)
        return made

    def op_in_place(self, name: str, reads: Sequence[int], target: int, *, barrier: str = "") -> None:
        """An op that overwrites `target`, one of what it reads."""
        read = tuple(self._view(storage) for storage in reads)
        self._versions[target] += 1
        self._add_op(name, read, (self._view(target),), barrier)

    def update(self, name: str, reads: Sequence[int], targets: Sequence[int]) -> None:
        """An op that overwrites some of what it reads: an optimizer's step."""
        read = tuple(self._view(storage) for storage in reads)
        for target in targets:
            self._versions[target] += 1
        self._add_op(name, read, tuple(self._view(target) for target in targets), "")

    def save(self, storage: int) -> int:
        """Autograd puts a storage aside."""
        self._saves.append(Save(tick=self._next(), storage=storage, released=-1))
        return len(self._saves) - 1

    def need(self, save: int) -> int:
        """Autograd asks for it back."""
        self._needs.append(Need(tick=self._next(), save=save, released=-1))
        return len(self._needs) - 1

    def release(self, *, storage: int | None = None, save: int | None = None, need: int | None = None) -> None:
        """A holder lets go, before the next entry."""
        if storage is not None:
            self._storages[storage] = dataclasses.replace(self._storages[storage], released=self.tick)
        if save is not None:
            self._saves[save] = dataclasses.replace(self._saves[save], released=self.tick)
        if need is not None:
            self._needs[need] = dataclasses.replace(self._needs[need], released=self.tick)

    def finish(self, name: str) -> Trace:
        """The trace; whatever was never released outlives the step."""

        def until_end(items: list) -> tuple:  # type: ignore[type-arg]
            return tuple(dataclasses.replace(item, released=self.tick) if item.released < 0 else item for item in items)

        return Trace(
            name=name,
            device="cpu",
            ops=tuple(self._ops),
            storages=until_end(self._storages),
            saves=until_end(self._saves),
            needs=until_end(self._needs),
            end=self.tick,
        )

    def _next(self) -> int:
        self.tick += 1
        return self.tick - 1

    def _storage(self, nbytes: int, role: Role, created: int, label: str) -> int:
        index = len(self._storages)
        self._storages.append(Storage(id=index, nbytes=nbytes, role=role, created=created, released=-1, label=label))
        self._versions.append(0)
        return index

    def _view(self, storage: int) -> View:
        nbytes = self._storages[storage].nbytes
        return View(storage=storage, version=self._versions[storage], dtype="uint8", shape=(nbytes,))

    def _add_op(self, name: str, reads: tuple[View, ...], writes: tuple[View, ...], barrier: str) -> None:
        self._ops.append(Op(tick=self._next(), name=name, reads=reads, writes=writes, flops=0, barrier=barrier))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What follows the backward pass.

    Attributes:
        states: state storages of each parameter, as large as it is.
        group: parameters that one op updates.
        begins_with_gradients: the gradients of the step before are released after the first op, not at the end.
        frozen: every so many parameters one has no gradient; 0 for none.
    """

    states: int = 2
    group: int = 1
    begins_with_gradients: bool = False
    frozen: int = 0


def make_trace(
    layers: Sequence[Layer],
    *,
    batch_bytes: int = 16 * KIB,
    name: str = "made up",
    optimizer: Optimizer | None = None,
) -> Trace:
    """The step of a net: forward, backward, and the optimizer's step if there is one."""
    program = Program()
    batch = program.resident(batch_bytes, Role.INPUT)
    weights = [
        program.resident(layer.parameter_bytes, Role.PARAMETER) if layer.parameter_bytes else None for layer in layers
    ]
    frozen = {
        position
        for number, position in enumerate(position for position, weight in enumerate(weights) if weight is not None)
        if optimizer is not None and optimizer.frozen and number % optimizer.frozen == optimizer.frozen - 1
    }
    states: dict[int, list[int]] = {}
    earlier: list[int] = []
    for position, layer in enumerate(layers) if optimizer is not None else ():
        if weights[position] is not None and position not in frozen:
            states[position] = [
                program.resident(layer.parameter_bytes, Role.OPTIMIZER_STATE) for _ in range(optimizer.states)
            ]
            if optimizer.begins_with_gradients:
                earlier.append(program.resident(layer.parameter_bytes, Role.GRADIENT, f"weight{position}"))
    results: list[int] = []
    saves: list[list[int]] = []
    last_reader = {index: position for position, layer in enumerate(layers) for index in layer.inputs}
    for position, layer in enumerate(layers):
        inputs = [batch if index < 0 else results[index] for index in layer.inputs]
        weight = weights[position]
        reads = inputs if weight is None else [*inputs, weight]
        if layer.in_place:
            program.op_in_place(f"layer{position}_", reads, inputs[0], barrier=layer.barrier)
            results.append(inputs[0])
        else:
            results.append(program.op(f"layer{position}", reads, layer.nbytes, barrier=layer.barrier))
        kept = (inputs if "i" in layer.keeps else []) + ([results[-1]] if "o" in layer.keeps else [])
        saves.append([program.save(storage) for storage in kept])
        for index in {index for index in layer.inputs if index >= 0 and last_reader[index] == position}:
            if results[index] != results[-1]:
                program.release(storage=results[index])
        if position == 0:
            for gradient in earlier:
                program.release(storage=gradient)
    trained = [None if index in frozen else weight for index, weight in enumerate(weights)]
    gradients = _run_backward(program, layers, weights, results, saves, trained)
    _run_optimizer(program, optimizer, weights, gradients, states)
    return program.finish(name)


def _run_optimizer(
    program: Program,
    optimizer: Optimizer | None,
    weights: list[int | None],
    gradients: dict[int, int],
    states: dict[int, list[int]],
) -> None:
    updated = [position for position in sorted(gradients) if position in states]
    group = 1 if optimizer is None else optimizer.group
    for begin in range(0, len(updated), group):
        targets = [
            each
            for position in updated[begin : begin + group]
            for each in (weights[position], *states[position])
            if each is not None
        ]
        reads = [*targets, *(gradients[position] for position in updated[begin : begin + group])]
        program.update("update", reads, targets)


def _run_backward(
    program: Program,
    layers: Sequence[Layer],
    weights: list[int | None],
    results: list[int],
    saves: list[list[int]],
    trained: list[int | None],
) -> dict[int, int]:
    """Return the gradient of each layer's weight."""
    made_for: dict[int, int] = {}
    gradients: dict[int, int] = {
        len(layers) - 1: program.op("seed", [results[-1]], layers[-1].nbytes, role=Role.TEMPORARY)
    }
    program.release(storage=results[-1])
    for position in reversed(range(len(layers))):
        layer = layers[position]
        gradient = gradients.pop(position, None)
        needs = [program.need(save) for save in saves[position]] if gradient is not None else []
        if gradient is not None:
            found = [program._saves[save].storage for save in saves[position]]
            weight = weights[position]
            reads = [gradient, *found, *([] if weight is None else [weight])]
            if trained[position] is not None:
                made_for[position] = program.op(f"weight{position}", reads, layer.parameter_bytes, role=Role.GRADIENT)
            for index in sorted({index for index in layer.inputs if index >= 0}):
                made = program.op(f"back{position}", reads, layers[index].nbytes, role=Role.TEMPORARY)
                if index in gradients:
                    program.op_in_place("add_", [gradients[index], made], gradients[index])
                    program.release(storage=made)
                else:
                    gradients[index] = made
            program.release(storage=gradient)
        for need in needs:
            program.release(need=need)
        for save in saves[position]:
            program.release(save=save)
    return made_for


def make_chain(sizes: Sequence[int], *, keeps: str = "i", barriers: frozenset[int] = frozenset()) -> Trace:
    """One layer after another; `barriers` by position."""
    layers = [
        Layer(
            inputs=(position - 1,),
            nbytes=nbytes,
            parameter_bytes=4 * KIB,
            keeps=keeps,
            barrier="draws numbers" if position in barriers else "",
        )
        for position, nbytes in enumerate(sizes)
    ]
    return make_trace(layers, name="chain")


def make_residual_net(blocks: int, nbytes: int) -> Trace:
    """Blocks of product, norm, activation in place, product, and a sum with what came in."""
    layers = [Layer(inputs=(-1,), nbytes=nbytes, parameter_bytes=4 * KIB)]
    for _ in range(blocks):
        begin = len(layers) - 1
        layers += [
            Layer(inputs=(begin,), nbytes=nbytes, parameter_bytes=8 * KIB),
            Layer(inputs=(begin + 1,), nbytes=nbytes, parameter_bytes=KIB),
            Layer(inputs=(begin + 2,), nbytes=nbytes, keeps="o", in_place=True),
            Layer(inputs=(begin + 3,), nbytes=nbytes, parameter_bytes=8 * KIB),
            Layer(inputs=(begin, begin + 4), nbytes=nbytes, keeps=""),
        ]
    return make_trace(layers, name="residual net")


def make_unet(depth: int, nbytes: int) -> Trace:
    """Down, each level half the bytes of the one above, and up again beside what was kept on the way down."""
    layers = [Layer(inputs=(-1,), nbytes=nbytes, parameter_bytes=KIB)]
    for level in range(1, depth):
        layers.append(Layer(inputs=(level - 1,), nbytes=nbytes >> level, parameter_bytes=KIB << level))
    for level in reversed(range(depth - 1)):
        below = len(layers) - 1
        layers.append(Layer(inputs=(below,), nbytes=nbytes >> level, parameter_bytes=KIB << level))
        layers.append(Layer(inputs=(level, below + 1), nbytes=2 * (nbytes >> level), keeps=""))
        layers.append(Layer(inputs=(below + 2,), nbytes=nbytes >> level, keeps="io", parameter_bytes=KIB << level))
    return make_trace(layers, name="U-net")


def make_link(*, per_second: float = 1e9, latency_seconds: float = 1e-6, half_duplex: bool = False) -> Link:
    """A path to the tier below, alike in both directions."""
    return Link(
        upper="device",
        lower="below",
        out_latency_seconds=latency_seconds,
        out_bytes_per_second=per_second,
        back_latency_seconds=latency_seconds,
        back_bytes_per_second=per_second,
        half_duplex=half_duplex,
        drag_seconds_per_byte=0.0,
        source="made up",
    )


def make_costs(
    trace: Trace,
    *,
    op_seconds: float | Sequence[float] = 1e-5,
    workspace_bytes: int = 0,
    link: Link | None = None,
    disk: Link | None = None,
    alignment_bytes: int = 1,
    hook_seconds: float = 0.0,
) -> Costs:
    """Costs of a trace: the same for every op, unless `op_seconds` lists them."""
    times = tuple(op_seconds) if isinstance(op_seconds, Sequence) else (op_seconds,) * len(trace.ops)
    return Costs(
        trace_digest=digest(trace),
        profile_name="made up",
        op_seconds=times,
        workspace_bytes=(workspace_bytes,) * len(trace.ops),
        link=link or make_link(),
        further_links=() if disk is None else (disk,),
        alignment_bytes=alignment_bytes,
        hook_seconds=hook_seconds,
        overhead_seconds=0.0,
        measured=False,
    )


def keep_everything(costs: Costs) -> Plan:
    """The plan that decides nothing."""
    return Plan(trace_digest=costs.trace_digest, strategy="none", budget_bytes=0, decisions=(), segments=())


def _sizes(most: int = 256) -> some.SearchStrategy[int]:
    return some.integers(1, most).map(lambda count: count * KIB)


@some.composite
def nets(draw: some.DrawFn) -> list[Layer]:
    """Nets of a few layers with any wiring."""
    layers: list[Layer] = []
    saved: set[int] = set()
    read: set[int] = set()
    for position in range(draw(some.integers(2, 14))):
        previous = position - 1
        in_place = (
            previous >= 0
            and previous not in read
            and previous not in saved
            and not layers[previous].in_place
            and draw(some.integers(0, 4)) == 0
        )
        others = [] if in_place else draw(some.lists(some.integers(-1, max(previous, -1)), max_size=2, unique=True))
        inputs = tuple(sorted({previous, *others}))
        # What is overwritten must be read by nothing else, and its own result is what backward may use.
        barred = {index for index, layer in enumerate(layers) if index + 1 < position and layers[index + 1].in_place}
        inputs = tuple(index for index in inputs if index not in barred)
        keeps = "o" if in_place else draw(some.sampled_from(["", "i", "o", "io", "i", "i"]))
        layers.append(
            Layer(
                inputs=inputs,
                nbytes=layers[previous].nbytes if in_place else draw(_sizes()),
                parameter_bytes=draw(some.sampled_from([0, KIB, 8 * KIB])),
                keeps=keeps,
                in_place=in_place,
                barrier="draws numbers" if draw(some.integers(0, 9)) == 0 else "",
            )
        )
        read.update(inputs)
        if "i" in keeps:
            saved.update(inputs)
        if "o" in keeps:
            saved.add(position)
    return layers


traces: some.SearchStrategy[Trace] = some.one_of(
    nets().map(make_trace),
    some.builds(make_chain, some.lists(_sizes(), min_size=2, max_size=16), keeps=some.sampled_from(["i", "o", "io"])),
    some.builds(make_residual_net, some.integers(1, 4), _sizes()),
    some.builds(make_unet, some.integers(2, 5), some.sampled_from([256 * KIB, 1024 * KIB])),
)

links = some.builds(
    make_link,
    per_second=some.sampled_from([1e8, 1e9, 1e10, 1e12]),
    latency_seconds=some.sampled_from([0.0, 1e-6, 1e-3]),
    half_duplex=some.booleans(),
)


disks = some.builds(
    make_link,
    per_second=some.sampled_from([1e7, 1e9, 1e13]),
    latency_seconds=some.sampled_from([0.0, 1e-5, 1e-3]),
    half_duplex=some.booleans(),
)


@some.composite
def jobs(draw: some.DrawFn, *, disk: bool = False) -> tuple[Trace, Costs]:
    """A trace and what it costs on some machine, with a disk behind the tier below or without."""
    trace = draw(traces)
    times = some.sampled_from([0.0, 1e-6, 1e-5, 1e-4, 1e-3])
    return trace, make_costs(
        trace,
        op_seconds=draw(some.lists(times, min_size=len(trace.ops), max_size=len(trace.ops))),
        workspace_bytes=draw(some.sampled_from([0, 1000, 64 * KIB])),
        link=draw(links),
        disk=draw(disks) if disk else None,
        alignment_bytes=draw(some.sampled_from([1, 64, 512])),
        hook_seconds=draw(some.sampled_from([0.0, 1e-6])),
    )


@functools.cache
def example() -> tuple[Trace, Costs]:
    """One ordinary job: a residual net on a machine whose link keeps up with some of it."""
    trace = make_residual_net(3, 256 * KIB)
    return trace, make_costs(trace, op_seconds=1e-4, workspace_bytes=4 * KIB, link=make_link(per_second=5e8))


@some.composite
def cyclic_traces(draw: some.DrawFn) -> Trace:
    """Steps with an optimizer, and parameters of which some are large enough to move."""
    layers = [
        dataclasses.replace(layer, parameter_bytes=draw(some.sampled_from([0, 8, 16, 40, 96])) * KIB)
        for layer in draw(nets())[:8]
    ]
    optimizer = Optimizer(
        states=draw(some.integers(0, 2)),
        group=draw(some.integers(1, 3)),
        begins_with_gradients=draw(some.booleans()),
        frozen=draw(some.sampled_from([0, 2, 3])),
    )
    return make_trace(layers, optimizer=optimizer)


@some.composite
def cyclic_steps(draw: some.DrawFn) -> tuple[Trace, Costs]:
    """Such steps, and what they cost on machines with all kinds of links."""
    trace = draw(cyclic_traces())
    link = make_link(per_second=draw(some.sampled_from([1e8, 1e9, 1e10])), half_duplex=draw(some.booleans()))
    return trace, make_costs(
        trace, op_seconds=draw(some.sampled_from([0.0, 2e-5, 2e-4])), workspace_bytes=KIB, link=link
    )

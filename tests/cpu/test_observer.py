"""The observer beside a dispatch mode: the same ops, storages, writes and bits, and nobody notices it."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from elbowroom.hooks.identity import get_plain_storage
from elbowroom.hooks.recorded import find_recorded_barrier, tell_statistics
from elbowroom.hooks.replayable import find_barrier, iterate_tensors
from elbowroom.native import library
from tests.models import MODELS

native = library.load(library.OBSERVER)
tell_statistics(native)

# A mode sees these, which are not there without one: autograd detaches what it saves of an op's own results in another
# way, gradients are added up in place, `reshape` makes its view by another op, and labels are no ops of a step.
ONLY_IN_A_MODE = ("aten.detach.default", "profiler.")
ANOTHER_IN_A_MODE = {
    "aten.add_.Tensor": "aten.add.Tensor",
    "aten._reshape_alias.default": "aten.view.default",
    "aten._index_put_impl_.default": "aten.index_put.default",
    "aten._make_dual.default": "aten.alias.default",
    "aten._fw_primal.default": "aten.alias.default",
}


def normalise(names: Sequence[str]) -> list[str]:
    """Names of ops without those that differ because a mode is there."""
    return [ANOTHER_IN_A_MODE.get(name, name) for name in names if not name.startswith(ONLY_IN_A_MODE)]


@contextlib.contextmanager
def observing(**options: bool) -> Iterator[Any]:
    """An observer that is started."""
    observer = native.Observer(**options)
    observer.start()
    try:
        yield observer
    finally:
        observer.stop()


def observe(run: Callable[[], Any], **options: bool) -> Any:
    """The observer of a run that has ended."""
    with observing(**options) as observer:
        run()
    return observer


def list_names(observer: Any) -> list[str]:
    """The names of the ops that it has recorded."""
    return [op.name for op in observer.ops()]


class Names(TorchDispatchMode):
    """Lists the ops that it is called with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Replaying(Names):
    """Replays each op right after it has run, and compares the bits of what it makes."""

    replayed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        kwargs = kwargs or {}
        observer = native.Observer()
        observer.start()
        try:
            result = func(*args, **kwargs)
        finally:
            observer.stop()
        (op,) = observer.ops() or (None,)
        if op is None or find_recorded_barrier(op):
            assert op is None or op.obstacle or find_barrier(func, args, kwargs), op.name
            return result
        storages = [get_plain_storage(tensor) for tensor in iterate_tensors((args, list(kwargs.values())))]
        present = {observer.storage_record(each).number: (each, 0) for each in storages if each is not None}
        made = {use.storage: use for use in op.results if use is not None and use.storage not in present}
        if op.written and not set(op.written).isdisjoint(use.storage for use in op.reads):
            with pytest.raises(RuntimeError, match="which the replay has not made"):
                observer.replay([0], present, list(made))
            return result
        again = observer.replay([0], present, list(made))
        for tensor in iterate_tensors(result):
            number = observer.storage_record(tensor).number
            # (Of the workspace of oneDNN's LSTM, bytes, not all are written.)
            if number in again and tensor.numel() and tensor.dtype != torch.uint8:
                view = torch.empty(0, dtype=tensor.dtype).set_(
                    again[number], tensor.storage_offset(), tensor.shape, tensor.stride()
                )
                assert same_bits(view, tensor), func
        self.replayed += 1
        return result


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have equal bits; NaN equals itself."""
    one, other = one.detach().contiguous().reshape(-1), other.detach().contiguous().reshape(-1)
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("name", MODELS)
def test_ops_are_those_that_a_mode_sees_and_replays_give_their_bits(name: str) -> None:
    case = MODELS[name]()
    mode = Replaying()
    _, _, step = case.make()
    step(0)
    with mode:
        seen = step(1)
    _, _, step = case.make()
    step(0)
    with observing() as observer:
        observed = step(1)
    names = [op.name for op in observer.ops() if "exception" not in op.obstacle]  # checkpointing stops itself so
    assert normalise(names) == normalise(mode.names)
    assert mode.replayed > len(names) / 3
    assert same_bits(seen, observed)


class Structure(Names):
    """Lists for each op which storages it reads and returns, numbered as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[int, int] = {}
        self.kept: list[Any] = []
        self.ops: list[tuple[str, list[int], list[int]]] = []

    def number(self, value: Any) -> list[int]:
        """The numbers of the storages of some tensors, which stay alive: no address is used twice."""
        storages = [each for tensor in iterate_tensors(value) if (each := get_plain_storage(tensor)) is not None]
        self.kept += storages
        return [self.numbers.setdefault(id(each), len(self.numbers)) for each in storages]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = self.number((args, list((kwargs or {}).values())))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.ops.append((str(func), reads, self.number(result)))
        return result


@pytest.mark.parametrize("name", ["unet", "vgg16_bn"])
def test_storages_are_those_that_a_mode_sees(name: str) -> None:
    case = MODELS[name]()
    _, _, step = case.make()
    step(0)
    with Structure() as mode:
        step(1)
    _, _, step = case.make()
    step(0)
    observer = observe(lambda: step(1))
    numbers: dict[int, int] = {}

    def number(uses: Any) -> list[int]:
        return [numbers.setdefault(use.storage, len(numbers)) for use in uses if use is not None]

    ops = []
    for op in observer.ops():
        arguments = [each for each in flatten(op.arguments) if hasattr(each, "storage")]
        ops.append((op.name, number(arguments), number(op.results)))
    assert [op for op in ops if not op[0].startswith(ONLY_IN_A_MODE)] == [
        op for op in mode.ops if not op[0].startswith(ONLY_IN_A_MODE)
    ]
    for record in observer.storages():
        makers = [
            op for op in observer.ops() if record.number in {use.storage for use in op.results if use is not None}
        ]
        if record.made_by is not None:
            assert makers[0].number == record.made_by
        assert list(record.writers) == [op.number for op in observer.ops() if record.number in op.written]
        assert record.version == len(record.writers)


def flatten(value: Any) -> Iterator[Any]:
    """What is in a tuple of tuples."""
    if isinstance(value, tuple):
        for item in value:
            yield from flatten(item)
    else:
        yield value


# All sorts of programs -------------------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    """A function with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


@torch.library.custom_op("elbowroom_test::scale", mutates_args=())
def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    return (x * by).clone()


def _keep_factor(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.by = inputs[1]


scale.register_autograd(lambda ctx, gradient: (scale(gradient, ctx.by), None), setup_context=_keep_factor)


def _leaf(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 2, int(torch.Size(shape).numel())).reshape(shape).requires_grad_()


def _double_backward() -> None:
    x = _leaf(4, 3)
    (gradient,) = torch.autograd.grad((x.tanh() ** 3).sum(), x, create_graph=True)
    gradient.square().sum().backward()


def _in_place() -> None:
    x = _leaf(6)
    y = x * 2
    y.mul_(3)
    y[1:3] = 0
    y.pow_(2).relu_().sum().backward()
    torch.add(x.detach(), 1, out=torch.empty(6))
    x.data.add_(1)


def _inference() -> None:
    with torch.inference_mode():
        functional.linear(torch.ones(2, 3), torch.ones(4, 3)).softmax(0)
    with torch.no_grad():
        functional.linear(torch.ones(2, 3), torch.ones(4, 3))


def _optimizers() -> None:
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        x = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([x], **options)  # type: ignore[arg-type]
        x.square().sum().backward()
        optimizer.step()


def _autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        functional.linear(_leaf(2, 3), _leaf(4, 3)).sum().backward()


def _factories() -> None:
    torch.zeros(3)
    torch.tensor([1.0, 2.0])
    torch.arange(4).to(torch.float64)
    torch.randn(1, generator=torch.Generator().manual_seed(0)).item()


def _transforms() -> None:
    torch.func.vmap(lambda x: x.sin() * 2)(torch.ones(3, 2))
    torch.func.grad(lambda x: (x.sin() * 2).sum())(torch.ones(3))


def _scripted() -> None:
    torch.jit.script(_twice)(torch.ones(3))


def _twice(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x + x) * 2


PROGRAMS: dict[str, Callable[[], Any]] = {
    "double backward": _double_backward,
    "in place": _in_place,
    "inference": _inference,
    "optimizers": _optimizers,
    "autocast": _autocast,
    "factories": _factories,
    "a function": lambda: Cube.apply(_leaf(3)).sum().backward(),
    "a custom op": lambda: scale(_leaf(3), 2.0).sum().backward(),
    "transforms": _transforms,
    "embedding": lambda: (
        functional.embedding_bag(torch.tensor([0, 1]), _leaf(3, 2), torch.tensor([0])).sum().backward()
    ),
    "complex": lambda: torch.view_as_real(torch.view_as_complex(_leaf(3, 2)) * 2).sum().backward(),
    "indexing": lambda: _leaf(4, 3)[torch.tensor([0, 2])].sum().backward(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_have_the_ops_that_a_mode_sees(name: str) -> None:
    run = PROGRAMS[name]
    with Names() as mode:
        run()
    assert normalise(list_names(observe(run))) == normalise(mode.names)


def test_scripted_functions_are_seen_op_by_op() -> None:
    assert list_names(observe(_scripted))[-3:] == ["aten.add.Tensor", "aten.relu.default", "aten.mul.Scalar"]


def test_tangents_are_ops_of_their_own() -> None:
    import torch.autograd.forward_ad as forward_ad

    def run() -> None:
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.ones(3), torch.ones(3)).sin()

    with Names() as mode:
        run()
    assert normalise(list_names(observe(run))) == normalise(mode.names)


# Odd tensors -----------------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """A tensor of a class that decides itself what ops do."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.ones(3)


def test_odd_tensors_are_marked_as_not_replayable() -> None:
    with observing() as observer:
        torch.eye(3).to_sparse().coalesce() * 2
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8).dequantize()
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) * 2
        torch.empty(3, device="meta").add_(1)
        torch.ones(3, dtype=torch.complex64).conj() * 2
        torch.Tensor._make_subclass(Wrapped, torch.ones(3)) * 2
        torch._foreach_add([torch.ones(2), torch.ones(3)], 1)
        torch.ops.aten.index(torch.ones(3), [None, torch.tensor([0])][1:])
    obstacles = {op.obstacle for op in observer.ops()}
    for word in ("without a storage", "quantized", "without bytes", "conjugate", "__torch_dispatch__"):
        assert any(word in each for each in obstacles), (word, obstacles)
    assert all(op.has_ended for op in observer.ops())
    for op in observer.ops():
        assert isinstance((op.arguments, op.reads, op.results, op.written), tuple)
        if op.obstacle:
            with pytest.raises(RuntimeError, match="cannot be replayed"):
                observer.replay([op.number], {}, [])


# Replays ---------------------------------------------------------------------------------------------------------


def find_chain(observer: Any, wanted: int) -> list[int]:
    """The ops that make a storage, with all that they read and that an op has made or written."""
    storages, ops = {wanted}, []
    for op in reversed(observer.ops()):
        if not storages.isdisjoint([*op.written, *(use.storage for use in op.results)]):
            ops.append(op.number)
            storages.update(use.storage for use in op.reads)
    return ops[::-1]


def test_a_chain_is_replayed_with_batch_norm_and_writes_in_place() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True)]
    model, x = nn.Sequential(*layers), torch.randn(4, 3, 16, 16)
    seen = []
    with observing() as observer:
        output = model(x)
        wanted = observer.storage_record(output).number
        chain = find_chain(observer, wanted)
        present = {
            observer.storage_record(each).number: (each.untyped_storage(), observer.storage_record(each).version)
            for each in (x, *model.parameters(), *model.buffers())
        }
        threads = torch.get_num_threads()
        before = [each.clone() for each in model.buffers()]
        count = len(observer.ops())
        for _ in range(2):
            torch.set_num_threads(threads + 1)  # a replay runs under what the op ran under
            storage = observer.replay(chain, present, [wanted])[wanted]
            assert torch.get_num_threads() == threads + 1
            torch.set_num_threads(threads)
            seen.append(torch.empty(0).set_(storage, 0, output.shape, output.stride()))
        later = {op.name for op in observer.ops()[count:]}
        assert later == {"aten.empty.memory_format", "aten.set_.source_Storage_storage_offset"}  # of `seen` itself
    assert all(same_bits(each, output) for each in seen)
    assert all(map(torch.equal, before, model.buffers()))


def test_replays_that_would_be_wrong_are_refused() -> None:
    x = torch.ones(3)
    with observing() as observer:
        y = x * 2
        z = y + 1
        y.mul_(3)
    number = {name: observer.storage_record(each).number for name, each in {"x": x, "y": y, "z": z}.items()}
    with pytest.raises(RuntimeError, match="is not there"):
        observer.replay([1], {}, [number["z"]])
    with pytest.raises(RuntimeError, match="after 0 writes, and is given it after 1"):
        observer.replay([1], {number["y"]: (y.untyped_storage(), 1)}, [number["z"]])
    with pytest.raises(RuntimeError, match="which the replay has not made"):
        observer.replay([2], {number["y"]: (y.untyped_storage(), 0)}, [])
    with pytest.raises(RuntimeError, match="was not made"):
        observer.replay([0], {number["x"]: (x.untyped_storage(), 0)}, [number["z"]])
    with pytest.raises(RuntimeError, match="there is no op 17"):
        observer.replay([17], {}, [])
    made = observer.replay([0, 1, 2], {number["x"]: (x.untyped_storage(), 0)}, [number["y"], number["z"]])
    assert torch.empty(0).set_(made[number["z"]]).tolist() == [3, 3, 3]
    assert torch.empty(0).set_(made[number["y"]]).tolist() == [6, 6, 6]


# Writes ----------------------------------------------------------------------------------------------------------


def test_writes_to_what_is_watched_are_told_before_and_after() -> None:
    x, other, told = torch.ones(3), torch.ones(3), []
    observer = native.Observer()

    def on_write(op: int, storages: tuple[int, ...], is_before: bool) -> None:
        told.append((observer.ops()[op].name, storages, is_before, (x * 1).tolist()))

    observer.set_on_write(on_write)
    observer.start()
    observer.watch(x)
    number = observer.storage_record(x).number
    other.add_(1)
    x.data.add_(1)
    torch.mul(x, 2, out=x)
    x.view(3)[0:1].zero_()
    observer.watch(x, False)
    x.zero_()
    observer.stop()
    assert told == [
        ("aten.add_.Tensor", (number,), True, [1, 1, 1]),
        ("aten.add_.Tensor", (number,), False, [2, 2, 2]),
        ("aten.mul.out", (number,), True, [2, 2, 2]),
        ("aten.mul.out", (number,), False, [4, 4, 4]),
        ("aten.zero_.default", (number,), True, [4, 4, 4]),
        ("aten.zero_.default", (number,), False, [0, 4, 4]),
    ]
    assert observer.storage_record(x).version == 4
    assert "aten.mul.Tensor" not in list_names(observer)  # its own ops are nobody's


def test_an_error_of_the_listener_comes_at_the_end() -> None:
    x, observer = torch.ones(3), native.Observer()

    def on_write(op: int, storages: tuple[int, ...], is_before: bool) -> None:
        raise ValueError(f"first: {is_before}")

    observer.set_on_write(on_write)
    observer.start()
    observer.watch(x.untyped_storage())
    x.add_(1)
    with pytest.raises(ValueError, match="first: True"):
        observer.stop()
    assert not observer.is_started
    assert x.tolist() == [2, 2, 2]


# Nobody notices --------------------------------------------------------------------------------------------------


def _list_lives(run: Callable[[], Iterator[torch.Tensor]]) -> list[list[bool]]:
    references: list[weakref.ref[Any]] = []
    lives = []
    for tensor in run():
        references.append(weakref.ref(tensor.untyped_storage()))
        del tensor
        lives.append([each() is not None for each in references])
    return lives


def _program_of_lives() -> Iterator[torch.Tensor]:
    x = _leaf(4)
    y = x * 2
    yield y
    z = y.exp()
    yield z
    del y
    yield z + 1
    w = (z * z).sum()
    yield w
    del z
    w.backward()
    yield x.grad  # type: ignore[misc]
    yield torch.cat([torch.ones(2), torch.zeros(2)])
    del w
    yield torch.zeros(3)


def test_nothing_is_kept_alive() -> None:
    plain = _list_lives(_program_of_lives)
    for tracks_deaths in (False, True):
        with observing(tracks_deaths=tracks_deaths) as observer:
            assert _list_lives(_program_of_lives) == plain
        assert not all(record.is_alive for record in observer.storages())


def test_deaths_are_counted_in_ops() -> None:
    with observing(tracks_deaths=True) as observer:
        x = torch.ones(3)
        y = x + 1
        z = y + 1
        del y
        z + 1
    records = [observer.storages()[op.results[0].storage] for op in observer.ops()]
    assert [record.died_before for record in records] == [None, 3, None, 4]
    assert [record.made_by for record in records] == [0, 1, 2, 3]
    assert x.sum() == 3


def test_an_address_that_is_used_again_is_another_storage() -> None:
    with observing() as observer:
        for _ in range(50):
            torch.ones(3) + 1
    assert len({use.storage for op in observer.ops() for use in op.results}) == 100


def test_exceptions_end_their_ops() -> None:
    class Stop(Exception):
        pass

    def stop(tensor: torch.Tensor) -> torch.Tensor:
        raise Stop

    with observing() as observer:
        with pytest.raises(RuntimeError):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        x = _leaf(3)
        with torch.autograd.graph.saved_tensors_hooks(stop, stop), pytest.raises(Stop):
            x.exp()
        torch.ones(3).relu()
    failed = [op.name for op in observer.ops() if op.obstacle == "it raised an exception"]
    assert failed == ["aten.mm.default", "aten.exp.default"]
    assert list_names(observer)[-3:] == ["aten.exp.default", "aten.ones.default", "aten.relu.default"]
    assert all(op.has_ended for op in observer.ops())


def test_formulas_are_those_of_plain_pytorch() -> None:
    def run(function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(6, 6).requires_grad_()
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return [first, second]

    mask = torch.eye(6).bool()
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: (x.sigmoid() + 0.5).prod(1),
        lambda x: x.masked_fill(mask, 0.3) * x,
        lambda x: x.det(),
        lambda x: (x.sigmoid() + 0.5).cumprod(1),
    ]
    for function in functions:
        plain = run(function)
        with observing():
            observed = run(function)
        assert all(map(same_bits, plain, observed))


def test_compiled_code_runs_as_often_as_without() -> None:
    calls = []

    def count(graph: Any, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func

        def run(*args: Any) -> Any:
            calls.append(1)
            return graph(*args)

        return make_boxed_func(run)

    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=count, bw_compiler=count))
    x = torch.ones(2, 4)
    with observing() as observer:
        compiled(x).sum().backward()
    assert len(calls) == 2
    assert "aten.addmm.default" in list_names(observer)
    compiling = len(observer.ops())
    observer.start()
    compiled(x).sum().backward()
    observer.stop()
    assert len(calls) == 4
    assert len(observer.ops()) <= compiling
    torch._dynamo.reset()


def test_other_threads_are_not_observed() -> None:
    def run() -> None:
        with observing() as inner:
            torch.ones(3).exp()
        inside.append(list_names(inner))

    inside: list[list[str]] = []
    thread = threading.Thread(target=run)
    with observing() as observer:
        thread.start()
        thread.join()
        torch.ones(3)
        with pytest.raises(RuntimeError, match="is started already"):
            observer.start()
        errors: list[Exception] = []

        def stop() -> None:
            try:
                observer.stop()
            except RuntimeError as error:
                errors.append(error)

        other = threading.Thread(target=stop)
        other.start()
        other.join()
    assert list_names(observer) == ["aten.ones.default"]
    assert inside == [["aten.ones.default", "aten.exp.default"]]
    assert [str(each) for each in errors] == ["an observer is stopped by the thread that started it"]
    with pytest.raises(RuntimeError, match="is not started"):
        observer.stop()


def test_observers_nest_and_pause() -> None:
    with observing() as outer:
        torch.ones(1)
        with observing() as inner:
            torch.zeros(1)
            inner.pause()
            inner.pause()
            torch.ones(2) * 3
            inner.resume()
            torch.ones(2) * 3
            inner.resume()
            torch.full((1,), 2.0)
        torch.ones(1).sin()
        others = [native.Observer() for _ in range(3)]
        for each in others:
            each.start()
        with pytest.raises(RuntimeError, match="4 started observers"):
            native.Observer().start()
        others[1].stop()  # in any order
        native.Observer().start()  # and one that nobody stops
        gc.collect()
        torch.ones(1)
        for each in (others[0], others[2]):
            each.stop()
    assert list_names(inner) == ["aten.zeros.default", "aten.full.default"]
    assert list_names(outer) == [
        *("aten.ones.default", "aten.zeros.default", "aten.full.default", "aten.ones.default", "aten.sin.default"),
        "aten.ones.default",
    ]
    assert list_names(others[2]) == ["aten.ones.default"]


def test_stopping_inside_an_op() -> None:
    observer = native.Observer()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        observer.stop()
        observer.start()
        return tensor

    observer.start()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _leaf(3).exp()
    torch.ones(3).neg()
    observer.stop()
    assert list_names(observer)[-2:] == ["aten.ones.default", "aten.neg.default"]


class Counting(torch.utils.data.Dataset[int]):
    """How many ops an observer has recorded where its items are made."""

    def __init__(self, observer: Any) -> None:
        self.observer = observer

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        (torch.ones(3) * 2).sum()
        return len(self.observer.ops())


def test_workers_of_a_loader_are_not_observed() -> None:
    with observing() as observer:
        torch.ones(3)
        loader = torch.utils.data.DataLoader(Counting(observer), num_workers=1, batch_size=None)
        assert len(set(loader)) == 1
        torch.ones(3)
        assert list_names(observer)[-1] == "aten.ones.default"


def test_the_interpreter_may_exit_while_one_is_started() -> None:
    script = (
        "import torch\n"
        "from elbowroom.native import library\n"
        "class Last:\n"
        "    def __del__(self): torch.ones(3).add_(1)\n"
        "kept = Last()\n"
        "observer = library.load(library.OBSERVER).Observer()\n"
        "x = torch.ones(3)\n"
        "observer.set_on_write(lambda *args: None)\n"
        "observer.start()\n"
        "observer.watch(x)\n"
        "x.add_(1)\n"
        "torch._observer = observer\n"
        "print(len(observer.ops()))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n", "")


def test_profilers_see_the_same() -> None:
    def run() -> None:
        _leaf(3).exp().sum().backward()

    def profile() -> list[list[str]]:
        with torch.autograd.profiler.profile() as old:
            run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as new:
            run()
        events = old.function_events, new.events()
        return [sorted(event.name for event in each if event.name.startswith("aten::")) for each in events]  # type: ignore[union-attr]

    plain = profile()
    with observing() as observer:
        observed = profile()
    assert observed == plain
    once = list_names(observe(run))
    assert [each for each in list_names(observer) if each in set(once)] == once * 2


def test_an_operator_that_is_taken_away_is_forgotten() -> None:
    for count in range(3):
        defined = torch.library.Library("elbowroom_test_gone", "DEF")
        defined.define("op(Tensor x) -> Tensor" if count % 2 else "op(Tensor x, int n=1) -> Tensor")
        defined.impl("op", lambda x, n=1: x + n, "CPU")
        x = torch.ones(3)
        with observing() as observer:
            y = torch.ops.elbowroom_test_gone.op(x)
        assert list_names(observer) == ["elbowroom_test_gone.op.default"]
        number = observer.storage_record(x).number
        wanted = observer.storage_record(y).number
        made = observer.replay([0], {number: (x.untyped_storage(), 0)}, [wanted])
        assert torch.empty(0).set_(made[wanted]).tolist() == [2, 2, 2]
        del torch.ops.elbowroom_test_gone.op
        defined._destroy()
        with pytest.raises(RuntimeError, match="has been taken away"):
            observer.replay([0], {number: (x.untyped_storage(), 0)}, [wanted])

"""The library in C++ does what Python does without: it puts down the same, and nothing is the worse for its absence."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib.util
import logging
import os
import pathlib
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import elbowroom
from elbowroom.errors import Infeasible, UsageError
from elbowroom.hooks import kinds
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.quick import library
from elbowroom.room import Room
from elbowroom.runtime.calls import Slot
from elbowroom.runtime.history import Run
from elbowroom.runtime.online_engine import OnlineEngine

WIDTH = 24
Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@pytest.fixture
def quick() -> Any:
    """The library; skips the test where it has not been built."""
    loaded = library.load()
    if loaded is None:
        pytest.skip("the library has not been built: elbowroom build")
    return loaded


# What is put down ----------------------------------------------------------------------------------------------------


def make_model() -> nn.ModuleDict:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.LayerNorm(WIDTH)) for _ in range(3)]
    return nn.ModuleDict(
        {
            "layers": nn.Sequential(*layers),
            "images": nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.SiLU(), nn.MaxPool2d(2)),
            "turned": nn.MultiheadAttention(WIDTH, 4, batch_first=True),
            "words": nn.Embedding(50, WIDTH),
        }
    )


def plain_layers(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model["layers"](x).square().mean()  # type: ignore[index]


def images(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    batch = functional.pad(x, (0, 0)).repeat(1, 8)[:, :192].reshape(-1, 3, 8, 8)
    return model["images"](batch).flatten(1).softmax(-1).std()  # type: ignore[index]


def attention(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    words = model["words"](torch.arange(len(x)) % 50)[None]  # type: ignore[index]
    turned, weights = model["turned"](words, words, words)  # type: ignore[index]
    return functional.dropout(turned, 0.1).sum() + weights.square().sum()


def views_and_writes(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What is written to before it is saved, lists, several results, other dtypes, and scalars of all kinds."""
    y = model["layers"][0](x)  # type: ignore[index]
    left, right = (y * 2.5).split(WIDTH // 2, 1)
    whole = torch.cat([right.tanh(), (left + 1).relu_()], dim=1).add_(1, alpha=0.5)
    wide = whole.double().sort(dim=1).values.float()
    both = torch.stack((wide, wide.flip(0)))
    z = torch.zeros_like(both)
    z[1:] = both[1:]
    other = torch.zeros(3)
    with torch.no_grad():
        other.set_(torch.ones(2, 5).t()).mul_(2)  # type: ignore[call-overload]
        other.resize_(40).zero_()
    z = z + other.sum()
    turned = torch.view_as_real((torch.complex(z, both).conj() * 2).resolve_conj())
    return torch.where(turned > 0, turned, -0.1 * turned).mean() + y.topk(3).values.var()


def sparse_and_sources(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model["layers"](x)  # type: ignore[index]
    picked = torch.eye(len(x)).to_sparse()
    noise = torch.rand(len(x), WIDTH) * torch.arange(WIDTH) + torch.full((WIDTH,), 0.5)
    return (torch.sparse.mm(picked, y) * noise)[y.sum(1) > 0].sum() + torch.ones(()).to(torch.bfloat16).float()


FORWARDS = [plain_layers, images, attention, views_and_writes, sparse_and_sources]


def tell_run(run: Run | None) -> Any:
    def tell(value: Any) -> Any:
        if isinstance(value, Slot):
            kept = None if value.kept is None else value.kept.nbytes()
            return (value.residence.nbytes, value.residence.id, value.geometry, kept, value.seen, value.is_read)
        if isinstance(value, (list, tuple)):
            return type(value), [tell(each) for each in value]
        return type(value), value

    if run is None:
        return None
    named = {name: tell(value) for name, value in run.kwargs.items()}
    made = [(find() is not None, nbytes) for find, nbytes in zip(run.results[::2], run.results[1::2], strict=True)]
    return (
        run.place, run.func, [tell(each) for each in run.args], named, made, len(run.written), run.settings,
        run.estimate.nbytes,
    )  # fmt: skip


def tell_step(engine: OnlineEngine) -> dict[str, Any]:
    """All that a step knows of itself, but for seconds."""
    told: dict[str, Any] = {
        "ops": engine.historian.ops, "saves": engine.saves, "needs": engine.needs, "sizes": list(engine.sizes),
        "counted": engine.account.counted_bytes, "most": engine.account.most_bytes,
        "live": engine.account.live_bytes, "tick": engine._follower.tick, "due": engine._follower.due_ops,
        "extra": engine._follower._extra_ops, "bound": sorted(engine._bound),
    }  # fmt: skip
    if engine._past is not None:
        events = [iter(engine._past._events)] * 7
        told["events"] = [(*event[:4], event[6]) for event in zip(*events, strict=True)]
        guests = engine._past.list_guests()
        told["guests"] = [
            (guest.index, guest.version, guest.seen, None if guest.tensor is None else guest.tensor.shape)
            for guest in guests
        ]
        there = {guest.residence: None for guest in guests}
        told["residences"] = [
            [
                *(each.id, each.nbytes, each.version, each.is_outside, each.is_staying),
                *map(tell_run, (each.made_by, *each.changed_by)),
            ]
            for each in there
        ]
    return told


def put_down(forward: Forward, manner: str, is_quick: bool, profile: HardwareProfile) -> list[Any]:
    """What three steps say of themselves after their forward and their backward pass, and what came of them."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    told: list[Any] = []

    def take(room: Room, rows: int = 16) -> None:
        torch.manual_seed(7)
        with room.step():
            loss = forward(model, torch.randn(rows, WIDTH, generator=generator))
            if room._engine is not None:
                told.append(tell_step(room._engine))
            loss.backward()
            if room._engine is not None:
                told.append(tell_step(room._engine))
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.detach().clone())
            del loss

    options: dict[str, Any] = {
        "profile": profile,
        "quick": is_quick,
    }
    if manner == "planned":
        options |= {"mode": "auto", "always_watch": True}
    else:
        # Where what is offloaded may have no room, everything is recorded.
        options |= {"mode": "dynamic", "min_offload_bytes": 1, "host_bytes": 1 << 40 if manner == "recorded" else None}
    with elbowroom.fit(model, optimizer, 1 << 40, **options) as room:
        for _ in range(8 if manner == "planned" else 5):
            take(room)
            told = told[-9:]
        modes = [record.mode for record in room.journal().steps]
        assert (modes[-1] is Mode.PLANNED) == (manner == "planned")
    return [*told, *(each.detach().clone() for each in model.parameters())]


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same(found[name], value)
    else:
        assert found == expected


@pytest.mark.parametrize("manner", ["rests", "recorded", "planned"])
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_the_same_is_put_down(forward: Forward, manner: str, profile: HardwareProfile, quick: Any) -> None:
    expected = put_down(forward, manner, False, profile)
    found = put_down(forward, manner, True, profile)
    steps = [each for each in expected if isinstance(each, dict)]
    assert steps and any(each.get("events") for each in steps)
    runs = [each for step in steps for residence in step.get("residences", ()) for each in residence[5:]]
    assert any(run is not None for run in runs) == (manner == "recorded")
    assert_same(found, expected)


def test_a_budget_that_is_short_moves_the_same(profile: HardwareProfile, quick: Any) -> None:
    """By what an op needs, a policy that draws no lots decides, whoever asks it."""

    def train(is_quick: bool) -> tuple[list[torch.Tensor], list[tuple[int, int, int]]]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        options = {"profile": profile, "quick": is_quick, "mode": "dynamic", "policy": "lru", "min_offload_bytes": 256}
        found: list[torch.Tensor] = []
        with elbowroom.fit(model, optimizer, budget_bytes, **options) as room:
            for index in range(4):
                torch.manual_seed(index)
                with room.step():
                    loss = sum(plain_layers(model, torch.randn(256 + index, WIDTH)) for _ in range(3))
                    loss.backward()  # type: ignore[union-attr]
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(loss.detach())  # type: ignore[union-attr]
            records = [(each.peak_bytes or 0, each.offloaded_bytes, each.recomputed) for each in room.journal().steps]
        return [*found, *(each.detach().clone() for each in model.parameters())], records

    budget_bytes = 1 << 40
    plain, records = train(False)
    assert not any(moved or again for _, moved, again in records)
    budget_bytes = int(0.7 * max(peak for peak, _, _ in records))
    expected, expected_records = train(False)
    found, found_records = train(True)
    assert any(moved or again for _, moved, again in expected_records)
    assert all(peak <= budget_bytes for peak, _, _ in found_records)
    # When a tensor of some bytes dies in another thread, the peak may or may not have it.
    assert [each[1:] for each in found_records] == [each[1:] for each in expected_records]
    assert_same(found, expected)
    assert_same(found, plain)


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("manner", ["dynamic", "planned"])
def test_an_op_that_gives_its_argument_another_storage(manner: str, is_quick: bool, profile: HardwareProfile) -> None:
    name = f"elbowroom_test::exchange_{manner}_{is_quick}"

    @torch.library.custom_op(name, mutates_args=["x"])
    def exchange(x: torch.Tensor) -> None:
        x.set_(torch.ones(1 << 16))  # type: ignore[call-overload]

    model, options = (
        nn.Linear(8, 8),
        {
            "profile": profile,
            "quick": is_quick,
        },
    )
    options |= {"mode": "dynamic"} if manner == "dynamic" else {"mode": "auto", "always_watch": True}
    with elbowroom.fit(model, [], 1 << 40, **options) as room:
        for _ in range(8):
            with room.step():
                model(torch.ones(4, 8)).sum().backward()
                x = torch.zeros(4)
                before = tell_counted(room)
                exchange(x)
                gained = tell_counted(room) - before
                del x
        assert (room.journal().steps[-1].mode is Mode.PLANNED) == (manner == "planned")
    assert gained == (4 << 16) - 64  # the one that it had is gone


def tell_counted(room: Room) -> int:
    return 0 if room._engine is None else room._engine.account.live_bytes


@pytest.mark.parametrize("strategy", ["offload_all", "recompute_all"])
def test_what_was_saved_is_written_to(strategy: str, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch does not notice. Autograd then finds what was written, and no copy or replay of what was before."""
    monkeypatch.setattr("elbowroom.repertoire.keep_all_if_it_fits", lambda *_: None)

    def train(options: dict[str, Any] | None) -> list[torch.Tensor]:
        model, found = make_model(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with (
            contextlib.nullcontext() if options is None else elbowroom.fit(model, optimizer, 1 << 40, **options) as room
        ):
            for index in range(8):
                torch.manual_seed(index)
                with contextlib.nullcontext() if room is None else room.step():
                    h = model["layers"][0](torch.randn(16, WIDTH)).tanh()
                    y = h.sin() * h.cos()
                    if index % 2:
                        h.data.mul_(1.5)
                    with torch.no_grad():
                        h.detach().data.add_(float(index > 5))
                    del h
                    model["layers"](y).square().mean().backward()
                    optimizer.step()
                    found += [each.grad.clone() for each in model["layers"].parameters()]
                    optimizer.zero_grad()
            if room is not None:
                assert any(record.offloaded_bytes + record.recomputed for record in room.journal().steps[1:])
        return found

    options = {
        "profile": profile,
        "strategy": strategy,
        "min_offload_bytes": 1,
    }
    expected = train(None)
    for is_quick in (False, True):
        assert_same(train(options | {"quick": is_quick}), expected)


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("manner", ["dynamic", "planned"])
def test_what_was_saved_and_modified_is_refused(manner: str, is_quick: bool, profile: HardwareProfile) -> None:
    model, options = (
        nn.Linear(8, 8),
        {
            "profile": profile,
            "quick": is_quick,
        },
    )
    options |= {"mode": "dynamic"} if manner == "dynamic" else {"mode": "auto", "always_watch": True}
    with elbowroom.fit(model, [], 1 << 40, **options) as room:
        for index in range(9):
            with room.step():
                h = model(torch.ones(4, 8)).exp()
                if index < 8:
                    h.sum().backward()
                    continue
                with torch.no_grad():
                    h.add_(1)
                with pytest.raises(RuntimeError, match=r"is at version 1; expected version 0 instead"):
                    h.sum().backward()
        modes = [record.mode for record in room.journal().steps]
    assert (modes[7] is Mode.PLANNED) == (manner == "planned")


# What goes wrong ------------------------------------------------------------------------------------------------------


class Fails(TorchDispatchMode):
    """Of the program's own: refuses one op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.relu_.default:
            raise RuntimeError("refused")
        return func(*args, **(kwargs or {}))


def test_an_op_that_fails_reserves_nothing(profile: HardwareProfile, quick: Any) -> None:
    model = make_model()
    x = torch.randn(8, WIDTH)
    with elbowroom.fit(model, [], 1 << 40, profile=profile, mode="dynamic", quick=True) as room:
        for _ in range(6):  # until the ways are flat
            with room.step():
                plain_layers(model, x)
        with room.step():
            plain_layers(model, x)
            gc.collect()
            account = room._engine.account  # type: ignore[union-attr]
            before = account.live_bytes
            for _ in range(3):
                with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied"):
                    model["layers"](torch.randn(8, WIDTH + 1))
                with pytest.raises(RuntimeError, match="refused"), Fails():
                    plain_layers(model, x)
            gc.collect()
            assert account.live_bytes == before


def test_nothing_of_a_step_is_kept(profile: HardwareProfile, quick: Any) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with elbowroom.fit(model, optimizer, 1 << 40, profile=profile, mode="dynamic", quick=True) as room:
        gone: list[weakref.ref[Any]] = []
        gc.collect()
        gc.disable()
        try:
            for index in range(4):
                with room.step():
                    loss = plain_layers(model, torch.randn(8 + index, WIDTH))
                    engine = room._engine
                    assert engine is not None
                    each = [engine, engine.historian, engine.account, engine._follower, engine._past, engine._calm]
                    assert all(type(part).__mro__[1].__module__ == "elbowroom._quick" for part in each)
                    made = room._engine._past.list_guests()[0]  # type: ignore[union-attr]
                    for part in (made, made.residence):  # all that Python would have given it
                        assert all(hasattr(part, name) for name in type(part).__slots__)
                    del made, part
                    gone += map(weakref.ref, each)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    del engine, each, loss
            room._engine = None
            assert [find() for find in gone] == [None] * len(gone)
        finally:
            gc.enable()


def test_objects_do_not_pile_up(profile: HardwareProfile, quick: Any) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, counts = torch.randn(8, WIDTH), []
    with elbowroom.fit(model, optimizer, 1 << 40, profile=profile, mode="dynamic", quick=True) as room:
        for index in range(12):
            with room.step():
                attention(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()
            if index % 3 == 2:
                gc.collect()
                counts.append((len(gc.get_objects()), sys.getrefcount(None), sys.getrefcount(True)))
    grown = [later - earlier for earlier, later in zip(counts[1], counts[3], strict=True)]
    assert all(each < 100 for each in grown), counts  # the journal's records are some


def test_programs_in_several_threads(profile: HardwareProfile, quick: Any) -> None:
    """Each with a room of its own, and PyTorch's own thread for a backward pass where it takes one."""
    before, found = sys.getswitchinterval(), {}

    def train(index: int, is_quick: bool) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        for each in model.parameters():
            each.data.fill_(0.01 * (index + 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options = {"profile": profile, "quick": is_quick, "mode": "dynamic"}
        with elbowroom.fit(model, optimizer, 1 << 40, **options) as room:
            for step in range(20):
                with room.step():
                    model(torch.ones(4, WIDTH) * step).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        found[index, is_quick] = [each.detach().clone() for each in model.parameters()]

    sys.setswitchinterval(1e-6)
    try:
        for is_quick in (False, True):
            threads = [threading.Thread(target=train, args=(index, is_quick)) for index in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    for index in range(3):
        assert_same(found[index, True], found[index, False])


def test_two_threads_meet_an_op_for_the_first_time(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has found its kind, and is still using it when the other has."""
    barrier, made = threading.Barrier(2, timeout=20), kinds.Kind.__init__

    @torch.library.custom_op("elbowroom_test::met_by_two", mutates_args=[])
    def met(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @met.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is first:
            has_found.wait(20)
        return torch.empty_like(x)

    def make(self: Any, func: Any) -> None:
        made(self, func)
        if func._opname == "met_by_two":
            barrier.wait()
            if threading.current_thread() is not first:
                is_under_way.wait(20)

    def run() -> None:
        model = nn.Linear(8, 8)
        with elbowroom.fit(model, [], 1 << 40, profile=profile, mode="dynamic", quick=True) as room:
            for _ in range(2):
                with room.step():
                    found.append(torch.ops.elbowroom_test.met_by_two(model(torch.ones(4, 8))).shape)
                    (is_under_way if threading.current_thread() is first else has_found).set()

    monkeypatch.setattr(kinds.Kind, "__init__", make)
    found: list[torch.Size] = []
    has_found, is_under_way = threading.Event(), threading.Event()
    first, other = threading.Thread(target=run), threading.Thread(target=run)
    threading.Timer(1, is_under_way.set).start()
    for thread in (first, other):
        thread.start()
    for thread in (first, other):
        thread.join()
    assert found == [torch.Size((4, 8))] * 4


@pytest.mark.parametrize("is_quick", [False, True])
def test_what_no_number_of_the_library_holds(is_quick: bool, profile: HardwareProfile) -> None:
    model = make_model()
    with elbowroom.fit(model, [], 1 << 30, profile=profile, mode="dynamic", quick=is_quick) as room:
        for _ in range(5):
            with room.step():
                plain_layers(model, torch.randn(8, WIDTH))
                with pytest.raises(Infeasible, match=r"8388608\.00 TiB"):
                    torch.empty((1 << 61) - 2, dtype=torch.int32)


def test_the_compiler_leaves_ours_alone(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """What machine code calls is seen by no hidden function of Python's."""
    from torch._dynamo import convert_frame

    monkeypatch.setattr("elbowroom.repertoire.keep_all_if_it_fits", lambda *_: None)
    begun: list[str] = []
    convert = convert_frame.ConvertFrameAssert.__call__

    def note(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        begun.append(frame.f_code.co_filename)
        return convert(self, frame, *args, **kwargs)

    monkeypatch.setattr(convert_frame.ConvertFrameAssert, "__call__", note)
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for strategy in ("recompute_all", "offload_all"):

        def forward(x: torch.Tensor) -> torch.Tensor:
            for layer in model:
                x = layer(x).tanh()
            return x.square().mean()

        compiled = torch.compile(forward, backend="eager")
        options: dict[str, Any] = {
            "profile": profile,
            "strategy": strategy,
            "min_offload_bytes": 1,
        }
        with elbowroom.fit(model, [], 1 << 40, quick=True, **options) as room:
            for _ in range(6):
                with room.step():
                    compiled(torch.randn(8, WIDTH)).backward()
            assert room.journal().steps[-1].mode is Mode.PLANNED
    torch._dynamo.reset()
    assert not [name for name in begun if "elbowroom" in pathlib.Path(name).parent.parts[-2:]]


def test_calls_that_mean_nothing(quick: Any) -> None:
    with pytest.raises(KeyError, match="Place"):
        quick.learn({})
    with pytest.raises(TypeError, match="no slot item"):
        quick.learn({"Place": type("Place", (), {"item": 1})})
    relu, x = torch.ops.aten.relu.default, torch.ones(1)
    watch = quick.Watch()
    watch.pauses = 1
    assert watch.__torch_dispatch__(relu, (), (x,)) == watch.__torch_dispatch__(relu, (), args=(x,), kwargs={}) == x
    for args, named in (
        ((None,), {}),
        ((relu, (), [x]), {}),
        ((relu, (), (x,), [x]), {}),
        ((relu, ()), {"args": x}),
        ((relu, ()), {"arguments": (x,)}),
    ):
        with pytest.raises(TypeError, match="arguments in a tuple"):
            watch.__torch_dispatch__(*args, **named)
    with pytest.raises(TypeError, match="a Sighting follows"):
        quick.Order().follow(3)
    with pytest.raises(TypeError):
        quick.Sighting(1, 2, 3)


# Where it comes from --------------------------------------------------------------------------------------------------


def test_it_is_another_one_for_another_source(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    before = library.find_library(tmp_path)
    assert before == library.find_library(tmp_path) and before.parent == tmp_path and not before.exists()
    monkeypatch.setattr(library.native, "list_sources", lambda extension: [pathlib.Path(__file__)])
    assert library.find_library(tmp_path) != before


def test_without_a_compiler_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match=r"no C\+\+ compiler: no-such-compiler was not found.*variable CXX"):
        library.build_library(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho some reason >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(UsageError, match=r"ended with 3: some reason"):
        library.build_library(tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"compiled into .*file.*XDG_CACHE_HOME names another folder"):
        library.build_library(tmp_path / "file")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_python_does_without(
    is_damaged: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if is_damaged:
        library.find_library().parent.mkdir()
        library.find_library().write_bytes(b"\x7fELF, or so it says")
    with caplog.at_level(logging.WARNING, logger=library.logger.name):
        assert library.load.__wrapped__() is None
    expected = "Python does without" if is_damaged else "as the library does that `elbowroom build` compiles"
    assert [expected in record.message for record in caplog.records] == [True]


def test_a_library_that_others_can_write_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "spec_from_file_location", None)  # whoever loads it gets a TypeError
    planted = library.find_library()
    planted.parent.mkdir()
    contents = b"not ours"
    planted.write_bytes(contents + hashlib.sha256(contents).digest())
    for folder_mode, file_mode, owner in ((0o777, 0o600, 0), (0o700, 0o666, 0), (0o700, 0o600, 54321)):
        planted.parent.chmod(folder_mode)
        planted.chmod(file_mode)
        with monkeypatch.context() as patched:
            if owner and os.geteuid() == 0:
                os.chown(planted, owner, -1)
            elif owner:
                patched.setattr(os, "geteuid", functools.partial(int, owner))
            caplog.clear()
            with caplog.at_level(logging.WARNING, logger=library.logger.name):
                assert library.load.__wrapped__() is None
        said = "belongs to user" if owner else "others can write"
        assert [said in record.message for record in caplog.records] == [True]


def test_it_can_be_refused(profile: HardwareProfile, quick: Any) -> None:
    model = make_model()
    for is_quick in (False, True):
        with elbowroom.fit(model, [], 1 << 40, profile=profile, mode="dynamic", quick=is_quick) as room, room.step():
            assert isinstance(room._engine, quick.Hooks) == is_quick

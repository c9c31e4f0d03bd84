"""What is left of a job once its room is detached and the program has let go of it: nothing."""

from __future__ import annotations

import gc
import pathlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import elbowroom
from elbowroom.errors import Infeasible, RankLost, UsageError
from elbowroom.hooks.failed_backward import forget_failed_backward
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ranks.rank_group import RankGroup
from tests.leaks import list_threads

WIDTH, ROWS = 64, 256


def make_model() -> nn.Sequential:
    return nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def run(
    model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], mode: str, budget_bytes: int,
    profile: HardwareProfile,
) -> list[StorageWeakRef]:  # fmt: skip
    """Train for some steps. Return the storages of the parameters."""
    optimizer = torch.optim.AdamW(model.parameters())
    with elbowroom.fit(model, optimizer, budget_bytes, mode=mode, profile=profile):
        for _ in range(4):
            change(model(torch.randn(ROWS, WIDTH))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [StorageWeakRef(each.untyped_storage()) for each in model.parameters()]


@pytest.fixture
def alone(tmp_path: pathlib.Path) -> Iterator[None]:
    """A process group of one rank."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("mode", ["dynamic", "auto"])
@pytest.mark.parametrize("write", [torch.relu_, lambda x: x[:5].mul_(2)._base], ids=["whole", "view"])
def test_ops_that_wrote_in_place_keep_no_parameters(
    mode: str, write: Callable[[torch.Tensor], torch.Tensor], profile: HardwareProfile
) -> None:
    """Such an op refers to the storage that it wrote to, which refers to the op."""
    storages = run(make_model(), write, mode, 600_000, profile)
    gc.collect()
    assert all(each.expired() for each in storages)


@pytest.mark.parametrize("budget_bytes", [600_000, 1 << 30])
@pytest.mark.parametrize("mode", ["dynamic", "auto"])
def test_a_detached_room_keeps_its_figures_and_no_model(
    mode: str, budget_bytes: int, profile: HardwareProfile, tmp_path: pathlib.Path
) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    room = elbowroom.fit(model, optimizer, budget_bytes, mode=mode, profile=profile)
    for _ in range(5):
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = room.report(), room.metrics(), repr(room).replace(";", ", detached;", 1)
    room.detach()
    references = [weakref.ref(model), weakref.ref(optimizer)]
    storages = [StorageWeakRef(each.untyped_storage()) for each in model.parameters()]
    del model, optimizer
    gc.collect()
    assert all(each() is None for each in references) and all(each.expired() for each in storages)
    assert before == (room.report(), room.metrics(), repr(room))
    room.save_run(tmp_path / "run.json")
    assert len(room.journal().steps) == 5 and room.state_dict() and not room.was_refused
    calls = (room.begin_step, room.end_step, room.move_state_out, lambda: room.set_budget("1GB"))
    calls = (*calls, room.__enter__)
    for call in (*calls, lambda: room.load_state_dict({}), lambda: room.count_also([])):
        with pytest.raises(UsageError, match="this room is detached"):
            call()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mode", ["dynamic", "auto"])
@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_replicas_are_collected(mode: str, option: str, profile: HardwareProfile) -> None:
    """The reducer keeps the state of the thread that ran a step, and with it the watchers of the step."""
    model = DistributedDataParallel(make_model(), **{option: True})
    storages = run(model, lambda x: x, mode, 800_000, profile)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None and all(each.expired() for each in storages)


def test_a_backward_pass_that_was_refused_is_dropped(profile: HardwareProfile) -> None:
    """Autograd keeps the nodes that were ready, and what these have saved, until the next backward pass."""
    before = list_threads()
    model, other = make_model(), nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()])
    refused = []

    def refuse(gradient: torch.Tensor) -> None:
        refused.append(True)
        torch.empty(1 << 40, dtype=torch.uint8)

    room = elbowroom.fit([model, other], optimizer, 500_000, mode="dynamic", profile=profile)
    hidden = model(torch.randn(ROWS, WIDTH))
    storage = StorageWeakRef(hidden.untyped_storage())
    total = hidden.tanh().sum()
    last = other(torch.randn(ROWS, WIDTH))
    last.register_hook(refuse)
    total = total + last.tanh().sum()
    with pytest.raises(Infeasible):
        total.backward()
    assert refused
    room.detach()
    del room, model, other, optimizer, hidden, last, total
    gc.collect()
    assert storage.expired() and list_threads() == before


@pytest.mark.parametrize(
    "context",
    [
        torch.inference_mode, torch.no_grad, lambda: torch.device("meta"),
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("no hooks"),
    ],
)  # fmt: skip
def test_a_failed_backward_pass_is_dropped_in_any_mode(context: Callable[[], Any]) -> None:
    with context():
        before = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        forget_failed_backward()
        assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() == before
    assert torch.func.grad(lambda x: forget_failed_backward() or x * x)(torch.tensor(3.0)) == 6


def test_a_failed_backward_pass_is_not_dropped_inside_of_another() -> None:
    weight = torch.ones(2, requires_grad=True)
    calls = []
    total = weight * 2
    total.register_hook(lambda gradient: calls.append(forget_failed_backward()))
    total.sum().backward()
    assert calls == [None] and torch.equal(weight.grad, torch.full((2,), 2.0))  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
def test_a_model_is_fitted_with_the_replica_around_it(profile: HardwareProfile) -> None:
    """The gradient buckets of `DistributedDataParallel` count, whichever of both `fit` is given."""
    live_bytes = []
    for is_inner in (False, True):
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with elbowroom.fit(model.module if is_inner else model, optimizer, 1 << 30, profile=profile) as room:
            live_bytes.append(room._ledger.live_bytes)
        del model, optimizer
        gc.collect()
    assert live_bytes[0] == live_bytes[1]


@pytest.mark.usefixtures("alone")
def test_ranks_that_have_lost_each_other_say_when(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("timed out")

    group = RankGroup([0], 1.0)
    with monkeypatch.context() as context:
        context.setattr(distributed, "all_gather_object", fail)
        with pytest.raises(RankLost, match="rank 0 waited for the others at the first"):
            group.gather("the first", 1)
    with pytest.raises(RankLost, match=r"cannot meet the others at the second, .*: rank 0 waited .* at the first"):
        group.gather("the second", 1)
    group.close()

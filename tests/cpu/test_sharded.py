"""Models spread over several devices: replicas and shards train alike, other ways are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import elbowroom
from benchmarks.profiler_meter import ProfilerMeter
from elbowroom.errors import UsageError
from elbowroom.hooks.storage_ids import get_plain_storage, unwrap
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ops.replayable import find_written
from elbowroom.tracing.residents import list_resident_tensors, list_residents

WIDTH, ROWS, STEPS = 32, 128, 6
OPTIONS: dict[str, Any] = {"min_offload_bytes": 1, "strategy": "offload_all"}

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])


def shard_fully(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def shard_one_layer(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[1])
    return model


def shard_and_offload(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    return fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def shard_flat(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def distribute(model: nn.Sequential) -> nn.Module:
    from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor, init_device_mesh

    def spread(_: nn.Module, inputs: Any, mesh: Any) -> Any:
        return tuple(distribute_tensor(each, mesh, [Replicate()]) for each in inputs)

    return distribute_module(
        model, init_device_mesh("cpu", (1,)), input_fn=spread, output_fn=lambda _, out, __: out.to_local()
    )


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:FSDP is switching")
@pytest.mark.parametrize(
    ("shard", "part"),
    [
        (shard_flat, "it is sharded by FullyShardedDataParallel; use fully_shard"),
        (shard_and_offload, "fully_shard has an offload policy"),
    ],
)
def test_models_that_are_sharded_in_other_ways_are_refused(
    shard: Callable[[nn.Sequential], nn.Module], part: str, profile: HardwareProfile
) -> None:
    model = shard(make())
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(UsageError, match=f"spread over several devices.*{part}.*DistributedDataParallel"):
        elbowroom.fit(model, optimizer, "1GiB", profile=profile)
    with pytest.raises(UsageError, match=part):
        elbowroom.capture(lambda: None, model, optimizer)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("shard", [shard_fully, shard_one_layer, distribute])
@pytest.mark.parametrize("budget", ["1GiB", "250KB"])
def test_a_sharded_model_trains_alike(
    shard: Callable[[nn.Sequential], nn.Module], budget: str, profile: HardwareProfile
) -> None:
    plain, _ = train(shard(make()))
    found, peaks = train(shard(make()), budget, profile)
    assert found == plain
    assert max(peaks) <= 250_000 or budget == "1GiB"


@pytest.mark.usefixtures("group")
def test_what_autograd_saves_of_dtensors_leaves(profile: HardwareProfile) -> None:
    """The state of this model takes most of the budget, so that what its layers save has to leave as well."""
    model = distribute(make())
    with elbowroom.fit(model, torch.optim.SGD(model.parameters()), "1GiB", profile=profile, **OPTIONS) as room:
        for _ in range(3):
            with room.step():
                model(torch.ones(ROWS, WIDTH)).square().mean().backward()
    assert room.planned is not None
    trace = room.planned.trace
    movable = [trace.storages[each].nbytes for each in trace.movable]
    assert movable.count(4 * ROWS * WIDTH) >= 4  # the results of the layers


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("is_managed", [False, True])
def test_a_dtensor_that_was_written_to_is_not_used(is_managed: bool, profile: HardwareProfile) -> None:
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    model = make()
    mesh = init_device_mesh("cpu", (1,))
    with contextlib.ExitStack() as stack:
        if is_managed:
            optimizer = torch.optim.SGD(model.parameters())
            stack.enter_context(room := elbowroom.fit(model, optimizer, "1GiB", profile=profile, **OPTIONS))
            stack.enter_context(pytest.raises(RuntimeError, match="modified by an inplace operation"))
            stack.enter_context(room.step())
        else:
            stack.enter_context(pytest.raises(RuntimeError, match="modified by an inplace operation"))
        saved = DTensor.from_local(model(torch.ones(ROWS, WIDTH)), mesh, [Replicate()]).tanh()
        with torch.no_grad():
            saved.add_(1)
        saved.sum().to_local().backward()


@pytest.mark.usefixtures("group")
def test_a_step_of_a_sharded_model_is_not_captured_ahead() -> None:
    model = shard_fully(make())
    with pytest.raises(UsageError, match="whose collectives cannot run ahead"):
        elbowroom.capture(lambda: None, model, torch.optim.Adam(model.parameters()))


@pytest.mark.parametrize(
    ("op", "written"),
    [
        (torch.ops.c10d.allreduce_, ["tensors"]),
        (torch.ops.c10d._allgather_base_, ["output_tensor"]),
        (torch.ops.c10d.reduce_scatter_, ["output_tensors"]),
        (torch.ops.c10d.send, []),
        (torch.ops._c10d_functional.all_reduce, []),
        (torch.ops._c10d_functional.all_reduce_, ["input"]),
    ],
)
def test_what_a_collective_receives_is_written(op: Any, written: list[str]) -> None:
    assert [name for _, name in find_written(op.default)] == written


def train(model: nn.Module, budget: str = "", profile: HardwareProfile | None = None) -> tuple[list[float], list[int]]:
    """The losses of some steps, and their peaks; within a room if there is a budget."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    room = elbowroom.fit(model, optimizer, budget, profile=profile, **OPTIONS) if budget else None
    for index in range(STEPS):
        with contextlib.nullcontext() if room is None else room.step():
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    if room is None:
        return losses, []
    room.detach()
    return losses, [record.peak_bytes or 0 for record in room.journal().steps]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("budget", ["1GiB", "200KB"])
def test_a_replicated_model_trains_alike(budget: str, profile: HardwareProfile) -> None:
    plain, _ = train(make())
    found, peaks = train(nn.parallel.DistributedDataParallel(make()), budget, profile)
    assert found == plain
    assert max(peaks) <= 200_000 or budget == "1GiB"


def make_wrapping() -> nn.Module:
    """A model whose weights are of a class that wraps two tensors each."""
    model = make()
    for layer in model:
        weight = layer[0].weight.data
        layer[0].weight = nn.Parameter(TwoTensor(weight.clone(), weight.clone()))
    return model


def test_parameters_that_wrap_tensors_are_counted_by_those(profile: HardwareProfile) -> None:
    """They have a storage of their own without bytes: asking for its address fails."""
    model = make_wrapping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    residents = list_resident_tensors(model, [optimizer])
    assert len(residents) == 3 * 4 and not any(isinstance(each, TwoTensor) for each in residents)
    assert {id(each) for each in residents} == {id(each.tensor) for each in list_residents(model, [optimizer])}
    meter = ProfilerMeter()
    meter.start(residents)
    meter.stop()
    assert meter.peak_bytes == 4 * 4 * (2 * WIDTH * WIDTH + WIDTH)
    assert train(make_wrapping())[0] == train(make_wrapping(), "1GiB", profile)[0]


def test_what_has_no_bytes_has_no_storage_to_move() -> None:
    zeros, wrapped = torch._efficientzerotensor((3,)), nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    assert get_plain_storage(zeros) is None and get_plain_storage(wrapped) is None
    assert [type(each) for each in unwrap(wrapped)] == [torch.Tensor] * 2
    assert unwrap(zeros)[0] is zeros

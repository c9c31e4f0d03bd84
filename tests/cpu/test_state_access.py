"""Whatever a program does with model state that has left memory finds the right contents, or raises a clear error."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import pathlib
import pickle
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elbowroom.hooks.replica_gradients import ReplicaGradients
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.native import library
from tests.state_jobs import (
    BUDGET,
    EVERYTHING,
    PARAMETER_BYTES,
    WIDTH,
    Away,
    StateJob,
    adamw,
    assert_same,
    assert_trains_the_same,
    fit,
    get_pager,
    list_tensors,
    make_batch,
    make_job,
)


def save(what: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(what, file, **options)
    file.seek(0)
    return torch.load(file, weights_only=False)


def as_numbers(value: Any) -> torch.Tensor:
    return torch.as_tensor(value)


def save_on_meta(weight: nn.Parameter) -> torch.Tensor:
    """Save where new tensors have no memory by default."""
    with torch.device("meta"):
        file = io.BytesIO()
        torch.save(weight.detach(), file)
        numbers = weight.detach().numpy().copy()
    file.seek(0)
    assert np.array_equal(torch.load(file).numpy(), numbers)
    return torch.from_numpy(numbers)


def save_script(weight: nn.Parameter) -> torch.Tensor:
    """Save a module of TorchScript that has the weight."""
    module = nn.Linear(*weight.shape[::-1], bias=False)
    module.weight = weight
    script, file = torch.jit.script(module), io.BytesIO()
    torch.jit.save(script, file)
    assert script.save_to_buffer()
    file.seek(0)
    found: torch.Tensor = torch.jit.load(file).weight.detach()
    return found


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "print": lambda weight: repr(weight),
    "str": lambda weight: f"{weight.detach()}",
    "item": lambda weight: weight[3, 5].item(),
    "equal": lambda weight: torch.equal(weight, weight.detach().clone()),
    "tolist": lambda weight: weight.tolist(),
    "numpy": lambda weight: as_numbers(weight.detach().numpy()),
    "asarray": lambda weight: as_numbers(np.asarray(weight.detach())),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()).clone(),
    "numpy's dlpack": lambda weight: as_numbers(np.array(np.from_dlpack(weight.detach()))),
    "capsule": lambda weight: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(weight.detach())).clone(),
    "deepcopy": lambda weight: copy.deepcopy(weight).detach(),
    "pickle": lambda weight: pickle.loads(pickle.dumps(weight)).detach(),
    "save": lambda weight: save(weight).detach(),
    "old save": lambda weight: save(weight, _use_new_zipfile_serialization=False).detach(),
    "storage": lambda weight: weight.untyped_storage().tolist(),
    "typed storage": lambda weight: weight.detach()._typed_storage().tolist(),
    "storage item": lambda weight: weight.untyped_storage()[7],
    "storage slice": lambda weight: bytes(weight.untyped_storage()[4:20].tolist()),
    "storage copy": lambda weight: weight.untyped_storage().clone().tolist(),
    "storage in another dtype": lambda weight: weight.untyped_storage().byte().tolist(),
    "set_": lambda weight: torch.empty(0).set_(weight.untyped_storage()).clone(),
    "iterate": lambda weight: [row.sum().item() for row in weight],
    "to": lambda weight: weight.to(torch.bfloat16).detach(),
    "compute": lambda weight: (weight + 1).sum().detach(),
    "vmap": lambda weight: torch.vmap(lambda row: row.sin())(weight).detach(),
    "conj": lambda weight: torch.view_as_complex(weight.detach().view(-1, 2)).conj().clone(),
    "inference": lambda weight: torch.inference_mode()(lambda: weight * 2)().clone(),
    "script": lambda weight: torch.jit.trace(lambda x: x.relu() * 2, (torch.zeros(2, 2),))(weight).detach(),
    "numbers": lambda weight: torch.tensor([weight[0, 0], weight[0, 1]]),
    "whole numbers": lambda weight: torch.ones(1, dtype=torch.long).new_tensor([weight.detach().long()[1, 2]]),
    "truths": lambda weight: torch.tensor([weight.detach().long()[1, 2]], dtype=torch.bool),
    "complex numbers": lambda weight: torch.tensor([weight[0, 0], weight[0, 1]], dtype=torch.complex64),
    "save on meta": save_on_meta,
    "module of TorchScript": save_script,
}


@pytest.mark.parametrize("is_in_step", [False, True], ids=["between steps", "in a step"])
@pytest.mark.parametrize("how", READS)
def test_reads(how: str, is_in_step: bool, away: Away) -> None:
    expected = READS[how](away.twin)
    with away.room.step() if is_in_step else contextlib.nullcontext():
        get_pager(away.room).make_room(EVERYTHING)
        found = READS[how](away.parameter)
    assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected
    away.train_on()


def test_gradients_come_back_before_a_replica_reads_them(away: Away) -> None:
    """DistributedDataParallel asks each for its address once it has been accumulated."""
    pager = get_pager(away.room)
    parameters = list(away.job.model.parameters())
    are_away: dict[str, list[bool]] = {"before": [], "after": []}

    def note(when: str) -> Callable[[torch.Tensor], None]:
        return lambda each: are_away[when].append(each.grad is not None and pager.is_away(each.grad.untyped_storage()))

    with contextlib.ExitStack() as undoing:

        def call(function: Callable[[torch.Tensor], object]) -> None:
            for each in parameters:
                undoing.callback(each.register_post_accumulate_grad_hook(lambda it: (function(it), None)[1]).remove)

        call(lambda _: pager.make_room(EVERYTHING))
        call(note("before"))
        gradients = ReplicaGradients([types.SimpleNamespace(module=away.job.model, static_graph=False)], pager)
        call(note("after"))
        away.train_on()
        gradients.close()
        assert any(are_away["before"]) and not any(are_away["after"])
    assert all(not each._post_accumulate_grad_hooks for each in parameters)


def write_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[2, 3] = 7


def write_address(weight: nn.Parameter) -> None:
    import ctypes

    ctypes.memset(weight.data_ptr(), 0, 128)


def assign_half(weight: nn.Parameter) -> None:
    weight.data = weight.detach()[:, :] * 2


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "numpy": write_numpy,
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()).fill_(0.5),
    "address": write_address,
    "data": assign_half,
    "data.copy_": lambda weight: weight.data.copy_(torch.ones(WIDTH, WIDTH)),
    "no_grad": lambda weight: torch.no_grad()(lambda: weight.mul_(0.5))(),
    "setitem": lambda weight: weight.data.__setitem__((1, 2), 5.0),
    "init": lambda weight: nn.init.zeros_(weight),
    "storage fill_": lambda weight: weight.untyped_storage().fill_(0),
    "storage copy_": lambda weight: weight.untyped_storage().copy_(torch.ones(WIDTH, WIDTH).untyped_storage()),
    "storage setitem": lambda weight: weight.untyped_storage().__setitem__(3, 0),
    "apply_": lambda weight: weight.detach().apply_(lambda number: number / 2),
    "map_": lambda weight: weight.detach().map_(torch.ones(WIDTH, WIDTH), lambda one, other: one - other),
    "share_memory_": lambda weight: weight.share_memory_(),
    "grad": lambda weight: setattr(weight, "grad", torch.full_like(weight, 0.5)),
    "foreach": lambda weight: torch._foreach_mul_([weight.data], 0.5),
    "resize_": lambda weight: weight.data.resize_(WIDTH, WIDTH // 2).resize_(WIDTH, WIDTH),
}


@pytest.mark.parametrize("how", WRITES)
def test_writes(how: str, away: Away) -> None:
    """They are not lost, also if the memory leaves again right after them."""
    WRITES[how](away.parameter)
    WRITES[how](away.twin)
    get_pager(away.room).make_room(EVERYTHING)
    assert torch.equal(away.parameter, away.twin)
    away.train_on()


def test_lazy_clones(away: Away) -> None:
    weight, pager = away.parameter, get_pager(away.room)
    weight.sum()  # so that it is there, with a copy that is good
    lazy = weight.detach()._lazy_clone()
    pager.make_room(EVERYTHING)
    weight.data.mul_(2)
    assert torch.equal(lazy, away.twin)
    away.twin.data.mul_(2)
    assert torch.equal(weight, away.twin)
    del lazy
    away.train_on()


def test_what_numpy_has_stays(away: Away) -> None:
    array = away.parameter.detach().numpy()
    for index in range(2, 4):
        get_pager(away.room).make_room(EVERYTHING)
        array[0, index] = index
        with torch.no_grad():
            away.twin[0, index] = index
        assert torch.equal(away.parameter, away.twin)
    away.train_on()
    assert np.array_equal(array, away.twin.detach().numpy())


def test_an_address_is_good_until_the_next_step(away: Away) -> None:
    """Addresses are all different, as programs expect that look for shared memory."""
    addresses = [each.data_ptr() for each in away.job.model.parameters()]
    assert len(set(addresses)) == len(addresses)
    get_pager(away.room).make_room(EVERYTHING)
    assert addresses == [each.data_ptr() for each in away.job.model.parameters()]
    away.train_on()


def test_a_room_of_the_past_keeps_nothing_whose_address_is_told(profile: HardwareProfile) -> None:
    """The present room could not move it then, and ops would be watched for good."""
    job = make_job(adamw)
    former = fit(job, profile)
    with former.step():
        job.step(0)
    former.detach()
    with fit(job, profile) as room, room.step():
        job.model(make_batch(1)).square().mean().backward()
        addresses = {each.grad.data_ptr() for each in job.model.parameters() if each.grad is not None}
        assert get_pager(room).is_active and len(addresses) == len(list(job.model.parameters()))
    assert not library.load().is_any_state_managed()


def test_state_dicts(away: Away) -> None:
    found, expected = away.job.model.state_dict(), away.plain.model.state_dict()
    assert_same(found, expected)  # type: ignore[arg-type]
    for ours, theirs in zip(away.job.optimizers, away.plain.optimizers, strict=True):
        away.empty()
        left, right = ours.state_dict(), theirs.state_dict()
        for position, state in right["state"].items():
            assert_same(left["state"][position], state)
    away.train_on()


def test_loaded_state_dicts(away: Away) -> None:
    other = away.other
    for job in (away.job, away.plain):
        job.model.load_state_dict(other.model.state_dict())
        job.optimizers[0].load_state_dict(copy.deepcopy(other.optimizers[0].state_dict()))
    with pytest.raises(RuntimeError, match="size mismatch"):
        away.job.model.load_state_dict({name: each[:2] for name, each in other.model.state_dict().items()})
    for job in (away.job, away.plain):
        job.model.load_state_dict({name: each + 1 for name, each in other.model.state_dict().items()}, assign=True)
    assert_same(list_tensors(away.job), list_tensors(away.plain))


@pytest.mark.parametrize("is_new", [True, False])
def test_files_have_everything_and_saving_holds_the_budget(is_new: bool, away: Away, tmp_path: pathlib.Path) -> None:
    room, file = away.room, tmp_path / "state.pt"
    away.job.model.register_buffer("counts", torch.arange(WIDTH * WIDTH))  # of another dtype, in memory that was used
    away.plain.model.register_buffer("counts", torch.arange(WIDTH * WIDTH))
    room._ledger.take_recent_peak()
    torch.save(
        {"model": away.job.model.state_dict(), "optimizer": away.job.optimizers[0].state_dict()}, file,
        _use_new_zipfile_serialization=is_new,
    )  # fmt: skip
    assert room._ledger.take_recent_peak() <= BUDGET + WIDTH * WIDTH * 8
    found = torch.load(file)
    assert_same(found["model"], away.plain.model.state_dict())  # type: ignore[arg-type]
    for position, state in away.plain.optimizers[0].state_dict()["state"].items():
        assert_same(found["optimizer"]["state"][position], state)
    del found
    away.train_on()


def test_copies_of_models(away: Away) -> None:
    copied = copy.deepcopy(away.job.model)
    assert_same(copied.state_dict(), away.plain.model.state_dict())  # type: ignore[arg-type]
    away.empty()
    both = copy.deepcopy((away.job.model, away.job.optimizers[0]))
    assert_same(list_tensors(StateJob(both[0], [both[1]], away.job.step)), list_tensors(away.plain))
    del copied, both
    away.train_on()


def test_evaluation_and_generation_between_steps(away: Away) -> None:
    with torch.no_grad():
        for index in range(3):
            assert torch.equal(away.job.model(make_batch(index)), away.plain.model(make_batch(index)))
    with torch.inference_mode():
        x = y = make_batch(7)
        for _ in range(3):
            x, y = away.job.model(x), away.plain.model(y)
        assert torch.equal(x, y)
    away.train_on()


def test_another_dtype(profile: HardwareProfile) -> None:
    def make() -> StateJob:
        job = make_job(functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))
        model, (optimizer,) = job.model, job.optimizers

        def step(index: int) -> torch.Tensor:
            if index == 2:
                model.to(torch.float64)
                optimizer.load_state_dict(optimizer.state_dict())
            loss = model(make_batch(index).to(next(model.parameters()).dtype)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return dataclasses.replace(job, step=step)

    assert_trains_the_same(make, profile, 4 * PARAMETER_BYTES)


def test_parameters_that_come_and_go(profile: HardwareProfile) -> None:
    def make() -> StateJob:
        job = make_job(adamw)
        model, optimizer, step = job.model, job.optimizers[0], job.step
        assert isinstance(model, nn.Sequential)

        def step_and_change(index: int) -> torch.Tensor:
            if index == 1:
                torch.manual_seed(index)
                model.append(nn.Linear(WIDTH, WIDTH))
                optimizer.add_param_group({"params": model[-1].parameters(), "lr": 1e-3})
            if index == 2:
                old, new = model[0][0].weight, nn.Parameter(model[0][0].weight.detach() * 0.5)
                model[0][0].weight = new
                group = optimizer.param_groups[0]["params"]
                group[[each is old for each in group].index(True)] = new
                optimizer.state[new] = optimizer.state.pop(old)
            if index == 3:
                del model[4]
            return step(index)

        return dataclasses.replace(job, step=step_and_change)

    assert_trains_the_same(make, profile)

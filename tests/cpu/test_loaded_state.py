"""Weights and optimizer state that were loaded from files leave memory, unless others use it."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from elbowroom.errors import Infeasible
from elbowroom.hooks.loaded_memory import find_loaded
from elbowroom.ir.hardware import HardwareProfile
from tests.state_jobs import (
    BUDGET,
    PARAMETER_BYTES,
    STEPS,
    StateJob,
    adamw,
    assert_same,
    fit,
    get_pager,
    list_tensors,
    make_batch,
    make_job,
    make_model,
    run_plain,
    run_within,
)

LOADERS: dict[str, Callable[[pathlib.Path], Any]] = {
    "torch.load": torch.load,
    "torch.load, mapped": lambda path: torch.load(path, mmap=True),
}


@pytest.fixture
def checkpoint(tmp_path: pathlib.Path) -> pathlib.Path:
    """File with the model and the optimizer of a job after one step."""
    job = make_job(adamw)
    job.step(0)
    path = tmp_path / "checkpoint"
    torch.save({"model": job.model.state_dict(), "optimizer": job.optimizers[0].state_dict()}, path)
    safetensors.torch.save_model(job.model, f"{path}.safetensors")
    return path


def resume(path: pathlib.Path, load: Callable[[pathlib.Path], Any]) -> StateJob:
    """Load both, the weights as the model's own parameters."""
    model, loaded = make_model(), load(path)
    model.load_state_dict(loaded["model"], assign=True)
    job = make_job(adamw, model)
    job.optimizers[0].load_state_dict(loaded["optimizer"])
    return job


def resume_safetensors(path: pathlib.Path) -> StateJob:
    model = make_model()
    model.load_state_dict(safetensors.torch.load_file(path), assign=True)
    return make_job(adamw, model)


def count_written_bytes(path: pathlib.Path) -> int:
    """Memory of this process in pages of a mapped file that it has written to."""
    found, is_here = 0, False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            is_here = rest[-1] == str(path)
        elif is_here and name == "Anonymous:":
            found += int(rest[0]) << 10
    return found


@pytest.mark.parametrize("mode", ["dynamic", "auto"])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_resumed_job_trains_within_the_budget(
    loader: str, mode: str, checkpoint: pathlib.Path, profile: HardwareProfile
) -> None:
    make = lambda: resume(checkpoint, LOADERS[loader])  # noqa: E731
    mapped_bytes = checkpoint.stat().st_size if loader.endswith("mapped") else 0  # which PyTorch reports
    assert_same(run_plain(make), run_within(make, profile, mode=mode, elsewhere_bytes=mapped_bytes))


def test_weights_of_safetensors_leave(checkpoint: pathlib.Path, profile: HardwareProfile) -> None:
    path = pathlib.Path(f"{checkpoint}.safetensors")
    make = lambda: resume_safetensors(path)  # noqa: E731
    assert_same(run_plain(make), run_within(make, profile, elsewhere_bytes=path.stat().st_size))


def test_what_was_written_to_a_mapped_file_is_freed(checkpoint: pathlib.Path, profile: HardwareProfile) -> None:
    """The file stays mapped while one of its tensors is in memory, such as one that is too small to leave."""
    job = resume(checkpoint, LOADERS["torch.load, mapped"])
    with fit(job, profile, 1 << 30) as room:
        with room.step():
            job.step(0)
        before = count_written_bytes(checkpoint)
        room.set_budget(BUDGET)
        with room.step():
            job.step(1)
        after = count_written_bytes(checkpoint)
    assert before >= 2 * PARAMETER_BYTES and after <= before // 2, (before, after)


@pytest.mark.parametrize("loader", LOADERS)
def test_state_that_is_loaded_between_steps_is_counted(
    loader: str, checkpoint: pathlib.Path, profile: HardwareProfile
) -> None:
    """It may come from before `fit`, when nothing was counted."""

    def train(job: StateJob, loaded: dict[str, Any]) -> None:
        job.model.load_state_dict(loaded["model"])
        job.optimizers[0].load_state_dict(loaded["optimizer"])
        loaded.clear()  # otherwise the file is used

    plain = make_job(adamw)
    plain.step(0)
    train(plain, LOADERS[loader](checkpoint))
    losses = [plain.step(index) for index in range(STEPS)]

    job, loaded = make_job(adamw), LOADERS[loader](checkpoint)
    with fit(job, profile) as room:
        with room.step():
            job.step(0)
        train(job, loaded)
        found = []
        for index in range(STEPS):
            with room.step():
                found.append(job.step(index))
        assert max(record.peak_bytes or 0 for record in room.journal().steps) <= BUDGET
        state = [each for state in job.optimizers[0].state.values() for each in state.values() if each.numel() > 1]
        away = sum(get_pager(room).is_away(each.untyped_storage()) for each in state)
        assert away >= len(state) // 2, "of the state that was loaded"
    assert losses == found
    assert_same(list_tensors(plain), list_tensors(job))


def test_loaded_state_counts_where_only_activations_leave(checkpoint: pathlib.Path, profile: HardwareProfile) -> None:
    job, loaded = make_job(adamw), torch.load(checkpoint)
    with fit(job, profile, 1 << 30, manages="activations") as room:
        before = room._ledger.live_bytes
        job.optimizers[0].load_state_dict(loaded["optimizer"])
        with room.step():
            pass
        assert room._ledger.live_bytes - before >= 2 * PARAMETER_BYTES


@pytest.mark.parametrize("user", ["another tensor", "NumPy"])
def test_loaded_weights_that_others_use_stay(user: str, checkpoint: pathlib.Path, profile: HardwareProfile) -> None:
    """And the error names them. Copies leave."""
    model, loaded = make_model(), torch.load(checkpoint, mmap=True)["model"]
    model.load_state_dict(loaded, assign=True)
    others = loaded if user == "another tensor" else {name: each.detach().numpy() for name, each in loaded.items()}
    del loaded
    job = make_job(adamw, model)
    refused = r"of the state stay, since NumPy, .* copies \(copy.deepcopy\)"
    with fit(job, profile, PARAMETER_BYTES // 2) as room, pytest.raises(Infeasible, match=refused), room.step():
        job.step(0)
    for name, each in model.state_dict().items():
        assert torch.equal(torch.as_tensor(others[name]), each)

    job = make_job(adamw, copy.deepcopy(model))
    with fit(job, profile) as room, room.step():
        job.step(0)


def list_mapped(storages: list[torch.UntypedStorage]) -> list[int]:
    """Addresses of those that may leave, in mapped files."""
    return [each.data_ptr() for each, is_mapped in find_loaded(storages) if is_mapped]


def test_files_of_which_others_use_a_part_stay(checkpoint: pathlib.Path) -> None:
    """They share contents, which they would lose."""
    mapped = torch.UntypedStorage.from_file(str(checkpoint), False, 4096)
    parts = [mapped[:1024], mapped[1024:2048], mapped[2048:]]
    assert list_mapped(parts) == [], "the whole is used"
    del mapped
    assert list_mapped(parts) == [each.data_ptr() for each in parts]
    assert list_mapped(parts[1:]) == [], "the first part is used"


def test_parts_of_a_file_that_overlap_stay(checkpoint: pathlib.Path) -> None:
    mapped = torch.UntypedStorage.from_file(str(checkpoint), False, 4096)
    parts = [mapped[:1024], mapped[512:2048], mapped[2048:]]
    del mapped
    assert list_mapped(parts) == []


def test_files_that_are_written_to_stay(checkpoint: pathlib.Path) -> None:
    assert list_mapped([torch.UntypedStorage.from_file(str(checkpoint), True, 4096)]) == []


def test_slices_of_what_numpy_maps_stay(checkpoint: pathlib.Path) -> None:
    numbers = np.memmap(checkpoint, dtype=np.uint8, mode="c", shape=4096)
    part = torch.from_numpy(numbers).untyped_storage()[:1024]
    assert list_mapped([part]) == []


def test_memory_that_is_not_aligned_comes_back_as_it_was(tmp_path: pathlib.Path, profile: HardwareProfile) -> None:
    """Kernels choose their order of adding by it. Safetensors aligns to 8 bytes only."""
    path, note = tmp_path / "weights.safetensors", ""
    while not path.exists() or (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 16 != 8:
        note += "12345678"
        safetensors.torch.save_file(make_model().state_dict(), path, metadata={"note": note})

    def make() -> StateJob:
        job = resume_safetensors(path)
        optimizer = job.optimizers[0]

        def step(index: int) -> torch.Tensor:
            loss = job.model(make_batch(index, rows=1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return dataclasses.replace(job, step=step)

    addresses = {each.data_ptr() % 64 for each in make().model.parameters()}
    assert addresses <= {8, 24, 40, 56}
    found = run_within(make, profile, elsewhere_bytes=path.stat().st_size)
    assert_same(run_plain(make), found)

    for job, expected in ((make(), addresses), (make_job(adamw), {0})):
        with fit(job, profile) as room, room.step():
            job.step(0)
            assert {get_pager(room).sections.find_misalignment(each) for each in job.model.parameters()} == expected


def test_weights_that_are_assigned_between_steps_count(checkpoint: pathlib.Path, profile: HardwareProfile) -> None:
    loaded = torch.load(checkpoint)["model"]  # before `fit`
    job = make_job(lambda parameters: torch.optim.SGD(parameters, lr=1e-2))
    with fit(job, profile, 2 * PARAMETER_BYTES) as room:
        with room.step():
            job.step(0)
        job.model.load_state_dict(loaded, assign=True)
        del loaded
        job.optimizers[0].param_groups[0]["params"] = list(job.model.parameters())
        with room.step():
            assert room._ledger.live_bytes >= PARAMETER_BYTES


def test_a_frozen_part_of_a_mapped_file_leaves(checkpoint: pathlib.Path, profile: HardwareProfile) -> None:
    def make() -> StateJob:
        job = resume(checkpoint, LOADERS["torch.load, mapped"])
        for parameter in list(job.model.parameters())[4:]:
            parameter.requires_grad_(False)
        return make_job(adamw, job.model)

    plain = run_plain(make)
    job = make()
    with fit(job, profile, 3 * PARAMETER_BYTES // 4) as room:
        for index in range(STEPS):
            with room.step():
                job.step(index)
        assert max(record.peak_bytes or 0 for record in room.journal().steps) <= 3 * PARAMETER_BYTES // 4
    found = list_tensors(job)
    assert isinstance(job.model, nn.Sequential)
    assert_same(found, {name: plain[name] for name in found})

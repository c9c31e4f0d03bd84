"""Memory that PyTorch takes past the allocator of tensors counts, and nothing of a room outlives it by a cycle."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import elbowroom
from elbowroom.ir.hardware import HardwareProfile
from tests.state_jobs import MIN_BYTES, OutsideMeter, StateJob, adamw, fit, make_job, make_model

SNAPSHOTS: dict[str, Callable[[StateJob], Any]] = {
    "state_dict": lambda job: copy.deepcopy(job.model.state_dict()),
    "optimizer": lambda job: copy.deepcopy(job.optimizers[0].state_dict()),
    "storages": lambda job: [each.untyped_storage().clone() for each in job.model.parameters()],
}


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_deep_copy_counts(name: str, profile: HardwareProfile) -> None:
    """The best weights so far, for example, which the program keeps from the second step on."""
    meter = OutsideMeter()
    try:
        job = make_job(adamw)
        state_bytes = sum(each.nbytes for each in job.model.parameters())
        budget_bytes = 12 * state_bytes
        kept = None
        with fit(job, profile, budget_bytes, mode="auto") as room:
            begin = meter.count_seconds()
            for index in range(6):
                with room.step():
                    job.step(index)
                    if index == 1:
                        before = room._ledger.live_bytes
                        kept = SNAPSHOTS[name](job)
                        assert room._ledger.live_bytes - before >= state_bytes
            assert kept is not None
    finally:
        meter.stop()
    assert meter.find_peak(begin) <= budget_bytes


def test_storages_are_made_as_before(profile: HardwareProfile) -> None:
    with fit(make_job(adamw), profile) as room:
        before = room._ledger.live_bytes
        storage = torch.UntypedStorage(1 << 20)
        assert room._ledger.live_bytes - before == 1 << 20
        assert type(storage) is torch.UntypedStorage and storage.resizable() and storage.nbytes() == 1 << 20
        del storage
        assert room._ledger.live_bytes == before
        assert torch.UntypedStorage(8, device="meta").device.type == "meta"
        assert list(torch.UntypedStorage([1, 2])) == [1, 2] and torch.UntypedStorage().nbytes() == 0
        with pytest.raises(RuntimeError, match="negative"):
            torch.UntypedStorage(-1)


@pytest.mark.parametrize("says_so", [True, False])
def test_an_optimizer_is_freed_once_it_is_not_used(says_so: bool, profile: HardwareProfile) -> None:
    """As without a room: the state of a former training would be there beside that of the next one."""
    model = make_model()
    optimizer = adamw(model.parameters())
    gc.collect()
    gc.disable()
    try:
        with elbowroom.fit(model, optimizer, 1 << 20, profile=profile, min_offload_bytes=MIN_BYTES) as room:
            for _ in range(3):
                with room.step() if says_so else contextlib.nullcontext():
                    model(torch.randn(64, 64)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        found = weakref.ref(optimizer)
        del optimizer, room
        assert found() is None
    finally:
        gc.enable()

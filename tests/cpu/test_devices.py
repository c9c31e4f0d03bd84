"""Tensors on another device than the room's, of the same type."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from elbowroom.hooks.storage_ids import is_on


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda:1", True), ("cuda:0", False), ("cuda", True), ("cpu", False), ("cpu:0", False)]
)
def test_a_device_without_an_index_is_any_of_its_type(device: str, expected: bool) -> None:
    with FakeTensorMode():
        tensor = torch.empty(2, device="cuda:1")
    assert is_on(tensor, torch.device(device)) is expected


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_there_is_one_cpu(device: str) -> None:
    assert is_on(torch.empty(2), torch.device(device))

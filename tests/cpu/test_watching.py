"""A step is watched without anything else noticing."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import elbowroom
from elbowroom.ir.hardware import HardwareProfile


def test_a_step_leaves_nothing_for_the_garbage_collector(profile: HardwareProfile) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    gc.disable()
    try:
        with elbowroom.fit(model, optimizer, 1 << 30, mode="dynamic", profile=profile) as room:
            engines = []
            for _ in range(3):
                with room.step():
                    model(torch.ones(4, 8)).tanh().sum().backward()
                    engines.append(weakref.ref(room._engine))  # type: ignore[arg-type]
            assert [engine() is None for engine in engines] == [True, True, False]
    finally:
        gc.enable()


def test_ops_that_the_dispatcher_does_not_know_pass(profile: HardwareProfile) -> None:
    """A fake tensor is asked for its device by an op like that."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with elbowroom.fit(model, optimizer, 1 << 30, mode="dynamic", profile=profile) as room, room.step():
        with FakeTensorMode():
            nn.Linear(8, 8)(torch.randn(4, 8)).sum().backward()
        model(torch.ones(4, 8)).sum().backward()
    assert model.weight.grad is not None

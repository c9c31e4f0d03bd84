"""Training whose model state leaves memory gives the same bits as training in which it stays."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers

from elbowroom.ir.hardware import HardwareProfile
from tests.state_jobs import adamw, assert_trains_the_same, make_job

OPTIMIZERS: dict[str, Any] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd-foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam-amsgrad": functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "adam-foreach": functools.partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1, foreach=True),
    "adam-fused": functools.partial(torch.optim.Adam, lr=1e-2, fused=True),
    "adamw": adamw,
    "adamw-foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw-fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adagrad-fused": functools.partial(torch.optim.Adagrad, fused=True),
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "nadam-foreach": functools.partial(torch.optim.NAdam, foreach=True),
    "radam": torch.optim.RAdam,
    "rmsprop": functools.partial(torch.optim.RMSprop, centered=True),
    "rprop": torch.optim.Rprop,
    "transformers-adafactor": transformers.Adafactor,
    "transformers-adafactor-momentum": functools.partial(
        transformers.Adafactor, lr=1e-2, relative_step=False, beta1=0.9
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, profile: HardwareProfile) -> None:
    assert_trains_the_same(lambda: make_job(OPTIMIZERS[name]), profile)

"""Random programs whose ops wait and run together: the bits of plain PyTorch in each step."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional

from elbowroom.errors import Infeasible, MemoryRefused
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.runtime.stretch import SlicedStretch
from tests.cpu.test_sliced_attacks import fit_anything

ROWS, COLUMNS = 1024, 256
BUDGET = 2_900_000
"""Tensors take 1 MiB, and a program holds up to four of them."""

SEEDS = (0, 3, 14, 21, 23)
"""Of the programs: several ops of each run as a stretch."""

OPS = 25
POOL = 3

MAKES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sin": lambda one, other, weight: one.sin(),
    "tanh": lambda one, other, weight: one.tanh(),
    "exp": lambda one, other, weight: one.clamp(-2, 2).exp(),
    "add": lambda one, other, weight: one + other,
    "mul": lambda one, other, weight: one * other,
    "square": lambda one, other, weight: one * one,
    "log_softmax": lambda one, other, weight: functional.log_softmax(one, 1),
    "softmax": lambda one, other, weight: functional.softmax(one, 1),
    "mm": lambda one, other, weight: one @ weight,
    "mm without gradients": lambda one, other, weight: one.detach() @ weight.detach().t(),
    "layer_norm": lambda one, other, weight: functional.layer_norm(one, (COLUMNS,)),
    "gelu": lambda one, other, weight: functional.gelu(one),
    "view": lambda one, other, weight: one.view(ROWS // 2, 2, COLUMNS).sin().view(ROWS, COLUMNS),
    "other rows": lambda one, other, weight: torch.cat([one[1:] + one[:-1], one[:1]]),
    "halves": lambda one, other, weight: torch.cat([one[: ROWS // 2], other[ROWS // 2 :]]),
    "where": lambda one, other, weight: torch.where(one > 0, one, other),
    "transpose": lambda one, other, weight: one.t().sin().t(),
    "cast": lambda one, other, weight: one.to(torch.bfloat16).float(),
    "clone": lambda one, other, weight: one.clone(),
}

WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "relu_": lambda tensor: tensor.relu_(),
    "mul_": lambda tensor: tensor.mul_(0.5),
    "add_": lambda tensor: tensor.add_(1),
    "write to rows": lambda tensor: tensor[700:].mul_(2),
    "write an array": lambda tensor: tensor.numpy().__setitem__((5, 5), 0),
    "other data": lambda tensor: setattr(tensor, "data", torch.ones(ROWS, COLUMNS)),
}

READS: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": lambda tensor: tensor.sum().item(),
    "element": lambda tensor: tensor[77, 5].item(),
    "storage": lambda tensor: tensor.untyped_storage()[17],
    "pool": lambda tensor: functional.max_pool2d(tensor.view(1, 1, ROWS, COLUMNS), 4).sum().item(),
    "loss": lambda tensor: functional.cross_entropy(tensor, torch.arange(ROWS) % COLUMNS).item(),
}


def run(seed: int) -> Iterator[object]:
    """Run a program, and yield all that it reads, the last tensors among it."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(COLUMNS, COLUMNS, generator=generator) * 0.03).requires_grad_()
    pool = [torch.randn(ROWS, COLUMNS, generator=generator)]
    held: list[torch.UntypedStorage] = []
    for _ in range(OPS):
        one, other = chance.choice(pool), chance.choice(pool)
        kind = chance.choice(["make"] * 5 + ["write", "write", "read", "gradient", "hold", "drop"])
        if kind == "make":
            pool.append(MAKES[chance.choice(list(MAKES))](one, other, weight))
        elif kind == "write" and not one.requires_grad:
            WRITES[chance.choice(list(WRITES))](one)
        elif kind == "read":
            yield READS[chance.choice(list(READS))](one.detach())
        elif kind == "gradient" and one.requires_grad:
            yield torch.autograd.grad(one.square().mean(), [weight], retain_graph=True)[0].sum().item()
        elif kind == "hold":
            held[:] = [one.detach().untyped_storage()]
        elif kind == "drop" and len(pool) > 1:
            del pool[0]
        del one, other
        del pool[:-POOL]
    for tensor in pool:
        digest = hashlib.sha256()
        for rows in tensor.detach().split(64):
            digest.update(rows.clone().numpy().tobytes())
        yield digest.hexdigest()


def test_programs(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    stretches, finished = [], 0
    run_stretch = SlicedStretch.run

    def note(self: SlicedStretch) -> None:
        stretches.append(len(self.ops))
        run_stretch(self)

    monkeypatch.setattr(SlicedStretch, "run", note)
    for seed in SEEDS:
        expected = list(map(repr, run(seed)))
        try:
            with fit_anything(profile, BUDGET) as room:
                for index in range(3):
                    with room.step():
                        found = list(map(repr, run(seed)))
                    assert found == expected, (seed, index)
                    assert (room.journal().steps[-1].peak_bytes or 0) <= BUDGET
            finished += 1
        except (Infeasible, MemoryRefused):  # what it holds at once has no room, whatever leaves
            continue
    assert finished == len(SEEDS) and max(stretches) > 2

"""Script of several processes: trains with a framework's replicas, without Elbowroom and with it.

Usage: launched.py FOLDER. Each process writes `FOLDER/RANK.json`: by framework whether the bits are the same, the plan
that was agreed on, whether the budget was held, what was moved, and the modes of the steps.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

import torch

from elbowroom.room import Room
from elbowroom.workloads._packages import import_package
from tests.leaks import make_profile

WIDTH, ROWS, UPDATES, BUDGET = 64, 256, 6, 900_000
OPTIONS: dict[str, Any] = {"strategy": "offload_all", "op_time_store": False, "min_offload_bytes": 1 << 10}


def make_net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(layer for _ in range(5) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())))


def make_batches() -> torch.utils.data.DataLoader[Any]:
    rows = torch.randn(2 * UPDATES * ROWS, WIDTH, generator=torch.Generator().manual_seed(2)).unbind()
    return torch.utils.data.DataLoader([each.clone() for each in rows], batch_size=ROWS)


def train_accelerate(is_managed: bool) -> tuple[torch.nn.Module, Room | None]:
    from accelerate import Accelerator

    from elbowroom.integrations.accelerate import ElbowroomPlugin

    accelerator = Accelerator(cpu=True)
    plugin = ElbowroomPlugin(BUDGET, profile=make_profile(), **OPTIONS)
    net = make_net()
    objects = (net, torch.optim.AdamW(net.parameters(), lr=1e-3), make_batches())
    model, optimizer, batches = plugin.prepare(accelerator, *objects) if is_managed else accelerator.prepare(*objects)
    for batch in batches:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return net, plugin.room


def train_transformers(is_managed: bool) -> tuple[torch.nn.Module, Room | None]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from elbowroom.integrations.transformers import ElbowroomCallback

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=WIDTH, n_head=4, vocab_size=128, n_positions=WIDTH))
    texts = [torch.arange(WIDTH).add(index).remainder(128) for index in range(8 * UPDATES)]
    callback = ElbowroomCallback(7 << 20, profile=make_profile(), **OPTIONS)
    arguments = TrainingArguments(
        sys.argv[1], max_steps=UPDATES, per_device_train_batch_size=4, use_cpu=True, ddp_backend="gloo", report_to=[],
        disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    data = [{"input_ids": each, "labels": each} for each in texts]
    Trainer(model, arguments, train_dataset=data, callbacks=[callback] if is_managed else []).train()
    return model, callback.room


def train_lightning(is_managed: bool) -> tuple[torch.nn.Module, Room | None]:
    from lightning.pytorch import LightningModule, Trainer

    from elbowroom.integrations.lightning import ElbowroomCallback

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    callback = ElbowroomCallback(BUDGET, profile=make_profile(), **OPTIONS)
    trainer = Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback] if is_managed else [],
    )  # fmt: skip
    trainer.fit(module := Module(), make_batches())
    return module, callback.room


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    torch.set_num_threads(1)
    import_package("transformers")  # before others import torchvision, which may not match this build of torch
    found = {}
    for train in (train_accelerate, train_transformers, train_lightning):
        (plain, _), (managed, room) = train(False), train(True)
        assert room is not None
        agreed = room._modes.agreed
        found[train.__name__] = {
            "same": all(map(torch.equal, plain.parameters(), managed.parameters())),
            "plan": "" if agreed is None else agreed.digest,
            "modes": [step.mode.value for step in room.journal().steps],
            "is_within": 0 < (room.journal().peak_bytes or 0) <= room.budget_bytes,
            "moved": room.metrics()["total_offloaded_bytes"],
        }
        room.detach()
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

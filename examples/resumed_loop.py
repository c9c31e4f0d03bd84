"""A loop of one's own that saves what its room has learned, and follows its plan at once when it is resumed.

python examples/resumed_loop.py
"""

import pathlib
import tempfile

import torch

import elbowroom


def train(checkpoint: pathlib.Path, steps: int) -> None:
    """Train, from a checkpoint if there is one, and write one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(layer for _ in range(6) for layer in (torch.nn.Linear(128, 128), torch.nn.GELU())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with elbowroom.fit(model, optimizer, memory_budget="7MiB") as room:
        if checkpoint.exists():
            state = torch.load(checkpoint)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            room.load_state_dict(state["room"])
            del state  # its tensors would count toward the budget
        for _ in range(steps):
            with room.step():
                loss = model(torch.randn(2048, 128)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "room": room.state_dict()}
        torch.save(state, checkpoint)
        print([step.mode.value for step in room.journal().steps])


with tempfile.TemporaryDirectory() as folder:
    train(pathlib.Path(folder) / "checkpoint.pt", steps=4)
    train(pathlib.Path(folder) / "checkpoint.pt", steps=2)

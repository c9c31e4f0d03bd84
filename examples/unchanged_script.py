"""A training script that knows nothing of Elbowroom; run it within a budget.

elbowroom run --memory-budget 48MiB examples/unchanged_script.py --steps 6
"""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
arguments = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(*(layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(arguments.steps):
    loss = (model(torch.randn(4096, 256)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss:.4f}")

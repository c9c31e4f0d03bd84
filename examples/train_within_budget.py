"""The smallest whole program: a network trained within a budget, and the report.

python examples/train_within_budget.py
"""

import torch

import elbowroom

torch.manual_seed(0)
model = torch.nn.Sequential(
    *(layer for _ in range(12) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())), torch.nn.Linear(512, 10)
)
optimizer = torch.optim.AdamW(model.parameters())
inputs, targets = torch.randn(2048, 512), torch.randint(0, 10, (2048,))

with elbowroom.fit(model, optimizer, memory_budget="100MiB") as room:
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(room.report())

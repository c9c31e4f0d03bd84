"""A model on several ranks, each within its budget, under one plan.

torchrun --nproc-per-node 2 examples/several_ranks.py
python examples/several_ranks.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elbowroom

rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

torch.manual_seed(0)
layers = (layer for _ in range(6) for layer in (torch.nn.Linear(128, 128), torch.nn.GELU()))
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

room = elbowroom.fit(model, optimizer, memory_budget="8MiB")  # on all ranks, after the model is wrapped
for index in range(6):
    batch = torch.randn(2048, 128, generator=torch.Generator().manual_seed(ranks * index + rank))
    with room.step():
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"rank {rank}: {room}")
room.detach()
dist.destroy_process_group()

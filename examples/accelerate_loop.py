"""A loop that uses Accelerate, within a budget.

python examples/accelerate_loop.py
"""

import tempfile

import torch
from accelerate import Accelerator

from elbowroom.integrations.accelerate import ElbowroomPlugin

torch.manual_seed(0)
model = torch.nn.Sequential(*(layer for _ in range(6) for layer in (torch.nn.Linear(128, 128), torch.nn.GELU())))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = [torch.randn(128) for _ in range(8192)]
loader = torch.utils.data.DataLoader(rows, batch_size=1024)

accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
plugin = ElbowroomPlugin("7MiB")
model, optimizer, loader = plugin.prepare(accelerator, model, optimizer, loader)
for _ in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = (model(batch) - batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.log({"loss": loss.item(), **plugin.metrics()})
with tempfile.TemporaryDirectory() as folder:
    accelerator.save_state(folder)  # with what the room has learned; load_state takes it over
print(plugin.room)
plugin.close()

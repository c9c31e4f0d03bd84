"""The same job with Elbowroom around its loop."""

from train import make

import elbowroom

model, optimizer, step = make()
with elbowroom.fit(model, optimizer, memory_budget="250MiB") as room:
    for index in range(6):
        loss = step()
        print(f"step {index}: loss {loss.item():.3f}  {room.metrics()['mode']}")
    room.save_run("fit.json")
    print(room)

"""A small GPT-2 on one batch of random tokens. Nothing in it knows of Elbowroom."""

import resource

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)


def make():
    """Return the model, its optimizer, and a function that makes one training step and returns the loss."""
    config = GPT2Config(
        n_layer=6, n_embd=192, n_head=6, vocab_size=4096, n_positions=256, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 4096, (6, 256))

    def step():
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def limit_memory(nbytes):
    """Let this process take so many bytes more than it has, like a smaller machine."""
    with open("/proc/self/status") as status:
        (data,) = [int(line.split()[1]) << 10 for line in status if line.startswith("VmData")]
    resource.setrlimit(resource.RLIMIT_DATA, (data + nbytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


if __name__ == "__main__":
    limit_memory(450 << 20)
    model, optimizer, step = make()
    for index in range(6):
        print(f"step {index}: loss {step().item():.3f}", flush=True)

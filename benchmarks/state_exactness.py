"""Does training whose model state leaves memory give the bits of plain training, with every optimizer, within budget?

    python benchmarks/state_exactness.py [--families gpt2 vit] [--optimizers adamw] [--steps 20] [--output FILE.json]

Each small model is trained with each optimizer, plainly and within three budgets: 0.75 of the plain peak, the floor
(the smallest of 0.64, 0.54, 0.46, ... of it at which no step is refused), and one between. Compared bit by bit: losses,
parameters, gradients, buffers and optimizer state after the last step. The peak is that of the room's journal, and for
the floor also that of PyTorch's profiler, which counts all allocations from the second step on.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import pathlib
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import torch
from profiler_meter import ProfilerMeter
from torch import nn
from torch.nn import functional
from writing import write_results

import elbowroom
from elbowroom.errors import Infeasible
from elbowroom.hardware.probe import probe
from elbowroom.workloads._packages import import_package

MOST = 0.75
"""Largest budget, as a share of the plain peak."""

LOWER = 0.85
"""From one budget to the next, on the way down to the floor."""

VOCABULARY = 1024


def make_optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    """Return the optimizers by name."""
    optim = torch.optim
    return {
        "sgd": functools.partial(optim.SGD, lr=0.05, momentum=0.9),
        "adam": functools.partial(optim.Adam, lr=1e-3),
        "adamw-for-loop": functools.partial(optim.AdamW, lr=1e-3, foreach=False),
        "adamw-foreach": functools.partial(optim.AdamW, lr=1e-3, foreach=True),
        "adamw-fused": functools.partial(optim.AdamW, lr=1e-3, fused=True),
        "adafactor": import_package("transformers").Adafactor,
    }


Loss = Callable[[nn.Module, int], torch.Tensor]


def _seed(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


def token_loss(model: nn.Module, index: int) -> torch.Tensor:
    """Return the loss of a language model on some tokens."""
    tokens = torch.randint(0, VOCABULARY, (4, 64), generator=_seed(index))
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def image_loss(model: nn.Module, index: int) -> torch.Tensor:
    """Return the loss of a classifier of images."""
    images = torch.randn(8, 3, 64, 64, generator=_seed(index))
    return functional.cross_entropy(model(images), torch.arange(8))


def sequence_loss(model: nn.Module, index: int) -> torch.Tensor:
    """Return the loss of a recurrent network."""
    output, _ = model(torch.randn(16, 8, 256, generator=_seed(index)))
    squares: torch.Tensor = output.square()
    return squares.mean()


def make_gpt2() -> nn.Module:
    transformers = import_package("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=192, n_head=4, vocab_size=VOCABULARY, use_cache=False)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def make_mixtral() -> nn.Module:
    """Make a mixture of experts, whose ops depend on the data."""
    transformers = import_package("transformers")
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.MixtralForCausalLM(config)
    return model


def make_mobilenet() -> nn.Module:
    model: nn.Module = import_package("torchvision").models.mobilenet_v3_small(num_classes=100)
    return model


def make_vit() -> nn.Module:
    model: nn.Module = import_package("timm").create_model("vit_tiny_patch16_224", img_size=64, depth=3)
    return model


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "gpt2": (make_gpt2, token_loss),
    "mobilenet": (make_mobilenet, image_loss),
    "vit": (make_vit, image_loss),
    "lstm": (lambda: nn.LSTM(256, 256, num_layers=3), sequence_loss),
    "mixtral": (make_mixtral, token_loss),
}


class Job:
    """A model that is trained from fixed parameters, on a new batch each step."""

    def __init__(self, family: str, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        make, self._find_loss = FAMILIES[family]
        torch.manual_seed(0)
        self.model = make().train()
        self.optimizer = make_optimizer(self.model.parameters())
        torch.manual_seed(1)  # for dropout

    def step(self, index: int) -> float:
        """Train on one batch. Return the loss."""
        loss = self._find_loss(self.model, index)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def count_state(self) -> int:
        """Return the bytes of parameters, as many of gradients, buffers and optimizer state."""
        parameters = list(self.model.parameters())
        states = [each for state in self.optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
        return sum(each.nbytes for each in [*parameters, *parameters, *self.model.buffers(), *states])

    def digest(self) -> dict[str, str]:
        """Return a digest of each tensor that training changes."""
        named = dict(self.model.state_dict(keep_vars=True))
        named |= {f"gradient of {name}": each.grad for name, each in self.model.named_parameters()}
        for position, state in enumerate(self.optimizer.state.values()):
            named |= {f"{key} of parameter {position}": each for key, each in state.items()}
        return {name: hashlib.sha256(_read(each)).hexdigest() for name, each in named.items()}


def _read(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().numpy().tobytes()
    return repr(value).encode()


def train(
    make: Callable[[], Job],
    budget_bytes: int,
    steps: int,
    profile: Any,
    *,
    mode: str = "auto",
    is_metered: bool = False,
) -> dict[str, Any]:
    """Train within a budget. Returns what training has changed, and how it went."""
    begin = time.perf_counter()
    meter = ProfilerMeter()
    if is_metered:
        meter.start()  # first: it is not told when older memory is freed
    made = time.time()
    settled = 0.0
    metered = None
    job = make()
    options: dict[str, Any] = {"profile": profile, "min_offload_bytes": 1 << 14, "mode": mode}
    if mode == "auto":
        options["strategy"] = "auto:effort=0.1"  # plans in a second
    with elbowroom.fit(job.model, job.optimizer, budget_bytes, **options) as room:
        losses = []
        try:
            for index in range(steps):
                with room.step():
                    losses.append(job.step(index))
                if index == 0 and is_metered:
                    settled = time.time() - made
        finally:
            meter.stop()
        if is_metered:
            times, live = meter.timeline()
            metered = max(nbytes for second, nbytes in zip(times, live, strict=True) if second >= settled)
        records = room.journal().steps
        found = {
            "peak_bytes": max(record.peak_bytes or 0 for record in records),
            "metered_bytes": metered,
            "offloaded_bytes": records[-1].offloaded_bytes,
            "modes": dict(Counter(str(record.mode) for record in records)),
            "notes": sorted({record.note for record in records if record.note}),
        }
    return found | {"digest": job.digest(), "losses": losses, "seconds": time.perf_counter() - begin}


def compare(family: str, name: str, steps: int, profile: Any) -> list[dict[str, Any]]:
    """Train plainly and within each budget. Returns one result for each budget."""
    make = functools.partial(Job, family, make_optimizers()[name])
    job = make()
    meter = ProfilerMeter()
    meter.start(there=[*job.model.parameters(), *job.model.buffers()])
    losses = [job.step(index) for index in range(steps)]
    meter.stop()
    plain, plain_bytes, state_bytes = job.digest(), meter.peak_bytes, job.count_state()
    del job

    def run(share: float, *, is_metered: bool = False) -> dict[str, Any]:
        budget_bytes = int(share * plain_bytes)
        found = train(make, budget_bytes, steps, profile, is_metered=is_metered)
        digest = found.pop("digest")
        differing = sorted(key for key in plain.keys() | digest.keys() if plain.get(key) != digest.get(key))
        return {
            "family": family, "optimizer": name, "share": share, "budget_bytes": budget_bytes,
            "plain_bytes": plain_bytes, "state_bytes": state_bytes, "is_same": not differing
            and found.pop("losses") == losses, "differing": differing[:5],
            "is_within": max(found["peak_bytes"], found["metered_bytes"] or 0) <= budget_bytes, **found,
        }  # fmt: skip

    share, refused = MOST, ""
    while not refused:
        share *= LOWER
        try:
            train(make, int(share * plain_bytes), 2, profile, mode="dynamic")
        except Infeasible as error:
            refused = str(error)
    floor = None
    while floor is None:
        share /= LOWER
        try:
            floor = run(share, is_metered=True)
        except Infeasible as error:
            refused = str(error)
    middle = run((MOST * share) ** 0.5)
    return [run(MOST), middle, floor | {"refused_below": refused}]


def main() -> None:
    """Print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--optimizers", nargs="*", default=list(make_optimizers()))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output")
    options = parser.parse_args()
    import_package("transformers")
    profile = probe("cpu")
    results: list[dict[str, Any]] = []
    for family in options.families:
        for name in options.optimizers:
            for each in compare(family, name, options.steps, profile):
                results.append(each)
                verdict = "same" if each["is_same"] else f"DIFFERS {each['differing']}"
                within = "within" if each["is_within"] else f"OVER {each['peak_bytes']}, {each['metered_bytes']}"
                print(
                    f"{family:10} {name:15} {each['share']:.2f} of {each['plain_bytes'] / 1e6:6.1f} MB, state "
                    f"{each['state_bytes'] / each['plain_bytes']:.2f}: {verdict}, {within}, {each['modes']} "
                    f"{each['seconds']:.1f} s {each['notes']}",
                    flush=True,
                )
            write_results(options.output, results)


if __name__ == "__main__":
    main()

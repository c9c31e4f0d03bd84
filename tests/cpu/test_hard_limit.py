"""The point of it all: training where plain PyTorch dies for lack of memory, with the same losses."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

import elbowroom
from elbowroom.ir.hardware import HardwareProfile

# Each of 20 layers saves 8 MiB, and at the backward pass's busiest some four such blocks are at work. The limit is on
# all private memory that the process may write to, beyond what it has when the libraries have warmed up.
SCRIPT = """
import contextlib, resource, sys

import torch
from torch import nn

import elbowroom
from elbowroom.ir.hardware import HardwareProfile

way, limit_mib, folder, profile, mode, budget = sys.argv[1:]
STRATEGY = "auto:effort=0.1"
torch.set_num_threads(1)
torch.manual_seed(3)


def make():
    model = nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.Tanh())))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model, optimizer, rows):
    loss = model(torch.randn(rows, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


profile = elbowroom.load(HardwareProfile, profile)
step(*make(), 64)
if way == "elbowroom" and mode == "auto":  # the solver and the compiled loops are libraries too
    small = make()
    trace = elbowroom.capture(lambda: step(*small, 32768), *small)
    elbowroom.plan(trace, elbowroom.price(trace, profile), 100 << 20, strategy=STRATEGY)
torch.manual_seed(4)
model, optimizer = make()
with open("/proc/self/status") as status:
    data_kib = next(int(line.split()[1]) for line in status if line.startswith("VmData:"))
if limit_mib != "none":
    limit = (data_kib << 10) + (int(limit_mib) << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
room = None
if way == "elbowroom":
    options = {"profile": profile, "spill_folder": folder, "mode": mode, "strategy": STRATEGY}
    room = elbowroom.fit(model, optimizer, budget, **options)
for _ in range(3):
    with room.step() if room is not None else contextlib.nullcontext():
        loss = step(model, optimizer, 32768).item()
    print("loss", loss.hex(), flush=True)
if room is not None:
    print("modes", *(record.mode for record in room.journal().steps))
"""


def run(
    way: str, limit_mib: int | None, folder: pathlib.Path, mode: str = "auto", budget: str = "60MiB"
) -> tuple[int, list[str], str]:
    """The exit status, the losses, and everything that was printed."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            sys.executable, str(script),
            way, str(limit_mib).lower(), str(folder), str(folder / "profile.json"), mode, budget,
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE), done.stdout + done.stderr


pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs RLIMIT_DATA over anonymous memory, as on Linux"
)


def test_training_finishes_under_a_limit_at_which_plain_pytorch_dies(
    tmp_path: pathlib.Path, profile: HardwareProfile
) -> None:
    elbowroom.save(profile, tmp_path / "profile.json")
    limit_mib = 128
    status, expected, said = run("plain", None, tmp_path)
    assert status == 0 and len(expected) == 3, said

    status, losses, said = run("plain", limit_mib, tmp_path)
    assert status != 0 and not losses, said
    assert re.search(r"can't allocate memory|MemoryError|bad_alloc|not enough memory", said), said

    for mode, modes in (("auto", r"capture( \w+)* planned"), ("dynamic", "dynamic dynamic dynamic$")):
        status, losses, said = run("elbowroom", limit_mib, tmp_path, mode)
        assert status == 0, said
        assert losses == expected
        assert re.search(rf"^modes {modes}", said, re.MULTILINE), said

    # A budget of more than the limit: more is moved than was planned, and that is said once.
    status, losses, said = run("elbowroom", limit_mib, tmp_path, budget="150MiB")
    assert status == 0, said
    assert losses == expected
    refusals = re.findall(r"the system refuses .* its budget of (\d+) bytes; RLIMIT_DATA is \d+ bytes.*", said)
    assert refusals == [str(150 << 20)], said
    assert re.search(r"Set the memory budget to at most \d+", said)

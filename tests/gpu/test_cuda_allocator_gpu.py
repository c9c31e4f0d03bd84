"""The arena on a real CUDA device: the same bits, requests at their planned addresses, errors of PyTorch's own."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import elbowroom
from elbowroom.ir.hardware import HardwareProfile
from tests.gpu.test_room_gpu import machine  # noqa: F401 -- a fixture
from tests.native import need_compiler

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments: object) -> dict[str, Any]:
    """What a training in a process of its own prints."""
    need_compiler()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": paths, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    program = ROOT / "tests" / "gpu" / "arena_training.py"
    done = subprocess.run(
        [sys.executable, str(program), *map(str, arguments)], capture_output=True, text=True, check=False,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("way", ["loop", "room"])
@pytest.mark.parametrize("name", ["convnet", "transformer"])
def test_the_same_bits_at_planned_addresses(
    name: str,
    way: str,
    machine: HardwareProfile,  # noqa: F811
    tmp_path: pathlib.Path,
    record_property: Any,
) -> None:
    profile = tmp_path / "machine.json"
    elbowroom.save(machine, profile)
    plain, again, ours = (run(name, way, profile, which) for which in ("plain", "plain", "arena"))
    if (plain["losses"], plain["parameters"]) != (again["losses"], again["parameters"]):
        pytest.skip("PyTorch does not repeat itself here, so there is nothing to compare with")
    assert ours["losses"] == plain["losses"] and ours["parameters"] == plain["parameters"]
    counts = ours["counts"]
    record_property("arena", counts)
    record_property("reserved", (ours["reserved_peak_bytes"], plain["reserved_peak_bytes"]))
    print(f"{name}, {way}: reserved {ours['reserved_peak_bytes']}, without {plain['reserved_peak_bytes']}; {counts}")
    assert counts["hits"] + counts["apart"] > 0.5 * counts["requests"]
    assert counts["failed"] == counts["unknown"] == 0
    assert ours["allocated_peak_bytes"] > 0
    if way == "room":
        assert ours["metered_peak_bytes"] > 0


def test_a_full_device_is_an_error_of_pytorch(tmp_path: pathlib.Path) -> None:
    found = run("none", "fill", tmp_path, "arena")
    assert found["error"] == "OutOfMemoryError" and found["sum"] == 1000
    assert "CUDA graphs" in found["graph"]

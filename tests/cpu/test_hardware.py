"""The hardware room on this machine: one real probe, and what must stop it."""

from __future__ import annotations

import gc
import os
import pathlib
import time
import types

import pytest
import torch

from benchmarks.profiler_meter import ProfilerMeter
from elbowroom.errors import UsageError
from elbowroom.hardware import links
from elbowroom.hardware.probe import probe
from elbowroom.hardware.timing import median_seconds
from elbowroom.ir import files
from elbowroom.ir.hardware import HardwareProfile
from tests.leaks import list_threads

CPU = torch.device("cpu")


class Probed:
    """One probe of this machine and what it left behind."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.told = folder, []
        before = open_files()
        random = torch.get_rng_state()
        begun = time.perf_counter()
        # In modes that a program may be in, none of which may show.
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            self.profile = probe(
                "cpu", spill_folder=str(folder), progress=lambda what, share: self.told.append((what, share))
            )
        self.seconds = time.perf_counter() - begun
        self.random_moved = not torch.equal(random, torch.get_rng_state())
        self.open_files = open_files() - before
        self.threads = list_threads()


def open_files() -> set[str]:
    gc.collect()
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{descriptor} {os.readlink(f'/proc/self/fd/{descriptor}')}")
        except OSError:
            continue
    return {name for name in found if "elbowroom" in name or "deleted" in name}


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Probed:
    return Probed(tmp_path_factory.mktemp("spill"))


def test_the_profile_has_every_part(probed: Probed) -> None:
    profile = probed.profile
    assert profile.device == "cpu" and "this machine" in profile.name
    assert [tier.name for tier in profile.tiers] == ["ram", "disk"]
    assert all(tier.capacity_bytes > 1 << 20 for tier in profile.tiers)
    assert [(link.upper, link.lower) for link in profile.links] == [("ram", "disk")]
    assert {(rate.kind, rate.dtype) for rate in profile.rates} == {
        (kind, dtype)
        for kind in ("matmul", "convolution", "attention", "elementwise")
        for dtype in ("float32", "bfloat16")
    }
    assert all(rate.source == "measured" for rate in profile.rates)
    assert profile.links[0].source.startswith("measured")


def test_the_figures_are_those_of_a_machine(probed: Probed) -> None:
    profile = probed.profile
    for rate in profile.rates:
        slowest, fastest = (1e8, 1e13) if rate.kind == "elementwise" else (1e8, 1e16)
        assert slowest < rate.per_second < fastest, rate
    link = profile.links[0]
    assert 1e7 < link.out_bytes_per_second < 1e12 and 1e7 < link.back_bytes_per_second < 1e12
    assert link.out_latency_seconds < 0.05 and link.back_latency_seconds < 0.05
    # Less than all the time there is: moving a byte cannot cost more than a hundred times its own transfer.
    assert 0 <= link.drag_seconds_per_byte < 100 / min(link.out_bytes_per_second, link.back_bytes_per_second)
    assert 1e-8 < profile.op_latency_seconds < 1e-3
    assert 0 <= profile.hook_seconds < 1e-3


def test_the_matmul_rate_foretells_a_matmul(probed: Probed) -> None:
    matrix = torch.ones(640, 640)
    seconds = median_seconds(lambda: torch.mm(matrix, matrix), CPU, budget_seconds=0.1)
    rate = next(rate.per_second for rate in probed.profile.rates if (rate.kind, rate.dtype) == ("matmul", "float32"))
    # Machines are shared while tests run, so only the magnitude is certain.
    assert 0.1 < 2 * 640**3 / rate / seconds < 10


def test_nothing_is_left_behind(probed: Probed) -> None:
    assert os.listdir(probed.folder) == []
    assert not probed.open_files and not probed.threads and not probed.random_moved


def test_it_tells_how_far_it_is(probed: Probed) -> None:
    shares = [share for _, share in probed.told]
    assert shares == sorted(shares) and shares[0] == 0 and probed.told[-1] == ("done", 1.0)
    assert len({what for what, _ in probed.told}) > 5
    # About eight seconds; far more would mean that a measurement has no bound.
    assert probed.seconds < 60


def test_a_profile_survives_its_file(probed: Probed, tmp_path: pathlib.Path) -> None:
    files.save(probed.profile, tmp_path / "machine.json")
    assert files.load(HardwareProfile, tmp_path / "machine.json") == probed.profile


def test_folders_that_cannot_be_used_are_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"nowhere.*spill_folder"):
        probe("cpu", spill_folder=str(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="spill_folder"):
        probe("cpu", spill_folder=str(tmp_path / "file"))
    monkeypatch.setattr(links.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1 << 20))
    with pytest.raises(UsageError, match="free some space"):
        probe("cpu", spill_folder=str(tmp_path))


def test_a_folder_without_permission_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Tests may run as root, whom no permission stops.
    monkeypatch.setattr(links.tempfile, "TemporaryFile", refuse)
    with pytest.raises(UsageError, match=r"Permission denied.*spill_folder"):
        probe("cpu", spill_folder=str(tmp_path))


def test_devices_that_are_not_here_are_named() -> None:
    with pytest.raises(UsageError, match="'auto', 'cpu' or 'cuda'"):
        probe("gpu")
    with pytest.raises(UsageError, match="'auto', 'cpu' or 'cuda'"):
        probe("meta")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="shipped"):
            probe("cuda")


def test_a_failing_measurement_cleans_up(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(links.os, "pwrite", fail)
    with pytest.raises(UsageError, match="filled up"):
        links.measure_disk_link(
            "ram", str(tmp_path), block_bytes=1 << 20, fresh_blocks=True, compute=lambda: None, device=CPU
        )
    assert os.listdir(tmp_path) == [] and open_files() == before


@pytest.mark.parametrize("most_bytes", [4 << 20, 48 << 20])
def test_it_measures_within_the_bytes_that_it_is_given(most_bytes: int, tmp_path: pathlib.Path) -> None:
    meter = ProfilerMeter()
    meter.start()
    profile = probe("cpu", spill_folder=str(tmp_path), most_bytes=most_bytes)
    meter.stop()
    assert most_bytes // 8 < meter.peak_bytes <= most_bytes
    assert all(rate.per_second > 0 for rate in profile.rates)


def test_drag_is_the_time_lost_per_byte() -> None:
    def move() -> int:
        time.sleep(0.001)
        return 1000

    def compute() -> None:
        beside = bool(list_threads())
        time.sleep(0.03 if beside else 0.01)

    # 20 ms lost while some 25 moves of 1000 bytes are made.
    assert 2e-7 < links.measure_drag(move, compute, CPU) < 1e-5
    assert links.measure_drag(move, lambda: time.sleep(0.01), CPU) < 2e-7


def test_an_error_while_moving_is_not_swallowed() -> None:
    def fail() -> int:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        links.measure_drag(fail, lambda: None, CPU)
    assert not list_threads()


def test_bytes_come_back_as_they_went(tmp_path: pathlib.Path) -> None:
    block = torch.randint(0, 256, (100_003,), dtype=torch.uint8)
    with links._spill_file(str(tmp_path)) as file:
        assert os.listdir(tmp_path) == []
        links._write(file, block, 17)
        back = torch.empty_like(block)
        links._read(file, back, 17)
    assert torch.equal(block, back)

"""Profiles that this machine measured before."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import elbowroom
from elbowroom.errors import UsageError
from elbowroom.hardware import profile_store
from elbowroom.hardware.profile_store import MOST_RATIO, MOST_SECONDS, ProfileStore, load_or_probe
from elbowroom.ir import files
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.measured_profile import MeasuredProfile

Probed = list[int | None]
"""Limits on the memory of each measurement."""


@pytest.fixture
def probed(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Probed:
    """Have profiles stored in a folder of the test, and "measure" a known one."""
    found: Probed = []

    def measure(device: str, *, most_bytes: int | None = None, **_: Any) -> HardwareProfile:
        found.append(most_bytes)
        return dataclasses.replace(profile, op_latency_seconds=1e-6 * len(found))

    monkeypatch.setattr(profile_store, "probe", measure)
    monkeypatch.setattr(profile_store, "find_cache", lambda: tmp_path)
    monkeypatch.setattr(profile_store, "median_seconds", lambda *_, **__: 1e-3)  # however busy the machine is
    return found


def change_file(folder: pathlib.Path, change: Callable[[MeasuredProfile], MeasuredProfile]) -> None:
    """Change the stored profile."""
    (path,) = folder.glob("profiles/*.json")
    files.save(change(files.load(MeasuredProfile, path)), path)


def test_a_machine_is_measured_once(probed: Probed) -> None:
    first = load_or_probe("cpu")
    again = load_or_probe("cpu", most_bytes=4 << 20)  # measured with more memory
    assert probed == [None]
    assert again.rates == first.rates and again.op_latency_seconds == first.op_latency_seconds == 1e-6
    # Capacities are those of now.
    assert [each.name for each in again.tiers] == ["ram", "disk"] and all(each.capacity_bytes for each in again.tiers)


def test_a_spill_folder_in_memory_is_said_once(
    probed: Probed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("elbowroom.hardware.probe.name_file_system", lambda _: "tmpfs")
    load_or_probe("cpu")  # the measurement itself would say it
    assert "tmpfs" not in caplog.text
    load_or_probe("cpu")
    assert caplog.text.count("tmpfs") == 1 and len(probed) == 1


def test_rooms_use_the_stored_profile_unless_told_not_to(
    probed: Probed, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("ELBOWROOM_PROFILE_STORE", "1")

    def fit(**options: Any) -> None:
        model = torch.nn.Linear(4, 4)
        with elbowroom.fit(model, torch.optim.SGD(model.parameters()), "1GiB", **options):
            pass

    fit(profile_store=False)
    assert len(probed) == 1 and not list(tmp_path.iterdir())
    fit(), fit()
    assert len(probed) == 2 and list(tmp_path.glob("profiles/*.json"))
    fit(profile_store=False)
    assert len(probed) == 3


def test_it_is_measured_again_with_more_memory(probed: Probed) -> None:
    load_or_probe("cpu", most_bytes=4 << 20)
    load_or_probe("cpu", most_bytes=3 << 20)
    assert len(probed) == 1
    load_or_probe("cpu", most_bytes=5 << 20)
    load_or_probe("cpu", most_bytes=1 << 40)
    assert load_or_probe("cpu").op_latency_seconds == 3e-6
    assert probed == [4 << 20, 5 << 20, 1 << 40]


@pytest.mark.parametrize(
    "change",
    [
        lambda found: dataclasses.replace(found, begin_seconds=time.time() - MOST_SECONDS),
        lambda found: dataclasses.replace(found, begin_seconds=time.time() + 60),
        lambda found: dataclasses.replace(found, machine="another machine"),
        lambda found: dataclasses.replace(found, check_seconds=found.check_seconds * MOST_RATIO * 100),
        lambda found: dataclasses.replace(found, check_seconds=found.check_seconds / MOST_RATIO / 100),
        lambda found: dataclasses.replace(found, check_seconds=0.0),
    ],
    ids=["old", "of the future", "of another machine", "slower then", "faster then", "of no time"],
)
def test_a_profile_that_may_not_hold_any_more_is_measured_again(
    probed: Probed, tmp_path: pathlib.Path, change: Callable[[MeasuredProfile], MeasuredProfile]
) -> None:
    load_or_probe("cpu")
    change_file(tmp_path, change)
    assert load_or_probe("cpu").op_latency_seconds == 2e-6
    assert load_or_probe("cpu").op_latency_seconds == 2e-6  # the file has been replaced
    assert len(probed) == 2


@pytest.mark.parametrize("contents", ["", "{}", '{"format": "elbowroom.profile", "version": 1, "value": {}}'])
def test_a_file_that_cannot_be_read_is_replaced(probed: Probed, tmp_path: pathlib.Path, contents: str) -> None:
    load_or_probe("cpu")
    (path,) = tmp_path.glob("profiles/*.json")
    path.write_text(contents)
    load_or_probe("cpu"), load_or_probe("cpu")
    assert len(probed) == 2


def test_the_speed_of_the_machine_is_checked(tmp_path: pathlib.Path) -> None:
    assert 0 < ProfileStore(torch.device("cpu"), str(tmp_path))._time_check_work() < 1


def test_without_a_folder_it_is_measured_each_time(
    probed: Probed, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(profile_store, "find_cache", lambda: tmp_path / "file")
    load_or_probe("cpu"), load_or_probe("cpu")
    assert len(probed) == 2


def test_profiles_are_of_a_machine_and_a_spill_folder(probed: Probed, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load_or_probe("cpu", spill_folder=str(tmp_path / "missing"))
    threads = torch.get_num_threads()
    device = torch.device("cpu")
    here = ProfileStore(device, str(tmp_path)).path
    try:
        torch.set_num_threads(threads + 1)
        assert ProfileStore(device, str(tmp_path)).path != here
    finally:
        torch.set_num_threads(threads)
    assert ProfileStore(device, str(tmp_path)).path == here != ProfileStore(device, "/proc").path

"""Memory of the host within the limits of control groups, in folders that look like those of Linux."""

from __future__ import annotations

import pathlib

import psutil
import pytest
import torch

from elbowroom.hardware.memory import parse_budget
from elbowroom.hardware.probe import list_capacities
from elbowroom.runtime import factory, streams
from elbowroom.runtime.stream_transfers import StreamTransfers
from elbowroom.tiers import host_memory, pinned
from tests.fake_streams import FakeStreams

MIB = 1 << 20
NO_LIMIT = (1 << 63) - 4096


@pytest.fixture
def mount(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setattr(host_memory, "MOUNT", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "OWN_GROUPS", tmp_path / "own")
    return tmp_path / "cgroup"


def write_v2(folder: pathlib.Path, limit: str, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache // 4}\nactive_file {cache - cache // 4}\n")


def write_v1(folder: pathlib.Path, limit: int, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 3\ntotal_inactive_file {cache}\n")


def test_without_limits_the_machine_counts(mount: pathlib.Path) -> None:
    assert host_memory.count_host_bytes() == psutil.virtual_memory().total
    write_v2(mount, "max", 3 * MIB)
    write_v1(mount / "memory", NO_LIMIT, 3 * MIB)
    assert host_memory.count_host_bytes() == psutil.virtual_memory().total
    assert host_memory.count_free_bytes() > 16 * MIB


def test_the_limit_of_a_container_counts_less_what_it_uses_beside_the_page_cache(mount: pathlib.Path) -> None:
    write_v2(mount, str(100 * MIB), 70 * MIB, cache=50 * MIB)
    assert (host_memory.count_host_bytes(), host_memory.count_free_bytes()) == (100 * MIB, 80 * MIB)
    (mount / "memory.stat").unlink()
    assert host_memory.count_free_bytes() == 30 * MIB
    write_v2(mount, str(100 * MIB), 101 * MIB)
    assert host_memory.count_free_bytes() == 0


def test_the_older_files_are_read(mount: pathlib.Path) -> None:
    write_v1(mount / "memory", 100 * MIB, 70 * MIB, cache=50 * MIB)
    assert (host_memory.count_host_bytes(), host_memory.count_free_bytes()) == (100 * MIB, 80 * MIB)


@pytest.mark.parametrize("version", [1, 2])
def test_groups_above_that_of_this_process_limit_it_too(mount: pathlib.Path, version: int) -> None:
    """As under a batch system, where the process sees the groups of the whole machine."""
    if version == 2:
        (mount.parent / "own").write_text("0::/batch/job/step\n")
        write_v2(mount / "batch" / "job" / "step", "max", 20 * MIB)
        write_v2(mount / "batch" / "job", str(100 * MIB), 30 * MIB)
        write_v2(mount / "batch", str(200 * MIB), 150 * MIB)
    else:
        (mount.parent / "own").write_text("5:cpu,cpuacct:/\n4:memory:/batch/job/step\n0::/\n")
        write_v1(mount / "memory" / "batch" / "job", 100 * MIB, 30 * MIB)
        write_v1(mount / "memory" / "batch", 200 * MIB, 150 * MIB)
    assert (host_memory.count_host_bytes(), host_memory.count_free_bytes()) == (100 * MIB, 50 * MIB)


def test_the_tier_below_a_card_takes_half_of_what_the_container_has_left(
    mount: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_v2(mount, str(100 * MIB), 36 * MIB)
    card = FakeStreams()
    monkeypatch.setattr(streams, "CudaStreams", lambda device: card)
    monkeypatch.setattr(pinned, "CudaPinning", lambda device: card)
    transfers = factory.open_transfers(torch.device("cuda", 0), str(tmp_path), None)
    assert isinstance(transfers, StreamTransfers)
    assert transfers._blocks._host.capacity_bytes == 32 * MIB
    transfers.close()


def test_profiles_and_shares_of_the_memory_keep_the_limit(mount: pathlib.Path, tmp_path: pathlib.Path) -> None:
    write_v2(mount, str(100 * MIB), 36 * MIB)
    ram, _ = list_capacities(torch.device("cpu"), str(tmp_path))
    assert ram.capacity_bytes == 100 * MIB
    assert parse_budget("50%", torch.device("cpu")) == 50 * MIB

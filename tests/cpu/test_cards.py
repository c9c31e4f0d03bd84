"""Cards that processes number differently: a broker serves one card, whatever its jobs call it."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator

import pytest
import torch

from elbowroom.config import Config
from elbowroom.errors import UsageError
from elbowroom.hardware.cards import find_card, name_card
from elbowroom.shared_lease import SharedLease
from elbowroom.sharing.transport.address import FOLDER_VARIABLE, find_address, list_addresses
from elbowroom.sharing.transport.client import ask_status
from elbowroom.sharing.transport.processes import count_outside

FIRST, SECOND = (f"{digit * 8}-aaaa-bbbb-cccc-{digit * 12}" for digit in "12")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="er-") as found:  # short, for the socket
        monkeypatch.setenv(FOLDER_VARIABLE, f"{found}/share")
        yield pathlib.Path(found)


def number_cards(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    """Have PyTorch find these cards, in this order."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=uuids[index]))


def list_sockets(*devices: str) -> list[pathlib.Path]:
    return [find_address(device, card=find_card(device)).socket for device in devices]


def test_jobs_on_one_card_meet_and_those_on_two_do_not(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number_cards(monkeypatch, FIRST, SECOND)
    first, second = list_sockets("cuda:0", "cuda:1")
    assert first != second
    assert list_sockets("cuda", f"GPU-{SECOND}", "cpu") == [first, second, find_address("cpu").socket]
    number_cards(monkeypatch, SECOND, FIRST)  # as with another CUDA_VISIBLE_DEVICES or CUDA_DEVICE_ORDER
    assert list_sockets("cuda:0", "cuda:1") == [second, first]
    number_cards(monkeypatch, SECOND)
    assert list_sockets("cuda:0") == [second]
    with pytest.raises(UsageError, match="there is no device cuda:1"):
        find_card("cuda:1")


def test_a_job_says_which_card_has_no_broker(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number_cards(monkeypatch, SECOND)
    with pytest.raises(UsageError, match=rf"cuda:0 \(GPU-{SECOND}\): start one with .*--device GPU-{SECOND} "):
        SharedLease("cuda:0", "job", 0, Config(), 1 << 20)


def test_listed_cards_are_called_as_here(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "share").mkdir()
    for name in (f"GPU-{FIRST}", f"GPU-{SECOND}", "cpu", "cuda-3"):
        (folder / "share" / f"{name}.sock").touch()
    found = list_addresses()
    assert [each.socket for each in found] == sorted((folder / "share").iterdir())
    number_cards(monkeypatch, SECOND)
    assert [name_card(each.device) for each in found] == [f"GPU-{FIRST}", "cuda:0", "cpu", "cuda:3"]


def test_without_cuda_the_numbers_stay(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [each.name for each in list_sockets("cuda:2", "cpu")] == ["cuda-2.sock", "cpu.sock"]
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match="nvidia-smi -L"):
        find_card("cuda:2")
    assert find_card(f"GPU-{FIRST}") == name_card(f"GPU-{FIRST}") == f"GPU-{FIRST}"


def test_the_broker_counts_the_programs_on_its_card(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's tool is a script: another program holds 70 MiB on the second card, and none on others."""
    tool = folder / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\n[ "$1 $2" = "-i GPU-{SECOND}" ] && echo "4242, 70"\nexit 0\n')
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    assert count_outside(f"GPU-{SECOND}", set()) == 70 << 20
    assert count_outside(f"GPU-{FIRST}", set()) == count_outside(f"GPU-{SECOND}", {4242}) == 0
    elbowroom = [sys.executable, "-m", "elbowroom"]
    with subprocess.Popen([*elbowroom, "share", "--device", f"GPU-{SECOND}", "--memory", "1GiB"]) as broker:
        try:
            assert await_outside(f"GPU-{SECOND}") == 70 << 20
            shown = subprocess.run([*elbowroom, "jobs", "--json"], capture_output=True, text=True, check=True)
            (found,) = json.loads(shown.stdout)["brokers"]
            assert (found["device"], found["outside_bytes"]) == (f"GPU-{SECOND}", 70 << 20)
        finally:
            broker.terminate()


def await_outside(device: str) -> int:
    """Return the bytes of other programs, once a broker knows of any."""
    for _ in range(400):
        with contextlib.suppress(UsageError):
            if nbytes := ask_status(find_address(device)).outside_bytes:
                return nbytes
        time.sleep(0.05)
    raise AssertionError("the broker counts nothing")

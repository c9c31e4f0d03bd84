"""Profiles of well-known devices and networks from their datasheets, for planning without them.

The `source` of each figure states the datasheet's value and the share of it assumed to be reachable. The profiles serve
to decide whether a job fits and roughly how fast it would be; `probe` on the machine itself is better.
"""

from __future__ import annotations

import importlib.resources
import re
from importlib.resources.abc import Traversable

from elbowroom.errors import UnknownMember
from elbowroom.ir import files
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.network import Network

_MAKERS = re.compile(r"nvidia|geforce|tesla|[^a-z0-9]")


def list_shipped() -> tuple[str, ...]:
    """Return the short names of the shipped profiles, sorted: "a100", "h100", ..."""
    return _list_names("profiles")


def load_shipped(name: str) -> HardwareProfile:
    """Load a shipped profile.

    Args:
        name: short name ("v100", "rtx3090"; spaces and case are ignored: "RTX 3090"), or a prefix of the device's full
            name ("NVIDIA A100 SXM4"). Another variant ("A100 80GB") is another device.

    Raises:
        UnknownMember: there is no such profile; the message lists the existing ones.
        TraceError: the installed file is damaged.
    """
    known, plain = list_shipped(), _plain(name)
    for short in known:
        if plain.startswith(short):
            with importlib.resources.as_file(_folder("profiles").joinpath(f"{short}.json")) as path:
                profile = files.load(HardwareProfile, path)
            if _plain(profile.name).startswith(plain):
                return profile
    raise UnknownMember("shipped profile", name, known)


def list_networks() -> tuple[str, ...]:
    """Return the names of the shipped networks, sorted: "dgx-a100", "dgx-h100", ..."""
    return _list_names("networks")


def load_network(name: str) -> Network:
    """Load a shipped network.

    Raises:
        UnknownMember: there is no such network; the message lists the existing ones.
        TraceError: the installed file is damaged.
    """
    if name not in list_networks():
        raise UnknownMember("network", name, list_networks())
    with importlib.resources.as_file(_folder("networks").joinpath(f"{name}.json")) as path:
        return files.load(Network, path)


def _list_names(folder: str) -> tuple[str, ...]:
    found = (entry.name for entry in _folder(folder).iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in found if name.endswith(".json")))


def _plain(name: str) -> str:
    return _MAKERS.sub("", name.lower())


def _folder(name: str) -> Traversable:
    return importlib.resources.files("elbowroom.hardware").joinpath(name)

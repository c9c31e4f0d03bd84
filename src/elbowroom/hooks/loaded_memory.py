"""Finds storages whose memory was loaded from a file for them alone, as `torch.load` and safetensors do.

Such storages cannot be resized, like those whose memory NumPy uses. But nobody else uses theirs, so it can leave.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterable

import torch

from elbowroom.hooks.storage_ids import get_address

_USERS = 2
"""Of a storage that belongs to one tensor: the tensor, and the Python object of the storage."""


def find_loaded(storages: Iterable[torch.UntypedStorage]) -> list[tuple[torch.UntypedStorage, bool]]:
    """Return the storages in CPU memory that may have been loaded, and whether a private mapping of a file has them.

    Those that several tensors use are left out, and so are those that overlap: their tensors may rely on it.
    """
    fixed = {each._cdata: each for each in storages if not each.resizable() and each.nbytes() > 0}
    spans = sorted((get_address(each), each.nbytes(), each._cdata) for each in fixed.values())
    mappings = _list_private_mappings() if spans else []
    found, last = [], 0
    for index, (begin, nbytes, key) in enumerate(spans):
        end, storage = begin + nbytes, fixed[key]
        overlaps = begin < last or (index + 1 < len(spans) and spans[index + 1][0] < end)
        if not overlaps and torch._C._storage_Use_Count(key) <= _USERS:
            nearest = bisect.bisect_right(mappings, (begin, sys.maxsize)) - 1
            found.append((storage, nearest >= 0 and end <= mappings[nearest][1]))
        last = max(last, end)
    return found


def _list_private_mappings() -> list[tuple[int, int]]:
    """List address ranges where files are mapped and nobody else sees what is written; adjacent ones as one."""
    found: list[tuple[int, int]] = []
    with open("/proc/self/maps") as file:
        for line in file:
            span, permissions, _, _, inode, *_ = line.split()
            if permissions[3] != "p" or inode == "0":
                continue
            lower, upper = (int(each, 16) for each in span.split("-"))
            if found and found[-1][1] == lower:
                lower = found.pop()[0]
            found.append((lower, upper))
    return found

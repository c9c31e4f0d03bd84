"""Finds storages whose memory was loaded from a file for them alone, as `torch.load` and safetensors do.

Such storages cannot be resized, like those whose memory NumPy uses. But nobody else uses theirs, so it can leave.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from elbowroom.hooks.storage_ids import get_address
from elbowroom.native import library

_USERS = 2
"""Of a storage that belongs to one tensor: the tensor, and the Python object of the storage."""


def find_loaded(storages: Iterable[torch.UntypedStorage]) -> list[tuple[torch.UntypedStorage, bool]]:
    """Return the storages in CPU memory that may have been loaded, and whether each lies in a mapped file.

    Left out are those that several tensors use, and parts of a file of which others use parts as well, or all.
    """
    fixed = {each._cdata: each for each in storages if not each.resizable() and each.nbytes() > 0}
    native, sliced = library.load(), _make_slice()
    found, files = [], defaultdict[int, list[torch.UntypedStorage]](list)
    for each in fixed.values():
        if torch._C._storage_Use_Count(each._cdata) > _USERS:
            continue
        if file := native.find_mapping(each, sliced):
            files[file].append(each)
        else:
            found.append((each, False))
    for file, parts in files.items():
        spans = sorted((get_address(each), each.nbytes()) for each in parts)
        if _have_all(file, parts) and _lie_apart(spans):
            found += [(each, True) for each in parts]
    return found


def _have_all(file: int, parts: Sequence[torch.UntypedStorage]) -> bool:
    """Tell whether nobody else uses a file: neither other slices of the storage that maps it, nor that storage."""
    if parts[0]._cdata == file:
        return len(parts) == 1
    count_users = library.load().count_users
    from_one, from_python = count_users(_make_slice())
    return bool(count_users(parts[0]) == (from_one + len(parts) - 1, from_python))


def _lie_apart(spans: Sequence[tuple[int, int]]) -> bool:
    return all(begin + nbytes <= after for (begin, nbytes), (after, _) in itertools.pairwise(spans))


@functools.cache
def _make_slice() -> torch.UntypedStorage:
    sliced: torch.UntypedStorage = torch.UntypedStorage(2, device="cpu")[:1]
    return sliced

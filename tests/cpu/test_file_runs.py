"""Runs of bytes between the spill file and memory."""

from __future__ import annotations

import errno
import pathlib
import random

import pytest
import torch

from elbowroom.runtime.sections import find_extents
from elbowroom.slicing.bounds import find_packed_strides
from elbowroom.tiers.disk import SpillFile


def make_view(chance: random.Random) -> torch.Tensor:
    """Return a slice of a tensor in any memory layout, of 1 to 4 bytes an element, some larger than a block."""
    shape = [chance.choice((1, 2, 3, 7, 40)) for _ in range(chance.randint(1, 3))] + [chance.choice((3, 200, 5000))]
    dtype = chance.choice((torch.uint8, torch.int16, torch.int32))
    whole = torch.empty(shape, dtype=dtype).random_(0, 100).permute(chance.sample(range(len(shape)), len(shape)))
    dimension = chance.randrange(len(shape))
    begin = chance.randrange(whole.shape[dimension])
    return whole.narrow(dimension, begin, chance.randint(1, whole.shape[dimension] - begin))


def get_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@pytest.mark.parametrize("seed", range(60))
def test_runs_are_where_a_view_says(seed: int, tmp_path: pathlib.Path) -> None:
    """What is read is the view, and a write changes nothing else."""
    view = make_view(random.Random(seed))
    packed = torch.empty_strided(view.shape, find_packed_strides(view), dtype=view.dtype)
    extents = find_extents(view, packed)
    assert extents is not None and extents.nbytes == packed.nbytes
    whole = get_bytes(view)
    spill = SpillFile(tmp_path)
    offset = spill.reserve(whole.numel())
    spill.write(offset, whole.data_ptr(), whole.numel())
    place, memory = offset + extents.copy_offset, packed.data_ptr() + extents.memory_offset
    spill.read(place, memory, extents.run_bytes, extents.dimensions)
    assert torch.equal(packed, view)
    packed.random_(0, 100)
    spill.write(place, memory, extents.run_bytes, extents.dimensions)
    found = torch.empty_like(whole)
    spill.read(offset, found.data_ptr(), whole.numel())
    view.copy_(packed)
    assert torch.equal(found, whole)
    spill.close()


@pytest.mark.parametrize("distance", [8, 1 << 16])
def test_a_file_that_is_too_short_is_an_error(distance: int, tmp_path: pathlib.Path) -> None:
    spill = SpillFile(tmp_path)
    spill.reserve(distance)
    memory = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(OSError, match=r"Input/output") as caught:
        spill.read(0, memory.data_ptr(), 4, ((3, distance, 4),))
    assert caught.value.errno == errno.EIO
    spill.close()

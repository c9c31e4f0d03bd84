"""A program on a CUDA device that does not exist, with the arena in it; run by itself, as an allocator is for good.

What torch would call is called here; what torch is asked for answers as on a machine with a device.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import types
from typing import Any

import pytest
import torch

import elbowroom
from elbowroom.cuda_allocator import use
from elbowroom.errors import UsageError
from elbowroom.hooks.cuda_ledger import CudaLedger
from elbowroom.hooks.meter import CudaMeter

runtime = ctypes.CDLL(sys.argv[1])
set_functions: dict[str, int] = {}
plugged: list[Any] = []


class Inner:
    """The C++ side of an allocator."""

    def set_record_stream_fn(self, address: int) -> None:
        set_functions["record_stream"] = address

    def set_reset_fn(self, address: int) -> None:
        set_functions["reset"] = address

    def set_begin_allocate_to_pool(self, address: int) -> None:
        set_functions["begin_allocate_to_pool"] = address


class Allocator:
    """torch.cuda.memory.CUDAPluggableAllocator."""

    def __init__(self, path: str, alloc: str, free: str) -> None:
        library = ctypes.CDLL(path)
        self.alloc, self.free = getattr(library, alloc), getattr(library, free)
        self.alloc.restype = ctypes.c_void_p
        self.alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]

    def allocator(self) -> Inner:
        return Inner()


def refused(call: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        call()


refused(elbowroom.use_planned_allocator, "finds none")
torch.cuda.is_available = lambda: True
torch.cuda.is_initialized = lambda: True
refused(elbowroom.use_planned_allocator, "at the beginning of the program")
torch.cuda.is_initialized = lambda: False
torch.cuda.current_device = lambda: 0
torch.cuda.memory.CUDAPluggableAllocator = Allocator  # type: ignore[misc, assignment]
torch.cuda.memory.change_current_allocator = plugged.append
assert use.find_arena() is None
arena = elbowroom.use_planned_allocator()
assert elbowroom.use_planned_allocator() is arena is use.find_arena()
allocator = plugged.pop()
assert not plugged and len(set_functions) == 3 and all(set_functions.values())
torch.cuda.is_initialized = torch.cuda.memory.is_initialized = lambda: True  # type: ignore[attr-defined]


def alloc(nbytes: int) -> int:
    address: int = allocator.alloc(nbytes, 0, None)
    assert address
    return address


def train() -> None:
    """What a step asks for."""
    blocks = [alloc(1000 * (index % 7 + 1)) for index in range(40)]
    for block in reversed(blocks):
        temporary = alloc(5000)
        allocator.free(block, 0, 0, None)
        allocator.free(temporary, 0, 0, None)


assert allocator.alloc(0, 0, None) is None
allocator.free(None, 0, 0, None)
device = torch.device("cuda", 0)
for _ in range(3):
    with use.serving(device), use.serving(device):  # a room inside another one's step
        train()
with arena.step():
    train()
    refused(lambda: arena.step(0).__enter__(), "inside another one")
with use.serving(torch.device("cpu")):
    pass
counts = arena.count()
assert (counts.hits, counts.unplanned, counts.missed) == (160, 160, 0), counts
assert "hits=160" in repr(counts)

# Statistics, which PyTorch's C++ would refuse to give.
kept = alloc(3 << 20)
assert torch.cuda.memory_allocated(0) == counts.allocated_bytes + (3 << 20) == 3 << 20
assert torch.cuda.memory_reserved() == arena.count().reserved_bytes >= 3 << 20
assert torch.cuda.max_memory_allocated(device) == 3 << 20
allocator.free(kept, 0, 0, None)
torch.cuda.reset_peak_memory_stats(0)
torch.cuda.reset_accumulated_memory_stats(0)
assert torch.cuda.max_memory_allocated(0) == 0
assert "GPU reserved memory" in torch.cuda.memory_summary(0)
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(total_memory=1 << 30)
meter = CudaMeter(device, CudaLedger(device), is_detailed=False)
meter.start()
with arena.step():
    train()
meter.stop()
peak = sum(-(-1000 * (index % 7 + 1) // 512) * 512 for index in range(40)) + 5120
assert meter.peak_bytes == peak and meter.resident_bytes == arena.count().reserved_bytes
meter.start()
meter.stop()
assert meter.peak_bytes == 0 and torch.cuda.max_memory_allocated(0) == peak, "the program reads on"
torch.cuda.reset_peak_memory_stats(0)
assert torch.cuda.max_memory_allocated(0) == 0

# PyTorch's other requests.
function = ctypes.CFUNCTYPE(None)
function(set_functions["reset"])()
assert arena.count().reserved_bytes == 0
block = alloc(512)
ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(set_functions["record_stream"])(block, 7)
allocator.free(block, 0, 0, None)
assert arena.count().leaving == 1

# A child that is forked while another thread is in the middle of requests finds an open lock.
stop = threading.Event()


def hammer() -> None:
    """Requests without end."""
    while not stop.is_set():
        allocator.free(alloc(4096), 0, 0, None)


threads = [threading.Thread(target=hammer) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        allocator.free(alloc(1 << 20), 0, 0, None)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for thread in threads:
    thread.join()

# It ends in a step that is planned, with blocks that nobody gives back.
step = arena.step()
step.__enter__()
left = [alloc(1000) for _ in range(10)]
gc.collect()
print("all is well")
sys.stdout.flush()

"""Calls each method without arguments of a class on state that is away, and on a twin that never left.

Prints a line for each: what it found, so that the last one tells what has ended the process.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.leaks import profile
from tests.state_jobs import EVERYTHING, StateJob, fit, get_pager, make_job

KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "Tensor": lambda tensor: tensor,
    "UntypedStorage": lambda tensor: tensor.untyped_storage(),
    "TypedStorage": lambda tensor: tensor._typed_storage(),
}

UNEQUAL = (
    "__class__", "__hash__", "__init__", "__init_subclass__", "__new__", "__subclasshook__", "_cdata", "_fix_weakref",
    "_free_weak_ref", "_release_ipc_counter", "_share_fd_cpu_", "_share_filename_cpu_", "_shared_decref",
    "_shared_incref", "_use_count", "_version", "_weak_ref", "const_data_ptr", "data_ptr", "_data_ptr",
    "_get_shared_fd", "_resize_with_addr_", "_set_from_file", "_write_file", "grad_fn", "handle",
)  # fmt: skip
"""Differ by their nature, or must not be called."""


def describe(value: Any, depth: int = 0) -> Any:
    """What can be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.shape, str(value.detach().clone().to_dense().tolist())
    if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
        return str(value.tolist())  # of which a NaN is equal to another
    if isinstance(value, (list, tuple)) and depth < 2:
        return [describe(each, depth + 1) for each in value[:4]]
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def call(job: StateJob, position: int, kind: str, name: str) -> Any:
    """What a method or property returns or raises, and what it leaves behind."""
    torch.manual_seed(1)
    tensor = list(job.model.parameters())[position]
    try:
        value = getattr(KINDS[kind](tensor), name)
        found = describe(value() if callable(value) else value)
    except Exception as error:
        found = (type(error).__name__, str(error))
    return found, describe(tensor)


def sweep(kind: str) -> None:
    def make() -> StateJob:  # of small tensors, many of which a method leaves such that they stay from then on
        torch.manual_seed(3)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(20)))
        return make_job(functools.partial(torch.optim.SGD, lr=0.1), model)

    twin, job = make(), make()
    with fit(job, profile.__wrapped__()) as room:  # type: ignore[attr-defined]
        pager = get_pager(room)
        pager.make_room_between_steps(EVERYTHING)
        for name in dir(getattr(torch, kind)):
            if name in UNEQUAL:
                continue
            pager.make_room(EVERYTHING)
            print(f"{kind}.{name}", end=": ", flush=True)
            parameters = list(job.model.parameters())
            position = next(at for at, each in enumerate(parameters) if pager.is_away(each.untyped_storage()))
            ours, plain = call(job, position, kind, name), call(twin, position, kind, name)
            print("the same" if ours == plain else f"{str(ours)[:300]}, not {str(plain)[:300]}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for each in KINDS:
        sweep(each)

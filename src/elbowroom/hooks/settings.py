"""What chooses a kernel, and so its bits, beside its arguments: settings that a program may change as it runs.

A forward pass may run under `torch.backends.cudnn.flags(...)` or with another number of threads, and what is saved may
depend on whether gradients are recorded (a oneDNN LSTM makes its workspace only then). A replay, in the backward pass,
has to run under what the op ran under.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Settings = tuple[Any, ...]


def _set_deterministic(value: bool) -> None:
    torch._C._set_deterministic_algorithms(value, warn_only=torch._C._get_deterministic_algorithms_warn_only())


def _set_warning_only(value: bool) -> None:
    torch._C._set_deterministic_algorithms(torch._C._get_deterministic_algorithms(), warn_only=value)


def _pair(name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}")


def _reduction(name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    read, write = _pair(name)
    return read, lambda value: write(*value) if isinstance(value, tuple) else write(value)


def _precision(backend: str, op: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    return functools.partial(read, backend, op), functools.partial(write, backend, op)


_TABLE: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch._C._get_deterministic_algorithms, _set_deterministic),
    (torch._C._get_deterministic_algorithms_warn_only, _set_warning_only),
    *(_pair(name) for name in ("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled")),
    *(_precision("mkldnn", op) for op in ("matmul", "conv", "rnn")),
)

if torch._C._has_cuda:  # no op asks for these otherwise, and they are read for every op that is recorded
    _TABLE += (
        *(_pair(f"cudnn_{name}") for name in ("enabled", "benchmark", "deterministic")),
        *(
            _reduction(f"cublas_allow_{name}")
            for name in ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction", "fp16_accumulation")
        ),
        *(_precision("cuda", op) for op in ("matmul", "conv", "rnn")),
    )

_READERS = tuple(read for read, _ in _TABLE)


def read_settings() -> Settings:
    """The settings as they are in this thread. Cost: about a microsecond."""
    return tuple([read() for read in _READERS])


def change_settings(present: Settings, wanted: Settings) -> Settings:
    """Set those of the `wanted` settings that differ from the `present` ones; returns `wanted`."""
    if present != wanted:
        for (_, write), now, then in zip(_TABLE, present, wanted, strict=True):
            if now != then:
                write(then)
    return wanted

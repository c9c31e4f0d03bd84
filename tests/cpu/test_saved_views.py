"""Tensors of other kinds that autograd saves in a room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from elbowroom.ir.hardware import HardwareProfile
from tests.cpu.test_sliced_attacks import fit_anything


class Wrapper(torch.Tensor):
    """A wrapper whose sizes are computed in Python."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, dispatch_sizes_strides_policy="sizes"
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.size.default, torch.ops.aten.sym_size.default):
            return args[0].inner.shape
        if func in (torch.ops.aten.stride.default, torch.ops.aten.sym_stride.default):
            return args[0].inner.stride()
        found = func(*(each.inner if isinstance(each, Wrapper) else each for each in args), **(kwargs or {}))
        return Wrapper(found) if isinstance(found, torch.Tensor) else found


def run_jagged() -> torch.Tensor:
    parts = [torch.ones(3, 64), torch.ones(7, 64)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    (nested * 2.0).sin().values().sum().backward()
    assert nested.grad is not None
    found: torch.Tensor = nested.grad.values()
    return found


def run_strided() -> torch.Tensor:
    nested = torch.nested.nested_tensor([torch.ones(3, 64), torch.ones(7, 64)], requires_grad=True)
    (nested * nested).to_padded_tensor(0.0).sum().backward()
    assert nested.grad is not None
    return nested.grad.to_padded_tensor(0.0)


def run_wrapper() -> torch.Tensor:
    wrapper = Wrapper(torch.ones(64, 64)).requires_grad_()
    (wrapper * 2.0).sin().backward(Wrapper(torch.ones(64, 64)))
    gradient = wrapper.grad
    assert isinstance(gradient, Wrapper)
    return gradient.inner


@pytest.mark.parametrize("run", [run_jagged, run_strided, run_wrapper])
def test_sizes_that_only_python_knows(run: Callable[[], torch.Tensor], profile: HardwareProfile) -> None:
    expected = run()
    with fit_anything(profile, 5 << 20) as room, room.step():
        found = run()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_of_a_tensor_that_was_modified(dtype: torch.dtype, profile: HardwareProfile) -> None:
    with fit_anything(profile, 5 << 20) as room, room.step():
        weight = torch.ones(64, 64, dtype=dtype, requires_grad=True)
        saved = weight * 2
        made = saved.square()
        saved.add_(1)
        with pytest.raises(RuntimeError, match=rf"a {dtype} tensor of shape \[64, 64\] is at version 1; expected"):
            made.sum().backward()

"""Comparison of tensors bit by bit."""

from __future__ import annotations

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def equal_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two tensors have the same shape, dtype and bits, where any two NaN are equal."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    if not (first.is_floating_point() or first.is_complex()):
        return torch.equal(first, second)
    first, second = _to_real(first), _to_real(second)
    integers = _INTEGERS[first.element_size()]
    return torch.equal(first.view(integers), second.view(integers)) or not find_differing(first, second).any()


def find_differing(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Tell for each element of two tensors whether it has other bits in the other one."""
    if first.is_complex():
        return find_differing(torch.view_as_real(first), torch.view_as_real(second)).any(-1)
    same = (first == second) & (first.signbit() == second.signbit())
    return ~(same | (first.isnan() & second.isnan()))


def _to_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor

"""Every rule for slices against the whole op; gradient accumulation; probes of exactness and their store."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import random as python_random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from elbowroom.ir.slicing import Loop, SlicePass
from elbowroom.slicing.bounds import iterate_slices, narrow_result
from elbowroom.slicing.calls import make_results, run_slice, run_whole
from elbowroom.slicing.exactness_store import Exactness, ExactnessStore
from elbowroom.slicing.op_call import bind
from elbowroom.slicing.probe import equal_bits, find_exact, is_exact, probe_passes
from elbowroom.slicing.registry import find_passes, find_passes_along, list_rules
from tests.slicing_cases import GROUPS

aten = torch.ops.aten
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float64: 1e-12}


def make_random(dtype: torch.dtype, layout: str) -> Callable[..., torch.Tensor]:
    """Return a maker of random tensors; "strided" ones have gaps between their elements."""

    def make(*sizes: int) -> torch.Tensor:
        if layout == "strided" and sizes:
            wide = torch.randn(*sizes[:-1], 2 * sizes[-1]).to(dtype)
            return wide[..., ::2]
        made = torch.randn(sizes).to(dtype)
        if layout == "channels_last" and len(sizes) == 4:
            return made.to(memory_format=torch.channels_last)
        return made

    return make


def copy(value: Any) -> Any:
    """Copy tensors with their strides, gaps included."""
    if isinstance(value, (list, tuple)):
        return type(value)(copy(each) for each in value)
    if isinstance(value, dict):
        return {name: copy(each) for name, each in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return made.copy_(value)


def run(op: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the results of the whole op."""
    call = bind(op, args, kwargs)
    results = call.run(call.values)
    return [results[position] for position in call.find_mask()]


def assert_close(found: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), where
    if not expected.is_floating_point():
        assert torch.equal(found, expected), where
    elif expected.numel():
        largest = expected.nan_to_num(0, 0, 0).abs().max().item()
        bound = TOLERANCE[expected.dtype] * (1 + largest)
        assert torch.allclose(found, expected, rtol=0, atol=bound, equal_nan=True), where


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (torch.float32, "contiguous"),
        (torch.float32, "channels_last"),
        (torch.bfloat16, "contiguous"),
        (torch.float64, "strided"),
    ],
    ids=str,
)
@pytest.mark.parametrize("group", GROUPS)
def test_slices_give_what_the_whole_op_gives(group: str, dtype: torch.dtype, layout: str) -> None:
    torch.manual_seed(0)
    tested = proven = 0
    for op, args, kwargs in GROUPS[group](make_random(dtype, layout)):
        try:
            reference = copy((args, kwargs))
            whole = run(op, *reference)
        except (RuntimeError, NotImplementedError):
            continue  # the kernel does not know this dtype
        described = make_results(op, args, kwargs)
        assert [(each.shape, each.dtype) for each in described] == [(each.shape, each.dtype) for each in whole], op
        has_strides = [each.stride() for each in described] == [each.stride() for each in whole]
        for passes in find_passes(op, args, kwargs):
            sums = any(each.sums for each in passes)
            exact = not sums and is_exact(op, args, kwargs, passes, 3)
            for parts in (1, 3, 1000):
                given = copy((args, kwargs))
                found = run_whole(op, *given, passes, parts)
                where = f"{op} {passes} {parts}"
                assert has_strides or not exact, where
                for each, expected in zip(found, whole, strict=True):
                    assert_close(each, expected, where)
                    assert not (exact and parts == 3) or equal_bits(each, expected), where
                for each, expected in zip(bind(op, *given).values.values(), bind(op, *reference).values.values(), strict=True):
                    if isinstance(each, torch.Tensor):
                        assert_close(each, expected, where)  # running statistics, and an argument that it writes to
            tested += 1
            proven += exact
    assert tested
    assert proven > tested / 3

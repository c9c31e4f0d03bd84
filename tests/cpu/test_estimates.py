"""What an op is said to allocate before it runs covers what it does allocate, and is not far above it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elbowroom.hooks.estimates import Estimates
from elbowroom.hooks.meter import CpuMeter
from elbowroom.hooks.replayable import is_view, touches_tensors


class Comparison(TorchDispatchMode):
    """Measures every op that room is made for."""

    def __init__(self) -> None:
        super().__init__()
        self._estimates = Estimates("cpu")
        self.found: dict[str, tuple[int, int]] = {}  # estimated and measured bytes, by op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_view(func) or not touches_tensors(func):
            return func(*args, **kwargs)
        estimate, meter = self._estimates.find(func, args, kwargs), CpuMeter()
        meter.start()
        result = func(*args, **kwargs)
        meter.stop()
        self.found[func._opname] = (estimate.result_bytes + estimate.inner_bytes, meter.peak_bytes)
        return result


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def compare(*shapes: tuple[int, ...]) -> Callable[[torch.dtype], bool]:
    return lambda dtype: torch.allclose(*(numbers(*shape, dtype=dtype) for shape in shapes))


def measure(rows: int, others: int) -> Callable[[torch.dtype], torch.Tensor]:
    return lambda dtype: torch.cdist(numbers(rows, 300, dtype=dtype), numbers(others, 300, dtype=dtype))


CASES: dict[str, tuple[Callable[[torch.dtype], Any], float]] = {
    "kthvalue": (lambda dtype: torch.kthvalue(numbers(512, 300, dtype=dtype), 5, dim=0), 1.01),
    "median": (lambda dtype: torch.median(numbers(512, 300, dtype=dtype), 0), 1.01),
    "nanmedian": (lambda dtype: torch.nanmedian(numbers(512, 300, dtype=dtype)), 1.06),
    "isin": (lambda dtype: torch.isin(numbers(300, 512, dtype=dtype), numbers(40000, dtype=dtype)), 2.0),
    "isin of a few": (lambda dtype: torch.isin(numbers(300, 512, dtype=dtype), numbers(5, dtype=dtype)), 1.01),
    "isin of one": (lambda dtype: torch.isin(numbers(300, 512, dtype=dtype), 1.0), 1.01),
    "isin of a number": (lambda dtype: torch.isin(1.0, numbers(300, 512, dtype=dtype)), 2.0),
    "allclose": (compare((90000,), (90000,)), 1.02),
    "allclose of a table": (compare((300, 1), (1, 400)), 1.6),
    "multinomial": (lambda dtype: torch.multinomial(numbers(512, 300, dtype=dtype).abs(), 5), 1.05),
    "histc": (lambda dtype: torch.histc(numbers(90000, dtype=dtype), bins=20000), 1.4),
    "clone": (lambda dtype: numbers(512, 300, dtype=dtype).t().contiguous(), 1.01),
    "copy_": (lambda dtype: torch.empty(300, 512, dtype=dtype).copy_(numbers(512, 300, dtype=dtype).t()), 1.1),
    "_euclidean_dist": (measure(512, 200), 1.01),
    "_euclidean_dist of many": (measure(3000, 30), 1.01),
    "_cdist_forward": (
        lambda dtype: torch.cdist(numbers(300, 512, dtype=dtype).t(), numbers(300, 200, dtype=dtype).t(), p=1.0),
        1.6,
    ),
}  # fmt: skip
NOT_IN_HALF = ("_euclidean_dist", "_euclidean_dist of many", "_cdist_forward", "histc")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_estimates_cover_what_is_allocated(name: str, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and name in NOT_IN_HALF:
        pytest.skip("no such kernel")
    run, slack = CASES[name]
    with Comparison() as comparison:
        run(dtype)
    estimated, measured = comparison.found[name.split(" of ")[0]]
    assert measured <= estimated <= slack * measured + 2048


def test_what_isin_finds_among_equal_numbers_may_take_less() -> None:
    with Comparison() as comparison:
        torch.isin(torch.zeros(90000), torch.arange(30000.0))
    estimated, measured = comparison.found["isin"]
    assert measured <= estimated


@pytest.mark.parametrize("is_expanded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("inner", "outer", "images", "pixels", "stride"),
    [
        *((1024, 2048, 4, 4, 2), (512, 512, 3, 4, 2), (16, 64, 6, 4, 3), (768, 2048, 2, 3, 2), (16, 1024, 2, 28, 2)),
        *((1024, 16, 8, 14, 1), (128, 64, 8, 28, 3), (768, 512, 2, 2, 1)),
    ],
)
def test_estimates_cover_convolutions_whose_weights_outweigh_images(
    inner: int, outer: int, images: int, pixels: int, stride: int, dtype: torch.dtype, is_expanded: bool
) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        given = numbers(images, inner, pixels, pixels, dtype=dtype).to(memory_format=layout).requires_grad_()
        weight = numbers(outer, inner, 1, 1, dtype=dtype).to(memory_format=layout).requires_grad_()
        with Comparison() as comparison:
            result = torch.nn.functional.conv2d(given, weight, stride=stride)
            ones = torch.ones_like(result)
            result.backward(ones[:1, :1, :1, :1].expand_as(ones) if is_expanded else ones)
        for op in ("convolution", "convolution_backward"):
            estimated, measured = comparison.found[op]
            assert measured <= estimated, op


def test_what_an_op_in_place_casts_counts_whatever_came_before() -> None:
    x, other = torch.zeros(1 << 16), torch.ones(1 << 16, dtype=torch.bfloat16)
    op, known = torch.ops.aten.addcmul_.default, Estimates("cpu")
    before = known.find(op, (x, x, x), {}).nbytes
    found = known.find(op, (x, other, other), {}).nbytes
    assert before < found == Estimates("cpu").find(op, (x, other, other), {}).nbytes

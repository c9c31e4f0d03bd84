"""Measures compute rates: flops by kind and dtype, memory bandwidth, and the overhead of an op and of a hook.

Shapes are those of real layers (a residual network at 56 x 56, a transformer of width 1024). Forward and backward are
timed together, since a training step spends two thirds of its flops in the backward pass.
"""

from __future__ import annotations

import collections
import itertools
import statistics
import time
from collections.abc import Callable

import torch

from elbowroom.hardware.sizes import CHANNELS, HEAD_WIDTH, Sizes
from elbowroom.hardware.timing import median_seconds, wait_for
from elbowroom.ir.hardware import Rate

Work = tuple[Callable[[], object], float]
"""A call, and its flops or the bytes that it reads and writes."""


def measure_rates(device: torch.device, sizes: Sizes, progress: Callable[[str, float], None]) -> tuple[Rate, ...]:
    """Measure flops per second of matmul, convolution and attention, and bytes per second of elementwise ops, by dtype.

    Args:
        sizes: shapes of the operands.
        progress: receives what is being measured and the share (0 to 1) done.
    """
    dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if device.type == "cuda" else [])
    makers = {"matmul": _matmul, "convolution": _convolution, "attention": _attention, "elementwise": _elementwise}
    found: list[Rate] = []
    for kind, make in makers.items():
        for dtype in dtypes:
            name = str(dtype).removeprefix("torch.")
            progress(f"{kind} in {name}", len(found) / (len(makers) * len(dtypes)))
            call, amount = make(device, dtype, sizes)
            seconds = median_seconds(call, device)
            del call  # frees its operands before the next ones are allocated
            found.append(Rate(kind=kind, dtype=name, per_second=amount / seconds, source="measured"))
    return tuple(found)


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    # A separate generator, so that the program's random state does not change.
    generator = torch.Generator(device=device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def _matmul(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Work:
    rows, width = sizes.rows, sizes.width
    inputs, weight = _random(device, dtype, rows, width), _random(device, dtype, width, width)
    gradient = _random(device, dtype, rows, width)

    def call() -> None:
        torch.mm(inputs, weight.t())
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), inputs)

    return call, 3 * 2.0 * rows * width * width


def _convolution(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Work:
    batch, image = sizes.batch, sizes.image
    calls, flops = [], 0.0
    for channels, kernel in zip(CHANNELS, (3, 1), strict=True):
        inputs, weight = (
            _random(device, dtype, batch, channels, image, image),
            _random(device, dtype, 64, channels, kernel, kernel),
        )
        gradient = _random(device, dtype, batch, 64, image, image)
        geometry = ([1, 1], [kernel // 2, kernel // 2], [1, 1], False, [0, 0], 1)
        calls.append((inputs, weight, gradient, geometry))
        flops += 3 * 2.0 * gradient.numel() * channels * kernel * kernel

    def call() -> None:
        for inputs, weight, gradient, geometry in calls:
            torch.ops.aten.convolution(inputs, weight, None, *geometry)
            torch.ops.aten.convolution_backward(gradient, inputs, weight, None, *geometry, [True, True, False])

    return call, flops


def _attention(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Work:
    batch = sizes.samples
    heads = sizes.heads
    length = sizes.length
    width = HEAD_WIDTH
    query, key, value = (_random(device, dtype, batch, heads, length, width).requires_grad_() for _ in range(3))
    gradient = _random(device, dtype, batch, heads, length, width)

    def call() -> None:
        result = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        torch.autograd.grad(result, (query, key, value), gradient)

    # Two products forward, five backward (which recomputes the scores), each of 2 * length * length * width.
    return call, 7 * 2.0 * batch * heads * length * length * width


def _elementwise(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Work:
    nbytes = sizes.block_bytes
    inputs = [_random(device, dtype, nbytes // dtype.itemsize) for _ in range(4)]
    held: collections.deque[torch.Tensor] = collections.deque(maxlen=4)

    def call() -> None:
        # Results outlive their op, as in a training step, so that neither they nor the inputs stay in the caches.
        for left, right in itertools.pairwise(inputs):
            held.append(torch.relu(left))
            held.append(torch.mul(left, right))

    return call, 3 * 5.0 * nbytes


def measure_op_latency(device: torch.device) -> float:
    """Return the seconds of a one-element op, launch included: the median of several runs of many ops."""
    tiny = torch.ones(1, device=device, dtype=torch.float32)
    count = 500
    times = []
    for _ in range(7):
        wait_for(device)
        begun = time.perf_counter()
        for _ in range(count):
            torch.add(tiny, tiny)
        wait_for(device)
        times.append((time.perf_counter() - begun) / count)
    return statistics.median(times)


def measure_hook(device: torch.device) -> float:
    """Return the overhead in seconds of calling one saved-tensor hook (pack or unpack)."""
    count = 200
    tiny = torch.ones(1, device=device, dtype=torch.float32, requires_grad=True)

    def chain() -> float:
        begun = time.perf_counter()
        value = tiny
        for _ in range(count):
            value = torch.sigmoid(value)
        torch.autograd.grad(value, tiny)
        return time.perf_counter() - begun

    def hooked() -> float:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return chain()

    chain(), hooked()
    # Alternate, so that slow moments of the machine affect both.
    differences = [hooked() - chain() for _ in range(25)]
    return max(statistics.median(differences) / (2 * count), 0.0)

"""Shapes for measuring a machine: those of real layers, or smaller ones if memory is short."""

from __future__ import annotations

import dataclasses

CHANNELS = 64, 256
"""Channels of the two convolutions of a bottleneck block: a 3x3 one of 64, and a 1x1 one from 256 to 64."""

HEAD_WIDTH = 64
"""Features of one attention head."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Shapes of the ops and transfers that `probe` runs.

    Attributes:
        rows, width: matrix product of (rows, width) and (width, width).
        batch, image: samples of the convolutions, and their height and width in pixels.
        samples, heads, length: shape of attention.
        block_bytes: size of the operands of an elementwise op, and of the blocks that links move.
        work_width, work_elements: square matrix and vector of the ops that run while a link moves blocks.
    """

    rows: int
    width: int
    batch: int
    image: int
    samples: int
    heads: int
    length: int
    block_bytes: int
    work_width: int
    work_elements: int


# On a CPU, blocks exceed glibc's largest mmap threshold (32 MiB), so that each result is new memory whose pages fault
# in, as in a large step. For smaller blocks this depends on the state of the heap.
CPU_SIZES = Sizes(
    rows=1024, width=768, batch=4, image=56, samples=2, heads=12, length=256, block_bytes=40 << 20, work_width=768,
    work_elements=2 << 20,
)  # fmt: skip
CUDA_SIZES = Sizes(
    rows=8192, width=4096, batch=64, image=56, samples=8, heads=16, length=2048, block_bytes=256 << 20,
    work_width=4096, work_elements=64 << 20,
)  # fmt: skip
LINK_BLOCK_BYTES = 40 << 20
"""Limit on the size of blocks that measure a link."""

SMALLEST = Sizes(
    rows=16, width=64, batch=1, image=7, samples=1, heads=1, length=16, block_bytes=1 << 16, work_width=64,
    work_elements=1 << 12,
)  # fmt: skip


def choose_sizes(device_type: str, most_bytes: int | None) -> Sizes:
    """Return the shapes of real layers, halved for each kind of work until it takes at most `most_bytes`.

    Below about 2 MB this returns the smallest shapes, which may take more.
    """
    sizes = CUDA_SIZES if device_type == "cuda" else CPU_SIZES
    if most_bytes is None:
        return sizes
    for count, fields in _KINDS:
        while count(sizes) > most_bytes and any(getattr(sizes, name) > getattr(SMALLEST, name) for name in fields):
            halved = {name: max(getattr(SMALLEST, name), getattr(sizes, name) // 2) for name in fields}
            sizes = dataclasses.replace(sizes, **halved)
    return sizes


def _count_product(sizes: Sizes) -> int:
    """Count operands and the largest result in float32, and packed panels."""
    return 4 * (3 * sizes.rows * sizes.width + 2 * sizes.width**2) + (1 << 18) + 2560 * sizes.width


def _count_convolution(sizes: Sizes) -> int:
    """Count operands of both convolutions, results, gradients, and copies in the kernels' layouts."""
    return 1600 * 4 * sizes.batch * sizes.image**2 + (1 << 20)


def _count_attention(sizes: Sizes) -> int:
    """Count operands, result, all gradients, and the tiles of scores."""
    return 10 * 4 * sizes.samples * sizes.heads * sizes.length * HEAD_WIDTH + 2 * 64 * 15 * min(sizes.length, 512)


def _count_blocks(sizes: Sizes) -> int:
    """Count four operands and five results of elementwise ops, which exceed the six blocks of a link."""
    return 10 * sizes.block_bytes


def _count_work(sizes: Sizes) -> int:
    """Count operands and results of the ops that run beside the six blocks of a link."""
    beside = 6 * min(sizes.block_bytes, LINK_BLOCK_BYTES)
    return beside + 8 * (sizes.work_width**2 + sizes.work_elements)


_KINDS = (
    (_count_product, ("rows", "width")),
    (_count_convolution, ("batch", "image")),
    (_count_attention, ("samples", "heads", "length")),
    (_count_blocks, ("block_bytes",)),
    (_count_work, ("work_width", "work_elements")),
)

"""Does what a probe says of a way to cut an op hold for other data, and for the whole op?

    python benchmarks/slice_exactness.py [--seconds 120] [--seed 0] [--groups products ...] [--draws 12]
        [--output FILE]

Takes ops at random, with random shapes, strides, dtypes and numbers of slices, and asks a probe whether a way to cut
them is exact: one that holds the whole op, and one that has room for a smaller op only. Where it says so, the op runs
whole and in slices on `--draws` draws of data that the probe has not seen. Prints each contradiction, and how many
answers were compared. Ways that change the order of a sum are left out, since nothing relies on their bits.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # degrees of freedom
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import torch
from writing import write_results

from elbowroom.slicing.bits import equal_bits
from elbowroom.slicing.calls import run_whole
from elbowroom.slicing.exactness_store import Exactness
from elbowroom.slicing.op_call import OpCall, bind
from elbowroom.slicing.probe import probe_passes
from elbowroom.slicing.random_data import Values, fill_reads, make_statistics
from elbowroom.slicing.registry import find_passes, list_rules

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
CPU = torch.device("cpu")
DTYPES = (torch.float32,) * 4 + (torch.bfloat16,) * 2 + (torch.float64, torch.float16)
PARTS = (2, 3, 5, 9, 16, 1000)
UNARY = ("sigmoid", "silu", "gelu", "elu", "softplus", "tanh", "exp", "log1p", "erf", "mish", "sin", "sqrt", "rsqrt")
BACKWARD = ("gelu", "silu", "sigmoid", "tanh", "mish")
INTERPOLATIONS = ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa")


class Maker:
    """Maker of random calls.

    Args:
        seed: the same one gives the same calls.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.dtype = torch.float32
        torch.manual_seed(seed)

    def size(self, least: int, most: int) -> int:
        """Return a size; small ones are as likely as large ones."""
        return round(math.exp(self.random.uniform(math.log(least), math.log(most))))

    def dense(self, *sizes: int) -> torch.Tensor:
        """Return a contiguous tensor."""
        return torch.randn(sizes).to(self.dtype)

    def tensor(self, *sizes: int) -> torch.Tensor:
        """Return a tensor: contiguous, channels_last, transposed, or with gaps between its elements."""
        way = self.random.random()
        if way < 0.15 and len(sizes) == 4:
            return self.dense(*sizes).to(memory_format=torch.channels_last)
        if 0.15 <= way < 0.25 and len(sizes) >= 2:
            return self.dense(*sizes[:-2], sizes[-1], sizes[-2]).transpose(-1, -2)
        if 0.25 <= way < 0.35 and sizes:
            return self.dense(*sizes[:-1], 2 * sizes[-1])[..., ::2]
        return self.dense(*sizes)

    def images(self, most: int = 24) -> tuple[int, int, int, int]:
        """Return the sizes of a batch of images."""
        return self.size(1, 24), self.size(1, 64), self.size(3, most), self.size(3, most)


def make_product(make: Maker) -> Call:
    rows, inner, columns = make.size(1, 600), make.size(1, 3000), make.size(1, 600)
    name = make.random.choice(("mm", "addmm", "bmm", "linear"))
    if name == "mm":
        return aten.mm.default, (make.tensor(rows, inner), make.tensor(inner, columns)), {}
    if name == "addmm":
        return aten.addmm.default, (make.tensor(columns), make.tensor(rows, inner), make.tensor(inner, columns)), {}
    if name == "linear":
        some = make.tensor(make.size(1, 30), make.size(1, 60), 96)
        return aten.linear.default, (some, make.tensor(columns, 96), None), {}
    batch, rows, inner, columns = make.size(1, 24), make.size(1, 100), make.size(1, 300), make.size(1, 100)
    return aten.bmm.default, (make.tensor(batch, rows, inner), make.tensor(batch, inner, columns)), {}


def make_reduction(make: Maker) -> Call:
    dimensions = make.random.choice((2, 3, 4))
    some = make.tensor(*(make.size(1, 120 if dimensions < 4 else 30) for _ in range(dimensions)))
    reduced = make.random.sample(range(dimensions), make.random.randint(1, dimensions - 1))
    op = make.random.choice(
        (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.logsumexp.default,
         aten.var_mean.correction, aten.var.correction, aten.linalg_vector_norm.default)
    )  # fmt: skip
    if op is aten.linalg_vector_norm.default:
        return op, (some, 2, reduced), {}
    return op, (some, reduced), {"correction": 1} if "correction" in str(op) else {}


def make_softmax(make: Maker) -> Call:
    sizes = [make.size(1, 200) for _ in range(make.random.choice((2, 3)))]
    dim = make.random.randrange(len(sizes))
    name = make.random.choice(("_softmax", "_log_softmax"))
    forward = getattr(aten, name).default
    if make.random.random() < 0.5:
        return forward, (make.tensor(*sizes), dim, False), {}
    args = (make.tensor(*sizes), forward(make.tensor(*sizes), dim, False), dim, make.dtype)
    return getattr(aten, f"{name}_backward_data").default, args, {}


def make_convolution(make: Maker) -> Call:
    batch, channels, height, width = make.images(28)
    outputs, kernel, groups = make.size(1, 64), make.random.choice((1, 3, 3, 5)), make.random.choice((1, 1, 1, 2, 4))
    channels, outputs = max(groups, channels // groups * groups), max(groups, outputs // groups * groups)
    stride, padding = make.random.choice((1, 1, 2)), kernel // 2
    options = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    some, weight = make.tensor(batch, channels, height, width), make.tensor(outputs, channels // groups, kernel, kernel)
    if make.random.random() < 0.4:
        return aten.convolution.default, (some, weight, make.tensor(outputs), *options), {}
    grad = make.tensor(*aten.convolution.default(some, weight, None, *options).shape)
    mask = make.random.choice(([True, True, True], [False, True, True], [True, False, False]))
    return aten.convolution_backward.default, (grad, some, weight, [outputs], *options, mask), {}


def make_norm(make: Maker) -> Call:
    is_forward = make.random.random() < 0.5
    kind = make.random.choice(("layer", "batch", "group"))
    if kind == "layer":
        sizes = (make.size(1, 60), make.size(1, 40), make.size(1, 400))
        weight = make.tensor(sizes[2])
        args: tuple[Any, ...] = (make.tensor(*sizes), [sizes[2]], weight, weight, 1e-5)
        if is_forward:
            return aten.native_layer_norm.default, args, {}
        _, mean, rstd = aten.native_layer_norm.default(*args)
        args = (make.tensor(*sizes), args[0], [sizes[2]], mean, rstd, weight, weight, [True] * 3)
        return aten.native_layer_norm_backward.default, args, {}
    batch, channels, height, width = make.images()
    if kind == "batch":
        some, training = make.tensor(batch, channels, height, width), make.random.random() < 0.7
        vectors, statistics = [make.tensor(channels) for _ in range(2)], [make.tensor(channels).abs() for _ in range(2)]
        if is_forward:
            return aten.native_batch_norm.default, (some, *vectors, *statistics, training, 0.1, 1e-5), {}
        copies = [each.clone() for each in statistics]
        _, mean, invstd = aten.native_batch_norm.default(some, *vectors, *copies, training, 0.1, 1e-5)
        args = (make.tensor(*some.shape), some, vectors[0], *statistics, mean, invstd, training, 1e-5, [True] * 3)
        return aten.native_batch_norm_backward.default, args, {}
    groups = make.random.choice((1, 2, 4))
    channels = max(groups, channels // groups * groups)
    some, vectors = make.dense(batch, channels, height, width), [make.dense(channels) for _ in range(2)]
    sizes = (batch, channels, height * width, groups)
    if is_forward:
        return aten.native_group_norm.default, (some, *vectors, *sizes, 1e-5), {}
    _, mean, rstd = aten.native_group_norm.default(some, *vectors, *sizes, 1e-5)
    args = (make.dense(*some.shape), some, mean, rstd, vectors[0], *sizes, [True] * 3)
    return aten.native_group_norm_backward.default, args, {}


def make_attention(make: Maker) -> Call:
    batch, heads, features = make.size(1, 8), make.size(1, 8), make.random.choice((8, 16, 32, 40, 64))
    queries, is_causal = make.size(1, 200), make.random.random() < 0.4
    keys = queries if make.random.random() < 0.5 else make.size(1, 200)
    query = make.dense(batch, heads, queries, features)
    key, value = (make.dense(batch, heads, keys, features) for _ in range(2))
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    if make.random.random() < 0.5:
        return forward, (query, key, value, 0.0, is_causal), {}
    out, logsumexp = forward(query, key, value, 0.0, is_causal)
    args = (make.dense(*out.shape), query, key, value, out, logsumexp, 0.0, is_causal)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward.default, args, {}


def make_pointwise(make: Maker) -> Call:
    sizes = [make.size(1, 400), *(make.size(1, 60) for _ in range(make.random.choice((1, 2))))]
    if make.random.random() < 0.3:
        sizes = [make.size(2, 12), make.size(1000, 80000)]
    way = make.random.random()
    if way < 0.6:
        return getattr(aten, make.random.choice(UNARY)).default, (make.tensor(*sizes),), {}
    if way < 0.8:
        name = f"{make.random.choice(BACKWARD)}_backward"
        return getattr(aten, name).default, (make.tensor(*sizes), make.tensor(*sizes)), {}
    if way < 0.9:
        return aten.addcdiv.default, tuple(make.tensor(*sizes) for _ in range(3)), {}
    return make.random.choice((aten.pow.Tensor_Tensor, aten.div.Tensor)), (make.tensor(*sizes), make.tensor(*sizes)), {}


def make_image_op(make: Maker) -> Call:
    sizes, wanted = make.images(14), [make.size(2, 30), make.size(2, 30)]
    some, window = make.tensor(*sizes), ([3, 3], [2, 2], [1, 1], False, True, None)
    name = make.random.choice(INTERPOLATIONS)
    pooled = aten.avg_pool2d.default(some, *window)
    enlarged = make.tensor(*sizes[:2], *wanted)
    return make.random.choice(
        (
            (aten.avg_pool2d.default, (some, *window), {}),
            (aten.avg_pool2d_backward.default, (make.tensor(*pooled.shape), some, *window), {}),
            (aten._adaptive_avg_pool2d.default, (some, [make.size(1, 3), 2]), {}),
            (aten._adaptive_avg_pool2d_backward.default, (make.tensor(*sizes[:2], 2, 2), some), {}),
            (getattr(aten, name).default, (some, wanted, True), {}),
            (getattr(aten, f"{name}_backward").default, (enlarged, wanted, list(sizes), True), {}),
        )
    )


def make_loss(make: Maker) -> Call:
    if make.random.random() < 0.3:
        indices = torch.randint(0, 50, (make.size(1, 60), make.size(1, 60)))
        args: tuple[Any, ...] = (
            make.tensor(*indices.shape, make.size(1, 200)),
            indices,
            50,
            -1,
            make.random.random() < 0.3,
        )
        return aten.embedding_dense_backward.default, args, {}
    batch, classes, reduction = make.size(1, 9000), make.size(1, 40), make.random.choice((1, 2))
    some, target = make.tensor(batch, classes), torch.randint(0, classes, (batch,))
    weight = make.random.choice((None, make.dense(classes).abs()))
    if make.random.random() < 0.5:
        return aten.nll_loss_forward.default, (some, target, weight, reduction, -100), {}
    _, total = aten.nll_loss_forward.default(some, target, weight, reduction, -100)
    return aten.nll_loss_backward.default, (make.dense(), some, target, weight, reduction, -100, total), {}


GROUPS: dict[str, Callable[[Maker], Call]] = {
    "products": make_product, "reductions": make_reduction, "softmax": make_softmax, "convolutions": make_convolution,
    "norms": make_norm, "attention": make_attention, "pointwise": make_pointwise, "images": make_image_op,
    "losses": make_loss,
}  # fmt: skip


def find_contradiction(call: OpCall, passes: Any, parts: int, draws: int) -> int | None:
    """Return the first draw of data for which slices have other bits than the whole op, or None."""
    for draw in range(draws):
        generator = torch.Generator().manual_seed(1000 + draw)
        reads = fill_reads(call, list_rules()[str(call.op)], Values.NORMAL, generator, CPU)
        values = call.replace_reads(reads, make_statistics(call, CPU))
        args, kwargs = call.order(call.replace_reads(reads, make_statistics(call, CPU)))
        whole = call.run(values)
        found = run_whole(call.op, args, kwargs, passes, parts)
        expected = [whole[position] for position in call.find_mask()]
        if not all(map(equal_bits, found, expected)):
            return draw
    return None


def try_one(make: Maker, group: str, draws: int) -> list[tuple[str, str | None]]:
    """Probe one op in two ways. Return for each answer "exact" what it was, and a contradiction if there is one."""
    make.dtype = make.random.choice(DTYPES)
    call = bind(*GROUPS[group](make))
    args, kwargs = call.order(call.values)
    alternatives = [
        each for each in find_passes(call.op, args, kwargs, with_partial=True) if not any(part.sums for part in each)
    ]
    if not alternatives:
        return []
    passes, parts = make.random.choice(alternatives), make.random.choice(PARTS)
    share = make.random.choice((0.3, 0.6, 1.0)) * sum(each.nbytes for each in call.reads)
    answers = [probe_passes(call.op, args, kwargs, passes, parts, limit_bytes=each) for each in (math.inf, share)]
    answers = [each for each in dict.fromkeys(answers) if each.is_exact]
    if not answers:
        return []
    draw = find_contradiction(call, passes, parts, draws)
    text = None
    if draw is not None:
        tensors = ", ".join(f"{tuple(each.shape)} {each.stride()}" for each in call.reads)
        text = f"{call.op} {make.dtype} {tensors}, {parts} parts of {passes}, draw {draw}"
    return [(answer.value, text) for answer in answers]


def main() -> None:
    """Try ops until the time is over, print contradictions and counts, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--draws", type=int, default=12)
    parser.add_argument("--output")
    options = parser.parse_args()
    make = Maker(options.seed)
    answers: Counter[str] = Counter({each.value: 0 for each in Exactness if each.is_exact})
    contradicted: list[dict[str, str]] = []
    tried, end = 0, time.monotonic() + options.seconds
    while time.monotonic() < end:
        try:
            found = try_one(make, make.random.choice(options.groups), options.draws)
        except (RuntimeError, NotImplementedError):
            continue  # no kernel for these arguments
        tried += 1
        for answer, text in found:
            answers[answer] += 1
            if text is not None:
                contradicted.append({"answer": answer, "case": text})
                print(f"{answer}, but not: {text}", flush=True)
    counts = ", ".join(f"{count} {answer}" for answer, count in answers.items())
    print(f"{tried} ops, answers compared: {counts}; contradicted: {len(contradicted)}")
    write_results(options.output, [{"ops": tried, "answers": dict(answers), "contradicted": contradicted}])
    sys.exit(bool(contradicted))


if __name__ == "__main__":
    main()

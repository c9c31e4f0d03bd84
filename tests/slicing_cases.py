"""Calls of all ops that have a rule for slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from elbowroom.slicing.rules.interpolation import KINDS, PADDING

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
Random = Callable[..., torch.Tensor]
"""Makes a random tensor of the given sizes, in the dtype and layout of a test."""

CONVOLUTIONS = [
    # sizes of input and weight, stride, padding, dilation, is transposed, groups, has bias
    ((5, 6, 9, 8), (7, 6, 3, 3), 1, 1, 1, False, 1, True),
    ((5, 6, 9, 8), (4, 6, 1, 1), 1, 0, 1, False, 1, False),
    ((4, 6, 11, 10), (9, 2, 3, 2), 2, 0, 2, False, 3, True),
    ((3, 5, 8, 8), (10, 1, 3, 3), 1, 1, 1, False, 5, True),
    ((4, 6, 7, 7), (6, 5, 3, 3), 2, 1, 1, True, 1, True),
    ((3, 6, 7, 7), (6, 2, 2, 2), 2, 0, 1, True, 3, True),
    ((3, 4, 12), (5, 4, 3), 1, 1, 1, False, 1, True),
    ((2, 3, 5, 6, 4), (4, 3, 3, 3, 3), 1, 1, 1, False, 1, True),
]


def list_convolutions(random: Random) -> Iterator[Call]:
    for sizes, kernel, stride, padding, dilation, transposed, groups, has_bias in CONVOLUTIONS:
        spatial = len(sizes) - 2
        channels = kernel[1] * groups if transposed else kernel[0]
        options = ([stride] * spatial, [padding] * spatial, [dilation] * spatial, transposed, [0] * spatial, groups)
        args = (random(*sizes), random(*kernel), random(channels) if has_bias else None, *options)
        yield aten.convolution.default, args, {}
        grad = random(*aten.convolution.default(*args).shape)
        masks = [[True, True, has_bias]]
        if len(sizes) == 3:
            masks += [[False, True, True], [False, True, False], [True, False, False], [True, False, True]]
        for mask in masks:
            yield aten.convolution_backward.default, (grad, *args[:2], [channels], *options, mask), {}


def list_pools(random: Random) -> Iterator[Call]:
    for sizes in ((3, 4, 9, 8), (4, 9, 8)):
        some = random(*sizes)
        window = ([3, 2], [2, 2], [1, 0], [1, 1], True)
        values, indices = aten.max_pool2d_with_indices.default(some, *window)
        yield aten.max_pool2d_with_indices.default, (some, *window), {}
        grad = random(*values.shape)
        yield aten.max_pool2d_with_indices_backward.default, (grad, some, *window, indices), {}
        values, indices = aten.adaptive_max_pool2d.default(some, [3, 2])
        yield aten.adaptive_max_pool2d.default, (some, [3, 2]), {}
        yield aten.adaptive_max_pool2d_backward.default, (random(*values.shape), some, indices), {}
        window = ([3, 2], [2, 1], [1, 0], False, True, None)
        yield aten.avg_pool2d.default, (some, *window), {}
        grad = random(*aten.avg_pool2d.default(some, *window).shape)
        yield aten.avg_pool2d_backward.default, (grad, some, *window), {}
        yield aten._adaptive_avg_pool2d.default, (some, [3, 3]), {}
        yield aten._adaptive_avg_pool2d_backward.default, (random(*sizes[:-2], 3, 3), some), {}
    some = random(2, 3, 4, 6, 5)
    window = ([2, 3, 2], [2, 2, 2], [1, 1, 0], [1, 1, 1], False)
    values, indices = aten.max_pool3d_with_indices.default(some, *window)
    yield aten.max_pool3d_with_indices.default, (some, *window), {}
    yield aten.max_pool3d_with_indices_backward.default, (random(*values.shape), some, *window, indices), {}
    if some.dtype is torch.bfloat16:
        return  # no kernel
    window = ([2, 3, 2], [2, 2, 2], [1, 1, 0], False, True, None)
    yield aten.avg_pool3d.default, (some, *window), {}
    grad = random(*aten.avg_pool3d.default(some, *window).shape)
    yield aten.avg_pool3d_backward.default, (grad, some, *window), {}
    yield aten._adaptive_avg_pool3d.default, (some, [2, 2, 3]), {}
    yield aten._adaptive_avg_pool3d_backward.default, (random(2, 3, 2, 2, 3), some), {}


def list_products(random: Random) -> Iterator[Call]:
    yield aten.mm.default, (random(17, 9), random(9, 6)), {}
    yield aten.mm.default, (random(9, 17).t(), random(6, 9).t()), {}
    yield aten.bmm.default, (random(5, 7, 4), random(5, 4, 6)), {}
    for sizes in ((6,), (17, 6), (17, 1), (1, 6), ()):
        yield aten.addmm.default, (random(*sizes), random(17, 9), random(9, 6)), {"beta": 0.5, "alpha": 2}
    for sizes in ((5, 7, 6), (7, 6), (5, 1, 1)):
        yield aten.baddbmm.default, (random(*sizes), random(5, 7, 4), random(5, 4, 6)), {}
    yield aten.linear.default, (random(3, 5, 4), random(6, 4), random(6)), {}
    yield aten.linear.default, (random(4), random(6, 4)), {}


def list_norms(random: Random, make_parameter: Random | None = None) -> Iterator[Call]:
    parameter = make_parameter or random
    for shape, has_weight in (([6], True), ([5, 6], True), ([6], False)):
        some, weight = random(4, 5, 6), parameter(*shape) if has_weight else None
        args = (some, shape, weight, weight, 1e-5)
        yield aten.native_layer_norm.default, args, {}
        _, mean, rstd = aten.native_layer_norm.default(*args)
        mask = [True, has_weight, has_weight]
        args = (random(4, 5, 6), some, shape, mean, rstd, weight, weight, mask)
        yield aten.native_layer_norm_backward.default, args, {}
    some, weight, bias = random(4, 6, 5, 3), parameter(6), parameter(6)
    for training in (True, False):
        statistics = (parameter(6), parameter(6).abs() + 1)
        args = (some, weight, bias, *statistics, training, 0.1, 1e-5)
        yield aten.native_batch_norm.default, args, {}
        yield aten._native_batch_norm_legit.default, (some, weight, bias, *statistics, training, 0.1, 1e-5), {}
        _, mean, invstd = aten.native_batch_norm.default(some, weight, bias, *_clone(statistics), training, 0.1, 1e-5)
        args = (random(4, 6, 5, 3), some, weight, *statistics, mean, invstd, training, 1e-5, [True, True, True])
        yield aten.native_batch_norm_backward.default, args, {}
    yield aten._native_batch_norm_legit.no_stats, (some, weight, bias, True, 0.1, 1e-5), {}
    some, weight, bias = some.clone(), weight.clone(), bias.clone()  # these kernels allow no gaps between elements
    args = (some, weight, bias, 4, 6, 15, 3, 1e-5)
    yield aten.native_group_norm.default, args, {}
    _, mean, rstd = aten.native_group_norm.default(some.contiguous(), *args[1:])
    for mask in ([True, True, True], [True, False, False]):
        args = (random(4, 6, 5, 3).clone(), some, mean, rstd, weight, 4, 6, 15, 3, mask)
        yield aten.native_group_norm_backward.default, args, {}


def list_norms_under_autocast(random: Random) -> Iterator[Call]:
    """Parameters and running statistics have full precision."""
    return list_norms(random, lambda *sizes: random(*sizes).float())


def list_attentions(random: Random) -> Iterator[Call]:
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    for is_causal, mask in ((True, None), (False, None), (False, (3, 1, 7, 7)), (False, (7, 7))):
        query, key, value = (random(3, 7, 4, 8).contiguous().transpose(1, 2) for _ in range(3))
        named = {"attn_mask": None if mask is None else random(*mask).contiguous()}
        yield flash.default, (query, key, value, 0.0, is_causal), named
        out, logsumexp = flash.default(query, key, value, 0.0, is_causal, **named)
        args = (random(3, 4, 7, 8).contiguous(), query, key, value, out, logsumexp, 0.0, is_causal)
        yield aten._scaled_dot_product_flash_attention_for_cpu_backward.default, args, named


def list_losses(random: Random) -> Iterator[Call]:
    for dim in (0, 1, -1):
        for name in ("_softmax", "_log_softmax"):
            yield aten._safe_softmax.default, (random(4, 5, 6), dim), {}
            some, forward = random(4, 5, 6), getattr(aten, name).default
            yield forward, (some, dim, False), {}
            args = (random(4, 5, 6), forward(some, dim, False), dim, some.dtype)
            yield getattr(aten, f"{name}_backward_data").default, args, {}
    for name, sizes in (("nll_loss", (7, 5)), ("nll_loss2d", (4, 5, 3, 2))):
        some, target = random(*sizes), torch.randint(0, 5, (sizes[0], *sizes[2:]))
        target[0] = -100
        for reduction, weight in ((0, None), (1, random(5).abs()), (2, random(5).abs())):
            forward = getattr(aten, f"{name}_forward").default
            yield forward, (some, target, weight, reduction, -100), {}
            loss, total = forward(some, target, weight, reduction, -100)
            args = (random(*loss.shape), some, target, weight, reduction, -100, total)
            yield getattr(aten, f"{name}_backward").default, args, {}


def list_others(random: Random) -> Iterator[Call]:
    indices = torch.randint(0, 9, (6, 4))
    yield aten.embedding.default, (random(9, 5), indices), {}
    for by_frequency in (False, True):
        yield aten.embedding_dense_backward.default, (random(6, 4, 5), indices, 9, 2, by_frequency), {}
    yield aten.cat.default, ([random(4, 2, 3), random(4, 5, 3)], 1), {}
    yield aten.cat.default, ([random(4, 2, 3), random(1, 2, 3)],), {}
    yield aten.cat.default, ([random(0), random(4, 2, 3)], -1), {}
    yield aten.stack.default, ([random(4, 2, 3), random(4, 2, 3)],), {}
    yield aten.stack.default, ([random(4, 3), random(4, 3), random(4, 3)], -1), {}
    yield aten.sum.default, (random(4, 5, 6),), {}
    yield aten.slice_backward.default, (random(4, 2, 3), [4, 9, 3], 1, 1, 5, 2), {}
    yield aten.select_backward.default, (random(4, 3), [4, 9, 3], 1, 5), {}
    for keepdim in (False, True):
        for dim in ([0], [-1, 1]):
            for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default):
                yield op, (random(4, 5, 6), dim, keepdim), {}
            yield aten.logsumexp.default, (random(4, 5, 6), dim, keepdim), {}
            yield aten.linalg_vector_norm.default, (random(4, 5, 6), 2, dim, keepdim), {}
            for op in (aten.var_mean.correction, aten.var.correction, aten.std.correction):
                yield op, (random(4, 5, 6), dim), {"keepdim": keepdim, "correction": 1}
        for op in (aten.max.dim, aten.min.dim, aten.argmax.default):
            yield op, (random(4, 5, 6), 1, keepdim), {}
    yield aten.constant_pad_nd.default, (random(4, 5, 6), [1, 2, 0, 0], 0.5), {}


def list_interpolations(random: Random) -> Iterator[Call]:
    for name, spatial in KINDS.items():
        has_corners = "linear" in name or "cubic" in name
        sizes, wanted, corners = [3, 4, 5, 4, 3][: 2 + spatial], [7, 6, 4][:spatial], [True] if has_corners else []
        some = random(*sizes)
        packet = getattr(aten, name)
        yield packet.default, (some, wanted, *corners), {}
        if "vec" in packet.overloads():
            yield packet.vec, (some, wanted, *corners, None), {}
        yield getattr(aten, f"{name}_backward").default, (random(3, 4, *wanted), wanted, sizes, *corners), {}
    for name, spatial in PADDING.items():
        some, pad = random(*[3, 4, 5, 6][: 2 + spatial]), [1, 2, 2, 1][: 2 * spatial]
        wide = getattr(aten, name).default(some, pad)
        yield getattr(aten, name).default, (some, pad), {}
        yield getattr(aten, f"{name}_backward").default, (random(*wide.shape), some, pad), {}


def list_pointwise(random: Random) -> Iterator[Call]:
    """Yield calls of all pointwise ops, with arguments made up from their schemas: the second tensor is broadcast."""
    from elbowroom.slicing.rules.pointwise import RULES

    for name in RULES:
        _, packet, overload = name.split(".")
        op = getattr(getattr(aten, packet), overload)
        tensors = 0
        args, kwargs = [], {}
        for each in op._schema.arguments:
            kind = str(each.type)
            if kind == "Tensor" or (kind == "Optional[Tensor]" and "clamp" in name):
                is_broadcast = tensors == 1 and "backward" not in name and "native" not in name
                is_scalar = each.name == "value" and packet.startswith(("fill", "masked_fill"))
                value: Any = random(*(() if is_scalar else (6, 1) if is_broadcast else (6, 5)))
                if each.name in ("condition", "mask"):
                    value = value > 0
                elif packet.startswith("bitwise"):
                    value = (value * 10).int()
                tensors += 1
            elif kind == "List[Tensor]":
                value = [random(*((6, 1) if tensors == 1 else (6, 5)))]
                tensors += 1
            elif kind == "List[number]":
                value = [0.5]
            elif each.has_default_value() or kind.startswith("Optional"):
                value = each.default_value
            else:
                value = {"bool": False, "str": "none"}.get(kind, 2 if packet.startswith("bitwise") else 0.5)
            if each.kwarg_only:
                kwargs[each.name] = value
            else:
                args.append(value)
        yield op, tuple(args), kwargs


def list_optimizers(random: Random) -> Iterator[Call]:
    """Yield fused steps of one parameter."""
    for sizes in ((70, 33), (7,), (6, 4, 32)):
        param, grad, average, square, largest = (random(*sizes) for _ in range(5))
        state = ([param], [grad], [average], [square.square()])
        numbers: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-6, "maximize": False}
        step = [torch.tensor(3.0)]
        scaling = {"grad_scale": torch.tensor(3.0), "found_inf": torch.tensor(0.0)}
        for op in (aten._fused_adam_, aten._fused_adamw_):
            yield op.default, (*state, [], step), {**numbers, "lr": 0.01, "amsgrad": False}
            yield op.default, (*state, [largest.square()], step), {**numbers, "lr": 0.01, "amsgrad": True, **scaling}
            yield op.tensor_lr, (*state, [], step), {**numbers, "lr": torch.tensor(0.01), "amsgrad": False}
        numbers = {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.1, "nesterov": True, "maximize": False}
        sgd = aten._fused_sgd_
        if param.element_size() > 2:  # with 16 bits, PyTorch's kernel gives other momenta at each call (2.13)
            yield sgd.default, ([param], [grad], [average]), {**numbers, "lr": 0.01, "is_first_step": False, **scaling}
        yield sgd.default, ([param], [grad], [average]), {**numbers, "lr": 0.01, "is_first_step": True}
        numbers |= {"momentum": 0.0, "nesterov": False, "lr": torch.tensor(0.01), "is_first_step": False}
        yield sgd.tensor_lr, ([param], [grad], []), numbers


GROUPS = {
    "convolutions": list_convolutions,
    "pools": list_pools,
    "products": list_products,
    "norms": list_norms,
    "attentions": list_attentions,
    "losses": list_losses,
    "interpolations": list_interpolations,
    "pointwise": list_pointwise,
    "optimizers": list_optimizers,
    "others": list_others,
}


def _clone(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [each.clone() for each in tensors]


MIXED_GROUPS = {"norms under autocast": list_norms_under_autocast}
"""Groups for inputs of less precision than float32."""

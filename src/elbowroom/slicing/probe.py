"""Probe: whether an op in slices gives the same bits as the whole op on this machine."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from elbowroom.ir.slicing import Loop, SlicePass
from elbowroom.slicing.bounds import (
    Bounds,
    Parts,
    count_parts,
    iterate_slices,
    narrow_read,
    narrow_result,
)
from elbowroom.slicing.calls import adapt, describe_results, run_pass
from elbowroom.slicing.exactness_store import Exactness, ExactnessStore, describe_pass
from elbowroom.slicing.op_call import OpCall, bind, find_target
from elbowroom.slicing.random_data import Values, fill_reads, make_statistics
from elbowroom.slicing.registry import check_passes, list_rules
from elbowroom.slicing.rule import Alternatives

SMALL = 1 << 16
"""Elements up to which an op is probed with several draws, since few sums could agree by chance."""


def is_exact(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    passes: Sequence[SlicePass],
    parts: Parts,
    *,
    limit_bytes: float = math.inf,
) -> bool:
    """Tell whether slices give the bits of the whole op (see `probe_passes`)."""
    return probe_passes(op, args, kwargs, passes, parts, limit_bytes=limit_bytes).is_exact


def find_exact(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    alternatives: Alternatives,
    parts: Parts,
    *,
    store: ExactnessStore | None = None,
    limit_bytes: float = math.inf,
) -> tuple[tuple[SlicePass, ...], Exactness] | None:
    """Return the first of several ways to cut an op that gives the bits of the whole op, or None.

    Ways that sum over slices are left out: they change the order of a sum.
    """
    for passes in alternatives:
        if any(each.sums for each in passes):
            continue
        answer = probe_passes(op, args, kwargs, passes, parts, store=store, limit_bytes=limit_bytes)
        if answer.is_exact:
            return passes, answer
    return None


def probe_passes(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    passes: Sequence[SlicePass],
    parts: Parts,
    *,
    store: ExactnessStore | None = None,
    limit_bytes: float = math.inf,
) -> Exactness:
    """Run an op whole and in slices on random tensors, and compare the bits of the results.

    Args:
        args: the op's arguments. Only shapes, strides and dtypes of its tensors are used, so they may be fake.
        store: answers known so far; new ones are added, except TOO_LARGE, which depends on the limit. Default: none
            are kept.
        limit_bytes: bytes that the probe's tensors may take, without the workspace of kernels. If the whole op does not
            fit, fewer slices of the same sizes are compared with an op that is as much smaller.

    Returns:
        the weakest answer of all passes.

    Raises:
        ValueError: the passes are not one of the ways to cut the op.
    """
    check_passes(op, args, kwargs, passes)
    call = bind(op, args, kwargs)
    answers = []
    for slice_pass in passes:
        counts = count_parts(parts, slice_pass)
        key = describe_pass(call, slice_pass, counts)
        answer = store.find(key) if store else None
        if answer is None:
            with torch.no_grad(), torch._C._DisableAutocast():
                answer = _probe_pass(call, slice_pass, counts, limit_bytes)
            if store and answer is not Exactness.TOO_LARGE:
                store.add(key, answer)
        answers.append(answer)
        if not answer.is_exact:
            break
    return max(answers, key=list(Exactness).index)


def _probe_pass(call: OpCall, slice_pass: SlicePass, counts: tuple[int, ...], limit_bytes: float) -> Exactness:
    device = call.reads[0].device
    ranges = [_list_ranges(loop, parts) for loop, parts in zip(slice_pass.loops, counts, strict=True)]
    for shift in itertools.count():
        kept = [each[: max(2, len(each) >> shift)] for each in ranges]
        described, part = _shrink(call, slice_pass, kept)
        slices = list(itertools.product(*kept))
        results = describe_results(described, device)
        if _count_bytes(described, part, slices, results) <= limit_bytes:
            proven = Exactness.PROVEN if kept == ranges else Exactness.PROVEN_ON_SMALLER_BATCH
            is_same = _compare(described, part, slices, [each.stride() for each in results], device)
            return proven if is_same else Exactness.INEXACT
        if all(len(each) <= 2 for each in kept):
            break
    return Exactness.TOO_LARGE


def _list_ranges(loop: Loop, parts: int) -> list[tuple[int, int]]:
    alone = SlicePass(loops=(loop,), reads=(), results=())
    return [bounds[0] for bounds in iterate_slices(alone, (parts,))]


def _shrink(call: OpCall, slice_pass: SlicePass, kept: list[list[tuple[int, int]]]) -> tuple[OpCall, SlicePass]:
    """Return the op on the kept slices alone, with tensors on the device "meta", and the pass that cuts it."""
    bounds = tuple((0, ranges[-1][1]) for ranges in kept)
    values = {**call.values, **{name: _describe(call[name]) for name in call.statistics}}
    described = dataclasses.replace(call, values=values)
    tensors = [_describe(each) for each in call.reads]
    if bounds != tuple((0, loop.length) for loop in slice_pass.loops):
        views = [narrow_read(each, index, slice_pass, bounds) for index, each in enumerate(tensors)]
        tensors = [torch.empty_like(each, memory_format=torch.preserve_format) for each in views]
    args, kwargs = call.order(adapt(described, slice_pass, bounds, tensors))
    loops = tuple(
        dataclasses.replace(loop, length=end) for loop, (_, end) in zip(slice_pass.loops, bounds, strict=True)
    )
    return bind(call.op, args, kwargs), dataclasses.replace(slice_pass, loops=loops)


def _describe(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _count_bytes(call: OpCall, slice_pass: SlicePass, slices: Sequence[Bounds], results: Sequence[torch.Tensor]) -> int:
    """Return the bytes that a comparison holds at most: arguments and results, and those of one slice."""
    largest = max(slices, key=lambda bounds: [end - begin for begin, end in bounds])
    tensors = [*call.reads, *results]
    tensors += [narrow_read(call.reads[index], index, slice_pass, largest) for index in slice_pass.reads]
    tensors += [narrow_result(results[index], index, slice_pass, largest) for index in slice_pass.results]
    target = find_target(call)
    if target is not None:
        tensors.append(call.reads[target])
    return sum(each.numel() * each.element_size() for each in tensors)


def _compare(
    call: OpCall,
    slice_pass: SlicePass,
    slices: Sequence[Bounds],
    strides: Sequence[tuple[int, ...]],
    device: torch.device,
) -> bool:
    """Tell whether all results of a pass have the bits of the whole op, for several draws of random arguments.

    Args:
        strides: expected of the results. Later ops might choose other kernels for tensors with other strides.
    """
    generator = torch.Generator(device).manual_seed(0)
    is_small = sum(each.numel() for each in call.reads) <= SMALL
    for values in (*([Values.NORMAL] * (4 if is_small else 1)), Values.EXTREME):
        reads = fill_reads(call, list_rules()[str(call.op)], values, generator, device)
        if not _compare_once(call, slice_pass, slices, strides, reads):
            return False
        del reads  # before the next draw
    return True


def _compare_once(
    call: OpCall,
    slice_pass: SlicePass,
    slices: Sequence[Bounds],
    strides: Sequence[tuple[int, ...]],
    reads: Sequence[torch.Tensor],
) -> bool:
    device = reads[0].device
    expected_statistics, statistics = make_statistics(call, device), make_statistics(call, device)
    args, kwargs = call.order(call.replace_reads(reads, statistics))
    target = find_target(call)
    given = [each.clone() if index == target else each for index, each in enumerate(reads)]
    whole = call.run(call.replace_reads(given, expected_statistics))
    expected = [whole[position] for position in call.find_mask()]
    if [each.stride() for each in expected] != strides:
        return False
    for index, bounds, tensor in run_pass(call.op, args, kwargs, slice_pass, slices):
        if not equal_bits(narrow_result(expected[index], index, slice_pass, bounds), tensor):
            return False
    return all(equal_bits(expected_statistics[name], tensor) for name, tensor in statistics.items())


def equal_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two tensors have the same shape, dtype and bits, where any two NaN are equal."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    if first.is_complex():
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    if not first.is_floating_point():
        return torch.equal(first, second)
    same = (first == second) & (first.signbit() == second.signbit())
    return bool((same | (first.isnan() & second.isnan())).all())

"""Probe: whether an op in slices gives the same bits as the whole op on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from elbowroom.errors import NO_ROOM
from elbowroom.ir.slicing import Bounds, Loop, SlicePass, iterate_slices
from elbowroom.native import library
from elbowroom.slicing.bits import equal_bits
from elbowroom.slicing.bounds import (
    Parts,
    count_parts,
    narrow_read,
    narrow_result,
)
from elbowroom.slicing.calls import adapt, describe_results, run_pass
from elbowroom.slicing.draws import draw_arguments, may_tell
from elbowroom.slicing.exactness_store import Exactness, ExactnessStore, describe_pass
from elbowroom.slicing.op_call import OpCall, bind, find_targets
from elbowroom.slicing.random_data import allocate_read, count_elements, make_statistics
from elbowroom.slicing.registry import check_passes
from elbowroom.slicing.rules import convolution, interpolation, matmul
from elbowroom.slicing.vector_ends import ACROSS, ELEMENTWISE, are_whole_vectors, ends_within_vector, find_telling

WIDE = 64
"""Least elements of a smaller op that lie beside each other along a loop and the dimensions within it. Kernels compute
several vectors of these at a time, and fewer in another way."""

NARROW = 16
"""Slices with fewer such elements, or fewer channels of a convolution's weight gradient, are compared with the
whole op only: kernels have special ways for these."""

BY_CHANNELS = frozenset(interpolation.RULES)
"""Ops whose kernels are chosen by the number of channels: more than a few, or not (8, in PyTorch 2.13)."""

BY_SIZE = frozenset((*matmul.RULES, *convolution.RULES))
"""Ops whose kernels choose the order of their sums by the number of rows or channels: small slices can agree with a
smaller op and differ from the whole one. Along the batch, convolutions only tell one image from several."""

CONVOLUTION_BACKWARD = "aten.convolution_backward.default"

LEAST_SHARE = 1 / 32
"""Least share of an op that is compared instead of the whole. Kernels also choose their ways by the size of an op."""

MOST_SLICES = 256
"""Slices that are compared of an op that computes all elements in the same way."""


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


def probe_passes(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    passes: Sequence[SlicePass],
    parts: Parts,
    *,
    store: ExactnessStore | None = None,
    limit_bytes: float = math.inf,
    folder: str | None = None,
) -> Exactness:
    """Run an op whole and in slices on random tensors, and compare the bits of the results.

    Args:
        args: the op's arguments. Only shapes, strides and dtypes of its tensors are used, so they may be fake.
        store: answers known so far; new ones are added, except TOO_LARGE, which depends on the limit. Default: none
            are kept.
        limit_bytes: bytes that the probe's tensors may take, without the workspace of kernels. If the whole op does not
            fit, fewer slices of the same sizes are compared with an op that is as much smaller, unless kernels may
            compute that in another way: it is too small, or they choose by size (`BY_SIZE`).
        folder: of temporary files that hold the tensors of the whole op then, on the CPU; None for none.

    Returns:
        the weakest answer of all passes.

    Raises:
        ValueError: the passes are not one of the ways to cut the op.
    """
    check_passes(op, args, kwargs, passes)
    found = probe_each(bind(op, args, kwargs), passes, parts, store=store, limit_bytes=limit_bytes, folder=folder)
    return max(found.values(), key=list(Exactness).index)


def probe_each(
    call: OpCall,
    passes: Sequence[SlicePass],
    parts: Parts,
    *,
    store: ExactnessStore | None = None,
    limit_bytes: float = math.inf,
    folder: str | None = None,
) -> dict[SlicePass, Exactness]:
    """Return the answer for each pass of an op (see `probe_passes`)."""
    counts = {each: count_parts(parts, each) for each in passes}
    keys = {each: describe_pass(call, each, counts[each]) for each in passes}
    known = {each: answer for each in passes if store and (answer := store.find(keys[each]))}
    if len(known) < len(counts):
        cuts = {each: _list_ranges(each, counts[each]) for each in counts if each not in known}
        with torch.no_grad(), torch._C._DisableAutocast():
            found = _probe(call, cuts, limit_bytes, folder)
        for slice_pass, answer in found.items():
            known[slice_pass] = answer
            if store and answer is not Exactness.TOO_LARGE:
                store.add(keys[slice_pass], answer)
    return known


Ranges = list[list[tuple[int, int]]]
"""For each loop of a pass, its slices."""


def _probe(
    call: OpCall, cuts: Mapping[SlicePass, Ranges], limit_bytes: float, folder: str | None
) -> dict[SlicePass, Exactness]:
    """Probe passes: those that fit together with the whole op, which runs once for all of them; then the others."""
    answers: dict[SlicePass, Exactness] = {}
    together: dict[SlicePass, Ranges] = {}
    for slice_pass, ranges in cuts.items():
        if str(call.op) in ACROSS and ends_within_vector(call, slice_pass.loops[0].reads[0], ranges[0]):
            answers[slice_pass] = Exactness.INEXACT
            continue
        described, part = _shrink(call, slice_pass, ranges)
        if _count_bytes(described, part, ranges, describe_results(described)) <= limit_bytes:
            together[slice_pass] = ranges
            whole = described
        else:
            answers[slice_pass] = _probe_smaller(call, slice_pass, ranges, limit_bytes)
            if answers[slice_pass] is Exactness.TOO_LARGE and folder is not None:
                answers[slice_pass] = _probe_in_files(described, part, ranges, call.reads[0].device, folder)
    if together:
        inexact = _find_inexact(whole, together, call.reads[0].device)
        answers.update({each: Exactness.INEXACT if each in inexact else Exactness.PROVEN for each in together})
    return answers


def _probe_in_files(
    call: OpCall, slice_pass: SlicePass, ranges: Ranges, device: torch.device, folder: str
) -> Exactness:
    """Probe a pass with the whole op, whose tensors are in temporary files; TOO_LARGE if they cannot be."""
    if device.type == "cpu" and (not find_telling(call) or _are_whole_vectors(call, slice_pass, ranges)):
        with contextlib.suppress(*NO_ROOM, RuntimeError), memory_in_files(folder):
            inexact = _find_inexact(call, {slice_pass: ranges}, device)
            return Exactness.INEXACT if inexact else Exactness.PROVEN
    return Exactness.TOO_LARGE


@contextlib.contextmanager
def memory_in_files(folder: str | None) -> Iterator[None]:
    """Have this thread's tensors of 4 KiB and more in files of a folder, uncounted; None: in memory again."""
    native = library.load()
    former = native.set_file_folder(folder or "")
    try:
        yield
    finally:
        native.set_file_folder(former)


def _probe_smaller(call: OpCall, slice_pass: SlicePass, ranges: Ranges, limit_bytes: float) -> Exactness:
    """Probe a pass with as many of its slices as fit, and the op that they make up."""
    if _depends_on_size(call, slice_pass):
        return Exactness.TOO_LARGE
    is_pointwise = str(call.op) in ELEMENTWISE
    inner = [WIDE if is_pointwise else _count_inner(call, slice_pass, loop) for loop in slice_pass.loops]
    for loop, slices, elements in zip(slice_pass.loops, ranges, inner, strict=True):
        if str(call.op) == CONVOLUTION_BACKWARD and not _is_over_batch(loop):
            elements = 1
        if elements < WIDE and len(slices) > 1 and min(end - begin for begin, end in slices) * elements < NARROW:
            return Exactness.TOO_LARGE
    if find_telling(call) and not _are_whole_vectors(call, slice_pass, ranges):
        return Exactness.TOO_LARGE
    least = [NARROW if str(call.op) in BY_CHANNELS and not _is_over_batch(loop) else 1 for loop in slice_pass.loops]
    while (kept := [_keep_half(*each) for each in zip(ranges, inner, least, strict=True)]) != ranges:
        ranges = kept
        shares = (each[-1][1] / max(1, loop.length) for each, loop in zip(ranges, slice_pass.loops, strict=True))
        if math.prod(shares) < LEAST_SHARE:
            break
        described, part = _shrink(call, slice_pass, ranges)
        if _count_bytes(described, part, ranges, describe_results(described)) <= limit_bytes:
            inexact = _find_inexact(described, {part: ranges}, call.reads[0].device)
            return Exactness.INEXACT if inexact else Exactness.PROVEN_ON_SMALLER_BATCH
    return Exactness.TOO_LARGE


def _depends_on_size(call: OpCall, slice_pass: SlicePass) -> bool:
    """Tell whether slices that agree with a smaller op may differ from the whole one."""
    is_convolution = str(call.op) in convolution.RULES
    return str(call.op) in BY_SIZE and not (is_convolution and all(map(_is_over_batch, slice_pass.loops)))


def _are_whole_vectors(call: OpCall, slice_pass: SlicePass, ranges: Ranges) -> bool:
    (loop,), (slices,) = slice_pass.loops, ranges
    unit = call.reads[0].numel() // max(1, loop.length)
    return are_whole_vectors(call, {(end - begin) * unit for begin, end in slices})


def _count_inner(call: OpCall, slice_pass: SlicePass, loop: Loop) -> int:
    """Return the elements beside each other in memory that one step of a loop takes of the largest tensors; at most
    `WIDE`."""
    results = describe_results(call)
    pairs = [(call.reads[index], loop.reads[index]) for index in slice_pass.reads]
    pairs += [(results[index], loop.writes[index]) for index in slice_pass.results]
    narrowed = [(tensor, dimension) for tensor, dimension in pairs if dimension is not None]
    most = max((tensor.numel() for tensor, _ in narrowed), default=0)
    inner = [_count_within(*each) for each in narrowed if 2 * each[0].numel() >= most]
    return min([WIDE, *inner])


def _count_within(tensor: torch.Tensor, dimension: int) -> int:
    """Return the elements within one step along a dimension: kernels often see these as one dimension with it.

    Many kernels copy their arguments to contiguous ones first, so it is the fewest in memory and in order.
    """
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    in_memory = math.prod(size for size, stride in dimensions if stride < tensor.stride(dimension))
    return max(1, min(in_memory, math.prod(tensor.shape[dimension:][1:])))


def _is_over_batch(loop: Loop) -> bool:
    """Tell whether a loop narrows tensors along their first dimension only."""
    return all(dimension in (None, 0) for dimension in (*loop.reads, *loop.writes))


def _keep_half(slices: list[tuple[int, int]], inner: int, least: int) -> list[tuple[int, int]]:
    """Return the first half of a loop's slices, at least two of them, with `WIDE` elements beside each other.

    The last is as large as the largest of all.

    Args:
        least: elements that are kept along the loop.
    """
    count = min(len(slices), max(2, len(slices) // 2))
    while count < len(slices) and (slices[count - 1][1] * inner < WIDE or slices[count - 1][1] < least):
        count += 1
    *kept, (begin, end) = slices[:count]
    largest = max(each[1] - each[0] for each in slices)
    if max(each[1] - each[0] for each in slices[:count]) < largest:
        end = begin + largest
    return [*kept, (begin, end)]


def _list_ranges(slice_pass: SlicePass, counts: Sequence[int]) -> Ranges:
    found = []
    for loop, parts in zip(slice_pass.loops, counts, strict=True):
        alone = dataclasses.replace(slice_pass, loops=(loop,))
        found.append([bounds[0] for bounds in iterate_slices(alone, (parts,))])
    return found


def _shrink(call: OpCall, slice_pass: SlicePass, kept: Ranges) -> tuple[OpCall, SlicePass]:
    """Return the op on the kept slices alone, with tensors on the device "meta", and the pass that cuts it."""
    bounds = tuple((0, ranges[-1][1]) for ranges in kept)
    values = {**call.values, **{name: _describe(call[name]) for name in call.statistics}}
    described = dataclasses.replace(call, values=values)
    tensors = [_describe(each) for each in call.reads]
    if bounds != tuple((0, loop.length) for loop in slice_pass.loops):
        views = [narrow_read(each, index, slice_pass, bounds) for index, each in enumerate(tensors)]
        tensors = [_keep_gaps(*each) for each in zip(tensors, views, strict=True)]
    args, kwargs = call.order(adapt(described, slice_pass, bounds, tensors))
    loops = tuple(
        dataclasses.replace(loop, length=end) for loop, (_, end) in zip(slice_pass.loops, bounds, strict=True)
    )
    shrunk = dataclasses.replace(bind(call.op, args, kwargs), misalignments=call.misalignments)
    return shrunk, dataclasses.replace(slice_pass, loops=loops)


def _keep_gaps(whole: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a view's shape, with the same gaps between its rows, and elements, as the whole one has."""
    strides = list(whole.stride())
    past, new_past = 1, 1  # elements of the dimensions so far, gaps included
    for dimension in sorted(range(whole.ndim), key=lambda each: (whole.stride(each), whole.shape[each])):
        gap = whole.stride(dimension) - past
        if whole.stride(dimension) == 0 or gap < 0:
            continue  # elements overlap, as those of an expanded tensor
        strides[dimension] = new_past + gap
        past, new_past = whole.stride(dimension) * whole.shape[dimension], strides[dimension] * view.shape[dimension]
    return torch.empty_strided(view.shape, strides, dtype=whole.dtype, device="meta")


def _describe(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _count_bytes(call: OpCall, slice_pass: SlicePass, ranges: Ranges, results: Sequence[torch.Tensor]) -> int:
    """Return the bytes that a comparison holds at most: arguments and results, and those of one slice."""
    largest = tuple(max(each, key=lambda bounds: bounds[1] - bounds[0]) for each in ranges)
    tensors = list(results)
    tensors += [narrow_read(call.reads[index], index, slice_pass, largest) for index in slice_pass.reads]
    tensors += [narrow_result(results[index], index, slice_pass, largest) for index in slice_pass.results]
    tensors += [call.reads[index] for index in find_targets(call)]  # their clones
    return sum(count_elements(each) * each.element_size() for each in call.reads) + sum(
        each.numel() * each.element_size() for each in tensors
    )


def _find_inexact(call: OpCall, cuts: Mapping[SlicePass, Ranges], device: torch.device) -> set[SlicePass]:
    """Return the passes whose results differ from the whole op's for any of several draws of random arguments.

    All differ if the op's results have other strides or dtypes than described: later ops might choose other kernels for
    them. All count as different if too few numbers can be compared.
    """
    results = describe_results(call, device)
    layouts = [(each.dtype, each.stride()) for each in results]
    compared = [results[index] for index in sorted({index for each in cuts for index in each.results})]
    if not may_tell(call, compared):
        return set(cuts)
    inexact: set[SlicePass] = set()
    for reads in draw_arguments(call, compared, device):
        left = {each: ranges for each, ranges in cuts.items() if each not in inexact}
        if not left:
            break
        inexact |= _compare(call, left, layouts, reads)
        del reads  # before the next draw
    return inexact


def _compare(
    call: OpCall,
    cuts: Mapping[SlicePass, Ranges],
    layouts: Sequence[tuple[torch.dtype, tuple[int, ...]]],
    reads: Sequence[torch.Tensor],
) -> set[SlicePass]:
    targets = find_targets(call)
    given = [
        allocate_read(call, index, each.device).copy_(each) if index in targets else each
        for index, each in enumerate(reads)
    ]
    statistics = make_statistics(call, reads[0].device)
    whole = call.run(call.replace_reads(given, statistics))
    expected = [whole[position] for position in call.find_mask()]
    if [(each.dtype, each.stride()) for each in expected] != layouts:
        return set(cuts)
    with memory_in_files(None):  # a slice has room in memory
        return {each for each, ranges in cuts.items() if not _is_same(call, each, ranges, reads, expected, statistics)}


def _is_same(
    call: OpCall,
    slice_pass: SlicePass,
    ranges: Ranges,
    reads: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    expected_statistics: Mapping[str, torch.Tensor],
) -> bool:
    statistics = make_statistics(call, reads[0].device)
    args, kwargs = call.order(call.replace_reads(reads, statistics))
    slices = list(itertools.product(*ranges))
    if str(call.op) in ELEMENTWISE and find_telling(call) is None:
        slices = _choose_some(slices, MOST_SLICES)
    for index, bounds, tensor in run_pass(call.op, args, kwargs, slice_pass, slices):
        if not equal_bits(narrow_result(expected[index], index, slice_pass, bounds), tensor):
            return False
    return all(equal_bits(expected_statistics[name], tensor) for name, tensor in statistics.items())


def _choose_some(slices: list[Bounds], most: int) -> list[Bounds]:
    """Return at most so many slices: the first and the last, and others at equal distances."""
    if len(slices) <= most:
        return slices
    return [slices[index * (len(slices) - 1) // (most - 1)] for index in range(most)]

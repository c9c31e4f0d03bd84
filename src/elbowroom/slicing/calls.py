"""Calls of an op's kernel on slices of its tensors.

A caller that keeps the tensors elsewhere runs a pass as follows: for each slice of `iterate_slices`, fetch the views
that `narrow_read` describes, call `run_slice`, and store each result where `narrow_result` describes; a result that
`is_summed` is added to the sum of the slices before. `run_whole` does this with tensors in memory. If the pass is
partial, the tensors of all slices are kept instead, and `combine_slices` returns the results.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from elbowroom.errors import NO_ROOM
from elbowroom.ir.slicing import Bounds, SlicePass, iterate_slices
from elbowroom.slicing.bounds import (
    Parts,
    check_bounds,
    count_parts,
    find_packed_strides,
    is_summed,
    narrow,
    narrow_read,
    narrow_result,
    pack,
)
from elbowroom.slicing.op_call import OpCall, bind, find_targets
from elbowroom.slicing.registry import check_passes, list_rules
from elbowroom.slicing.rule import PartialRule


def _is_fault(record: logging.LogRecord) -> bool:
    """Tell whether a record of PyTorch's does not report memory that was refused."""
    return not (record.exc_info and isinstance(record.exc_info[1], NO_ROOM))


logging.getLogger(FakeTensorMode.__module__).addFilter(_is_fault)  # else a refusal is logged with a traceback


def run_slice(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    slice_pass: SlicePass,
    bounds: Bounds,
    reads: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Compute one slice of a pass.

    Args:
        args: the whole op's arguments. Of its tensors only shapes, strides and dtypes are used, so their memory may be
            elsewhere; running statistics, which the op updates, must be there.
        reads: the slice's tensors, one for each of `slice_pass.reads`: narrowed ones without gaps in memory (see
            `pack`), others as they are. An in-place op writes to the slice of its argument. For each tensor of which
            the pass needs the shape only, memory for one slice is allocated.

    Returns:
        the slice's results, one for each of `slice_pass.results`; of a partial pass, what `combine_slices` needs.

    Raises:
        ValueError: the slice is not one of the pass, or a tensor has another shape than the slice's.
    """
    call = bind(op, args, kwargs)
    check_bounds(slice_pass, bounds)
    if any(begin == end for begin, end in bounds):
        return _make_empty(call, slice_pass, bounds)
    given = dict(zip(slice_pass.reads, reads, strict=True))
    tensors = []
    for index, whole in enumerate(call.reads):
        view = narrow_read(whole, index, slice_pass, bounds)
        tensor = given.get(index)
        if tensor is None:
            tensor = _make_unread(view)
        elif tensor.shape != view.shape:
            raise ValueError(
                f"{op} reads {tuple(view.shape)} of its tensor {index} in this slice, not {tuple(tensor.shape)}"
            )
        tensors.append(tensor)
    values = adapt(call, slice_pass, bounds, tensors)
    if slice_pass.is_partial:
        return _find_partial_rule(op).run(values)
    mask = call.find_mask()
    if "output_mask" in values:
        wanted = {mask[index] for index in slice_pass.results}
        values["output_mask"] = [position in wanted for position in range(len(values["output_mask"]))]
    results = call.run(values)
    return tuple(results[mask[index]] for index in slice_pass.results)


def combine_slices(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], slices: Sequence[tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, ...]:
    """Return the results of a partial pass, given what `run_slice` returned for all slices, in order."""
    return _find_partial_rule(op).combine(bind(op, args, kwargs), slices)


def _find_partial_rule(op: OpOverload) -> PartialRule:
    partial = list_rules()[str(op)].partial
    if partial is None:
        raise ValueError(f"{op} has no partial passes")
    return partial


def adapt(call: OpCall, slice_pass: SlicePass, bounds: Bounds, reads: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the arguments of a call on a slice, by name; it still computes all results.

    Args:
        reads: the slice's tensors, one for each of the op's.
    """
    values = call.replace_reads(reads, _narrow_statistics(call, slice_pass, bounds))
    rule = list_rules()[str(call.op)]
    if rule.adapt is not None:
        values.update(rule.adapt(call, values))
    return values


def _make_unread(view: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a view's shape; no op sees the view, whose memory may be elsewhere."""
    return torch.empty_strided(view.shape, find_packed_strides(view), dtype=view.dtype, device=view.device)


def _narrow_statistics(call: OpCall, slice_pass: SlicePass, bounds: Bounds) -> dict[str, torch.Tensor]:
    """Return the slices of running statistics: one element for each channel, the loop's dimension."""
    dimensions = [0] * len(slice_pass.loops)
    return {name: narrow(call[name], dimensions, slice_pass.loops, bounds) for name in call.statistics}


def _make_empty(call: OpCall, slice_pass: SlicePass, bounds: Bounds) -> tuple[torch.Tensor, ...]:
    if slice_pass.is_partial:
        raise ValueError(f"{call.op} has no results of an empty slice")
    results = describe_results(call)
    device = call.reads[0].device
    views = (narrow_result(results[index], index, slice_pass, bounds) for index in slice_pass.results)
    return tuple(torch.zeros(view.shape, dtype=view.dtype, device=device) for view in views)


def run_whole(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    passes: Sequence[SlicePass],
    parts: Parts,
) -> tuple[torch.Tensor, ...]:
    """Compute an op in slices, with all tensors in memory.

    Returns:
        the op's results in order, without those that its output mask leaves out.

    Raises:
        ValueError: the passes are not one of the ways to cut the op (see `find_passes`).
    """
    check_passes(op, args, kwargs, passes)
    call = bind(op, args, kwargs)
    targets = find_targets(call)
    results = [_allocate(each, call.reads[0].device) for each in describe_results(call)]
    if targets:
        results = [call.reads[index] for index in targets]
    for slice_pass in passes:
        slices = iterate_slices(slice_pass, count_parts(parts, slice_pass))
        for index, bounds, tensor in run_pass(op, args, kwargs, slice_pass, slices):
            narrow_result(results[index], index, slice_pass, bounds).copy_(tensor)
    return tuple(results)


def run_pass(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    slice_pass: SlicePass,
    slices: Iterable[Bounds],
) -> Iterator[tuple[int, Bounds, torch.Tensor]]:
    """Compute a pass from tensors in memory.

    Yields:
        a result's index, a slice, and the slice's part of the result: for each slice, or where slices are summed or
        combined, for the last of them.
    """
    call = bind(op, args, kwargs)
    targets = find_targets(call)
    sums: dict[int, torch.Tensor] = {}
    partial: list[tuple[torch.Tensor, ...]] = []
    for bounds in slices:
        reads = [
            _read(call.reads[index], index, slice_pass, bounds, is_written=index in targets)
            for index in slice_pass.reads
        ]
        found = run_slice(op, args, kwargs, slice_pass, bounds, reads)
        del reads
        is_last = not bounds or bounds[-1][1] == slice_pass.loops[-1].length
        if slice_pass.is_partial:
            partial.append(found)
            found = combine_slices(op, args, kwargs, partial) if is_last else ()
        for index, tensor in zip(slice_pass.results if found else (), found, strict=True):
            if not is_summed(index, slice_pass):
                yield index, bounds, tensor
                continue
            if index in sums:
                sums[index].add_(tensor)
            else:
                sums[index] = tensor
            if is_last:
                yield index, bounds, sums.pop(index)


def _read(whole: torch.Tensor, index: int, slice_pass: SlicePass, bounds: Bounds, *, is_written: bool) -> torch.Tensor:
    is_narrowed = any(loop.reads[index] is not None for loop in slice_pass.loops)
    view = narrow_read(whole, index, slice_pass, bounds)
    return pack(view) if is_narrowed or is_written else view


def make_results(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """Describe an op's results before they exist, by tensors on the device "meta".

    Returns:
        the results in order, without those that its output mask leaves out: their shapes, strides and dtypes. For an
        in-place op, its argument's.
    """
    return describe_results(bind(op, args, kwargs))


def describe_results(call: OpCall, device: torch.device | None = None) -> tuple[torch.Tensor, ...]:
    """Return a call's results as in `make_results`.

    Args:
        device: of the call's tensors, if they are described by tensors on the device "meta".
    """
    if targets := find_targets(call):
        return tuple(_allocate(call.reads[index], "meta") for index in targets)
    with _faking():
        reads = [_allocate(each, device or each.device) for each in call.reads]
        statistics = {name: _allocate(call[name], device or call[name].device) for name in call.statistics}
        results = call.run(call.replace_reads(reads, statistics))
    find_dtypes = list_rules()[str(call.op)].dtypes
    dtypes = {} if find_dtypes is None else find_dtypes(call)
    return tuple(_allocate(results[position], "meta", dtypes.get(position)) for position in call.find_mask())


@contextlib.contextmanager
def _faking() -> Iterator[None]:
    """Return a context of a `FakeTensorMode`, which does not stay on if a signal's exception comes as it is entered."""
    key = torch._C._TorchDispatchModeKey.FAKE
    before = torch._C._get_dispatch_mode(key)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        if torch._C._get_dispatch_mode(key) is not before:
            torch._C._unset_dispatch_mode(key)
            if before is not None:
                torch._C._set_dispatch_mode(before)


def _allocate(tensor: torch.Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=device)

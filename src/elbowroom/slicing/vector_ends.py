"""Ends of loops over vectors: where a pointwise kernel computes single elements in another way.

PyTorch's pointwise kernels for CPUs compute vectors, and what remains at the end of a loop element by element, with
other functions: a few percent of the elements of `sigmoid` then have other bits. A loop ends at gaps in memory, and
where the work is divided among threads, so it is the sizes of slices that decide which elements are computed so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from elbowroom.slicing.bits import find_differing
from elbowroom.slicing.numbers import describe_numbers
from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.random_data import Values, allocate_read, count_elements, fill
from elbowroom.slicing.rule import VECTOR_BYTES
from elbowroom.slicing.rules import pointwise, softmax

SAMPLES = 1 << 13
"""Arguments that are tried, for each distribution; `ROUNDED` times as many of 16 bits, which hide most differences."""

ROUNDED = 16

GRAIN = 32768
"""Elements below which PyTorch gives no work to another thread (`at::internal::GRAIN_SIZE`)."""

ELEMENTWISE = frozenset(pointwise.RULES)
"""Ops that compute each element by itself."""

ACROSS = frozenset(softmax.RULES)
"""Ops that compute vectors across rows if they reduce another dimension than the last."""

_found: dict[str, list[torch.Tensor] | None] = {}


def find_telling(call: OpCall) -> list[torch.Tensor] | None:
    """Return arguments of a pointwise op to which its two ways to compute an element give different bits.

    Returns:
        for each of `call.reads`, a tensor of one dimension: as many elements as are known, or one if the argument is
        broadcast. None if there is no difference, as in other ops and on other devices: if one way to cut a pointwise
        op is exact, all are.
    """
    if str(call.op) not in ELEMENTWISE or call.reads[0].device.type not in ("cpu", "meta"):
        return None
    whole = torch.broadcast_shapes(*(each.shape for each in call.reads))
    varies = [each.shape == whole for each in call.reads]
    numbers = {name: describe_numbers(call, value) for name, value in call.values.items() if name not in call.names}
    key = repr((str(call.op), [str(each.dtype) for each in call.reads], varies, numbers))
    if key not in _found:
        with torch.no_grad(), torch._C._DisableAutocast():
            _found[key] = _search(call, varies)
    return _found[key]


def _search(call: OpCall, varies: Sequence[bool]) -> list[torch.Tensor] | None:
    generator = torch.Generator().manual_seed(0)
    count = SAMPLES * (ROUNDED if min(each.element_size() for each in call.reads) == 2 else 1)
    kept = []
    for values in (Values.NORMAL, Values.WIDE, Values.EXTREME):
        samples = []
        for each, does_vary in zip(call.reads, varies, strict=True):
            made = torch.empty(count if does_vary else 1, dtype=each.dtype, device="cpu")
            fill(made, 2, values, generator)
            samples.append(made.expand(count))
        if not _takes(call, samples):
            return None
        vectors = _run(call, [each.clone(memory_format=torch.contiguous_format) for each in samples])
        singles = _run(call, [torch.stack([each, each], 1)[:, 0] for each in samples])  # gaps: single elements
        differs = find_differing(vectors, singles)
        kept.append([each[differs] for each in samples])
        if differs.any() and not all(varies):
            break  # what is broadcast has one value
    found = [torch.cat(each) for each in zip(*kept, strict=True)]
    if not len(found[0]):
        return None
    return [each if does_vary else each[:1] for each, does_vary in zip(found, varies, strict=True)]


def _takes(call: OpCall, samples: Sequence[torch.Tensor]) -> bool:
    """Tell whether an op takes tensors of one dimension. One that asks for channels_last does not; it only copies.

    Without memory: an op that had none has not refused them.
    """
    try:
        _run(call, [each.to("meta") for each in samples])
    except RuntimeError:
        return False
    return True


def _run(call: OpCall, reads: Sequence[torch.Tensor]) -> torch.Tensor:
    (found,) = call.run(call.replace_reads(reads, {}))
    return found  # type: ignore[no-any-return]


def fill_telling(call: OpCall, telling: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return tensors in place of a pointwise call's `reads` that are filled with what `find_telling` returned."""
    made = []
    for index, (tensor, values) in enumerate(zip(call.reads, telling, strict=True)):
        read = allocate_read(call, index, device)
        count = max(1, math.ceil(tensor.numel() / len(values)))
        read.copy_(values.repeat(count)[: tensor.numel()].view(tensor.shape))
        made.append(read)
    return made


def are_whole_vectors(call: OpCall, sizes: Iterable[int]) -> bool:
    """Tell whether no loop ends within a vector, in the whole op or in slices of so many elements."""
    first = call.reads[0]
    if count_elements(first) != first.numel():
        return False
    if any((each.shape, each.stride()) != (first.shape, first.stride()) for each in call.reads):
        return False
    step = VECTOR_BYTES // min(each.element_size() for each in call.reads)
    return all(_is_whole(each, step) for each in (first.numel(), *sizes))


def ends_within_vector(call: OpCall, dimension: int | None, slices: Iterable[tuple[int, int]]) -> bool:
    """Tell whether slices along a dimension of an op in `ACROSS` end within a vector, or the whole op does.

    Few elements then have other bits, for few values: a probe would miss them.
    """
    first = call.reads[0]
    reduced = call["dim"] % max(first.ndim, 1)
    if dimension is None or dimension < reduced or first.device.type != "cpu":
        return False
    inner = math.prod(first.shape[reduced + 1 :])
    step = VECTOR_BYTES // min(each.element_size() for each in call.reads)
    lengths = {inner, *(inner // max(1, first.shape[dimension]) * (end - begin) for begin, end in slices)}
    return len(lengths) > 1 and any(each % step for each in lengths)


def _is_whole(elements: int, step: int) -> bool:
    threads = min(torch.get_num_threads(), math.ceil(elements / GRAIN))
    return not elements or not (elements % step or math.ceil(elements / threads) % step)

"""One rank with NCCL trains in rooms as without: the same bits, within its budget."""

from __future__ import annotations

import pathlib

import pytest
import torch
import torch.distributed as dist

from tests.gpu.nccl_jobs import SHARES
from tests.gpu.test_room_gpu import make_machine
from tests.rank_jobs import run_ranks

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not dist.is_available() or not dist.is_nccl_available(),
    reason="needs a CUDA device and NCCL",
)

PAGE_BYTES = 20 << 20
"""Of the allocator: ops whose sizes are new may take so much more than the budget (docs/limits.md)."""

NEW_SIZES = ("experts", "sharded experts")
"""Jobs whose ops have other sizes in every step."""

SUPPORTS_TENSOR_PARALLELISM = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)

NAMES = (
    "transformer", "transformer, buckets hold the gradients", "convolutions", "experts", "accumulation",
    "sharded transformer", "sharded transformer in bfloat16", "sharded convolutions", "sharded experts",
    "sharded accumulation", "tensor parallel",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_with_nccl_trains_to_the_same_bits_within_its_budgets(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if name == "tensor parallel" and not SUPPORTS_TENSOR_PARALLELISM:
        pytest.skip("these versions of PyTorch do not follow plans of tensor parallelism")
    (end,) = run_ranks(tmp_path, "gpu.nccl_jobs.train_case", name, make_machine(), ranks=1, backend="nccl")
    assert end.code == 0, end.text[:3000]
    plain = end.result[0.0]
    for share in SHARES:
        managed = end.result[share]
        assert plain.tensors.keys() == managed.tensors.keys()
        assert [what for what in plain.tensors if not torch.equal(plain.tensors[what], managed.tensors[what])] == []
        assert managed.moved > 0 and ({"planned", "plain"} & {*managed.modes} or name in NEW_SIZES), managed.modes
        most_bytes = managed.budget + PAGE_BYTES * (name in NEW_SIZES)
        assert max(*managed.peaks, managed.outside_peak) <= most_bytes, (share, managed.budget, managed.peaks)

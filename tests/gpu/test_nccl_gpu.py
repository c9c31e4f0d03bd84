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
    (end,) = run_ranks(tmp_path, "gpu.nccl_jobs.train_case", name, make_machine(), ranks=1, backend="nccl")
    assert end.code == 0, end.text
    plain = end.result[0.0]
    for share in SHARES:
        managed = end.result[share]
        assert plain.tensors.keys() == managed.tensors.keys()
        assert [what for what in plain.tensors if not torch.equal(plain.tensors[what], managed.tensors[what])] == []
        assert managed.moved > 0 and ("planned" in managed.modes or "experts" in name), managed.modes
        assert max(*managed.peaks, managed.outside_peak) <= managed.budget, (share, managed.budget, managed.peaks)

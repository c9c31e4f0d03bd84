"""Forecasts of several ranks beside published step times, scaling tables and bubbles.

    python benchmarks/ranks.py [--tables ddp,hour,fsdp,pipeline,gpipe,h200] [--cache FOLDER] [--output FILE.json]
        [--check]

ddp       DLPerf: ResNet-50 and BERT-base in PyTorch on 1 to 32 V100, 8 a node, one InfiniBand card of 100 Gb/s a node
          (github.com/Oneflow-Inc/DLPerf, NVIDIADeepLearningExamples/PyTorch, FP32 tables, September 2020).
hour      P. Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv 1706.02677: ResNet-50,
          32 images on each P100, 8 a node, 50 Gb/s Ethernet: about 90 % of the speed of 8 GPUs on 256.
fsdp      torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: Llama 3.1 8B on 8 and on 128 H100,
          two sequences of 8192 tokens each, `fully_shard` without compilation.
pipeline  P. Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, tables 3 to 5: 1F1B with Megatron-LM on 8
          to 32 A100: samples per GPU and second for three numbers of micro-batches, and bubbles.
gpipe     Y. Huang et al., "GPipe", NeurIPS 2019, tables 2 and 3: a Transformer in 2, 4 and 8 parts, 32 micro-batches.
h200      No publication: plans of activations on eight H200 beside full activation checkpointing (each block again in
          the backward pass), at no more memory per rank; Llama 3.1 8B as above.

Each case has one anchor, marked so: the seconds of all ops are multiplied by one factor with which the forecast of that
row is the published one. So the other rows check networks, overlap and schedules, and not the price of ops. With
--check the exit code is 1 where a row is off by more than `LIMITS` says.

Inferred, since the sources do not say:

- ddp: NVIDIA's BERT reduces all gradients in one message (`message_size=250000000` elements in `run_pretraining.py`),
  its ResNet as apex does by default (10,000,000 elements); 128 tokens a sample, the masked-language objective alone.
- hour: NVLink and Ethernet as in `bigbasin-p100`, level by level (NCCL in the node, Gloo between nodes), and two sizes
  of messages; the anchor is their backward pass of 120 ms on one P100 (section 4).
- fsdp: 400 Gb/s for each GPU as in `dgx-h100`; bfloat16 weights and activations, shards and sums of gradients in
  float32; a fused optimizer; the trace keeps all activations, so that only the difference of the two memories is
  compared. Theirs is what PyTorch's allocator has reserved, ours the bytes in blocks.
- pipeline: cards and NVLink as in `dgx-a100`; bfloat16; a vocabulary of 51,200 tokens. Their stages are two layers
  short of a multiple, so that embedding and head make up for them; ours are cut where the seconds say.
- gpipe: equal parts, and activations that pass in no time.
- h200: no anchor, ops by their estimates. Replays read the weights of a block while `fully_shard` has them gathered;
  the last row shows a plan in which they could always.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from league import DEFAULT_CACHE, capture
from writing import write_results

import elbowroom
from elbowroom.hardware.shipped import load_network, load_shipped
from elbowroom.ir.costs import Costs
from elbowroom.ir.network import Algorithm
from elbowroom.ir.parallelism import MicroBatchOrder, Parallel, Parallelism, RanksForecast, ShardDtype
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace
from elbowroom.simulator.planned import PreparedTrace
from elbowroom.simulator.ranks.pipelined import time_flush
from elbowroom.simulator.ranks.rank_step import RankStep
from elbowroom.simulator.ranks.simulate_ranks import simulate_ranks
from elbowroom.simulator.ranks.turns import gather_in_turns

Row = dict[str, Any]

LIMITS: Mapping[str, float] = {"ddp": 0.08, "hour": 0.10, "fsdp": 0.05, "pipeline": 0.03, "gpipe": 0.06}
"""By how much a forecast may differ from the published figure, as a share of it."""


class Job:
    """A captured step on a card, whose seconds can be stretched to those of an anchor."""

    def __init__(self, trace: Trace, hardware: str, network: str) -> None:
        self.trace, self.network = trace, load_network(network)
        self.costs: Costs = elbowroom.price(trace, load_shipped(hardware))
        self.factor = 1.0

    def run(self, kind: Parallel, ranks: int, plan: Plan | None = None, **options: Any) -> RanksForecast:
        """The forecast of some ranks, under a plan or with everything kept."""
        parallelism = Parallelism(kind=kind, ranks=ranks, **options)
        return simulate_ranks(self.trace, self.costs, plan or self.keep_all(), self.network, parallelism)

    def stretch(self, seconds: float, measure: Callable[[], float]) -> None:
        """Multiply the seconds of all ops by the factor with which `measure` is `seconds`."""
        plain = self.costs.op_seconds
        for _ in range(8):  # what is measured is nearly proportional to the factor
            self.factor *= seconds / measure()
            self.costs = dataclasses.replace(self.costs, op_seconds=tuple(self.factor * each for each in plain))
        assert abs(measure() / seconds - 1) < 1e-3

    def keep_all(self) -> Plan:
        """The plan that keeps everything."""
        return Plan(
            trace_digest=self.costs.trace_digest, strategy="keep_all", budget_bytes=0, decisions=(), segments=()
        )


def find_trace(cache: pathlib.Path, name: str, make: Callable[[], Trace]) -> Trace:
    """A trace from the cache, or captured."""
    path = cache / f"ranks-{name}.json.gz"
    if path.exists():
        return elbowroom.load(Trace, path)
    print(f"capturing {name}", file=sys.stderr, flush=True)
    trace = make()
    cache.mkdir(parents=True, exist_ok=True)
    elbowroom.save(trace, path)
    return trace


def make_row(table: str, case: str, ranks: int, unit: str, published: float, found: float, **more: Any) -> Row:
    """A published figure and ours."""
    return {
        "table": table, "case": case, "ranks": ranks, "unit": unit, "published": published, "forecast": found,
        "off": found / published - 1, **more,
    }  # fmt: skip


# -- tables -----------------------------------------------------------------------------------------------------------

DLPERF = {
    "ResNet-50, batch 128": (
        "torchvision:resnet50", {"batch": 128, "optimizer": "sgd"}, 40_000_000,
        {1: 367.29, 8: 2887.65, 16: 5716.79, 32: 10917.09},
    ),
    "BERT-base, batch 32": (
        "transformers:bert-base-uncased", {"batch": 32, "sequence_length": 128}, 1_000_000_000,
        {1: 119.6, 8: 921.32, 16: 1499.4, 32: 2885.81},
    ),
    "BERT-base, batch 48": (
        "transformers:bert-base-uncased", {"batch": 48, "sequence_length": 128}, 1_000_000_000,
        {1: 121.94, 8: 928.01, 16: 1584.32, 32: 3039.3},
    ),
}  # fmt: skip
"""Spec, options, bytes of a bucket, and samples per second by number of GPUs."""


def compare_ddp(cache: pathlib.Path) -> list[Row]:
    """Data-parallel ranks; the anchor is one GPU."""
    rows = []
    for case, (spec, options, bucket_bytes, speeds) in DLPERF.items():
        name = case.replace(", ", "-").replace(" ", "-")
        job = Job(find_trace(cache, name, functools.partial(capture, spec, options)), "v100", "v100-ib100")
        estimate = options["batch"] / job.run(Parallel.DATA, 1).step_seconds
        job.stretch(options["batch"] / speeds[1], lambda job=job: job.run(Parallel.DATA, 1).step_seconds)
        for ranks, published in speeds.items():
            found = job.run(Parallel.DATA, ranks, bucket_bytes=bucket_bytes)
            speed = ranks * options["batch"] / found.step_seconds
            more = {"anchor": True, "estimate": estimate} if ranks == 1 else {"exposed": found.exposed_seconds}
            rows.append(make_row("ddp", case, ranks, "samples/s", published, speed, **more))
    return rows


def compare_hour(cache: pathlib.Path) -> list[Row]:
    """256 GPUs against 8."""
    trace = find_trace(cache, "resnet50-32", lambda: capture("torchvision:resnet50", {"batch": 32, "optimizer": "sgd"}))
    job = Job(trace, "p100", "bigbasin-p100")
    step = RankStep(trace, job.costs, job.keep_all())

    def measure() -> float:
        begins = PreparedTrace(trace, job.costs).run(job.keep_all()).begin_seconds
        return begins[step.update] - begins[step.backward]

    job.stretch(0.120, measure)
    rows = []
    for case, bucket_bytes in {"each gradient alone": 1, "buckets of 25 MiB": None}.items():
        few, many = (
            job.run(Parallel.DATA, ranks, algorithm=Algorithm.HIERARCHICAL, bucket_bytes=bucket_bytes)
            for ranks in (8, 256)
        )
        rows.append(
            make_row("hour", f"ResNet-50, {case}", 256, "of 8 GPUs", 0.90, few.step_seconds / many.step_seconds)
        )
    return rows


def compare_fsdp(cache: pathlib.Path) -> list[Row]:
    """Sharded ranks; the anchor is 8 GPUs."""
    job = Job(find_trace(cache, "llama-3-8b", capture_llama), "h100", "dgx-h100")
    tokens, options = 2 * 8192, {"shard_dtype": ShardDtype.FLOAT32}
    job.stretch(tokens / 5762, lambda: job.run(Parallel.SHARDED, 8, **options).step_seconds)
    few, many = (job.run(Parallel.SHARDED, ranks, **options) for ranks in (8, 128))
    case = "Llama 3.1 8B, batch 2"
    return [
        make_row("fsdp", case, 8, "tokens/s/GPU", 5762, tokens / few.step_seconds, anchor=True, factor=job.factor),
        make_row("fsdp", case, 128, "tokens/s/GPU", 5605, tokens / many.step_seconds, exposed=many.exposed_seconds),
        make_row(
            "fsdp",
            case,
            128,
            "GiB less than 8",
            82.4 - 67.0,
            (few.peak_bytes - many.peak_bytes) / 2**30,
            checked=False,
        ),
    ]


@contextlib.contextmanager
def in_half() -> Iterator[None]:
    """Models that are made here are fake, and in bfloat16."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def capture_llama(*, checkpointed: bool = False) -> Trace:
    """One step of Llama 3 8B, two sequences of 8192 tokens, with weights as `fully_shard` gathers them."""
    import torch

    from elbowroom.workloads import build

    with in_half():
        workload = build("transformers:llama-3-8b", batch=2, sequence_length=8192, device="cpu")
        optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-4, fused=True)
    if checkpointed:
        workload.model.gradient_checkpointing_enable()

    def step() -> torch.Tensor:
        loss = workload.forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return elbowroom.capture(step, workload.model, optimizer, name="llama-3-8b in bfloat16")


ZERO_BUBBLE = {
    "1.5B": (22, 24, 2304, 8, 6, {24: (11.8, 0.2431), 32: (12.5, 0.1985), 64: (13.6, 0.1240)}),
    "6.2B": (30, 32, 4096, 8, 3, {24: (3.50, 0.2347), 32: (3.70, 0.1898), 64: (4.03, 0.1091)}),
    "14.6B": (46, 40, 5120, 16, 1, {48: (1.40, 0.2552), 64: (1.49, 0.2082), 128: (1.64, 0.1251)}),
    "28.3B": (62, 48, 6144, 32, 1, {96: (0.76, 0.2646), 128: (0.80, 0.2168), 256: (0.88, 0.1352)}),
}
"""Layers, heads, width, stages, samples of a micro-batch; and by number of micro-batches samples per GPU and second,
and the share of the bubble."""


def capture_gpt(layers: int, heads: int, width: int, batch: int) -> Trace:
    """One step of a GPT of Megatron-LM's shape, 1024 tokens a sample."""
    import transformers

    from elbowroom import workloads
    from elbowroom.workloads import transformers as source

    figures = {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": 51200, "use_cache": False}
    with in_half():
        options = workloads.Options(batch=batch, sequence_length=1024, device="cpu")
        config = transformers.AutoConfig.for_model("gpt2", **figures)
        model = transformers.AutoModelForCausalLM.from_config(config)
        tokens = source._causal_batch(config, options, "gpt")
        workload = source.training_workload("gpt", model, tokens, source._own_loss, options)
    return elbowroom.capture(workload.step, workload.model, workload.optimizer, name="gpt in bfloat16")


def compare_pipeline(cache: pathlib.Path) -> list[Row]:
    """1F1B; the anchor is the largest number of micro-batches."""
    rows = []
    for case, (layers, heads, width, stages, batch, figures) in ZERO_BUBBLE.items():
        make = functools.partial(capture_gpt, layers, heads, width, batch)
        job = Job(find_trace(cache, f"gpt-{case}", make), "a100", "dgx-a100")
        most = max(figures)

        def run(micro_batches: int, job: Job = job, stages: int = stages) -> RanksForecast:
            return job.run(Parallel.PIPELINED, stages, stages=stages, micro_batches=micro_batches)

        job.stretch(most * batch / stages / figures[most][0], lambda run=run, most=most: run(most).step_seconds)
        for micro_batches, (published, bubble) in figures.items():
            found = run(micro_batches)
            speed = micro_batches * batch / stages / found.step_seconds
            more = {"anchor": True, "factor": job.factor} if micro_batches == most else {}
            named = f"GPT {case}, {micro_batches} micro-batches"
            rows.append(make_row("pipeline", named, stages, "samples/s/GPU", published, speed, **more))
            share = 1 - found.efficiency
            rows.append(make_row("pipeline", named, stages, "bubble", bubble, share, checked=False))
    return rows


def compare_gpipe(cache: pathlib.Path) -> list[Row]:
    """Speed of 2, 4 and 8 equal parts; the anchor is two of them."""
    del cache
    rows = []
    for case, speeds in {"TPU": {2: 1.8, 4: 3.4, 8: 6.3}, "P100 without NVLink": {2: 1.0, 4: 1.8, 8: 3.3}}.items():
        ends = {
            parts: max(time_flush([1 / parts] * parts, [2 / parts] * parts, [0.0] * parts, 32, MicroBatchOrder.GPIPE))
            for parts in speeds
        }
        for parts, published in speeds.items():
            more = {"anchor": True} if parts == 2 else {}
            found = speeds[2] * ends[2] / ends[parts]
            rows.append(make_row("gpipe", f"Transformer on {case}", parts, "of one part", published, found, **more))
    return rows


def compare_h200(cache: pathlib.Path) -> list[Row]:
    """Sharded ranks under a plan of activations, beside full activation checkpointing."""
    checkpointed = functools.partial(capture_llama, checkpointed=True)
    given = Job(find_trace(cache, "llama-3-8b-checkpointed", checkpointed), "h200", "dgx-h100")
    options = {"shard_dtype": ShardDtype.FLOAT32}
    limit = given.run(Parallel.SHARDED, 8, **options)
    alone = PreparedTrace(given.trace, given.costs).run(given.keep_all())
    plain = find_trace(cache, "llama-3-8b", capture_llama)
    rows = []
    for case, trace in {"as a room does": gather_in_turns(plain), "weights always there": plain}.items():
        job = Job(trace, "h200", "dgx-h100")
        budget_bytes = alone.peak_bytes
        for _ in range(4):
            made = elbowroom.plan(trace, job.costs, budget_bytes)
            found = job.run(Parallel.SHARDED, 8, plan=made, **options)
            if found.peak_bytes <= limit.peak_bytes:
                break
            budget_bytes -= found.peak_bytes - limit.peak_bytes
        more = {"peak_bytes": found.peak_bytes, "limit_bytes": limit.peak_bytes, "checked": False}
        rows.append(
            make_row("h200", f"plan, {case}", 8, "s, checkpointing", limit.step_seconds, found.step_seconds, **more)
        )
    return rows


TABLES = {
    "ddp": compare_ddp, "hour": compare_hour, "fsdp": compare_fsdp, "pipeline": compare_pipeline,
    "gpipe": compare_gpipe, "h200": compare_h200,
}  # fmt: skip


def is_far(row: Row) -> bool:
    """Whether a row is off by more than its limit; memory, bubbles and our own plans have none."""
    return row.get("checked", True) and abs(row["off"]) > LIMITS[row["table"]]


def show(row: Row) -> str:
    """A line for a row."""
    mark = "anchor" if row.get("anchor") else f"{row['off']:+.1%}"
    return (
        f"{row['table']:9}{row['case']:34}{row['ranks']:5}  {row['unit']:16}{row['published']:10.4g}"
        f"{row['forecast']:10.4g}  {mark}"
    )


def main() -> None:
    """Print a line a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default=",".join(TABLES), help="comma-separated")
    parser.add_argument("--cache", type=pathlib.Path, default=DEFAULT_CACHE, help="where captured traces are kept")
    parser.add_argument("--output", help="write the rows to this file")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a row is off by more than its limit")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for table in arguments.tables.split(","):
        for row in TABLES[table](arguments.cache):
            rows.append(json.loads(json.dumps(row)))
            print(show(row), flush=True)
    write_results(arguments.output, rows)
    if arguments.check and any(map(is_far, rows)):
        sys.exit(1)


if __name__ == "__main__":
    main()

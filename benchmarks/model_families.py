"""Do models of every family train with the same bits, within the budget?

    python benchmarks/model_families.py [--libraries timm transformers] [--only NAME ...] [--shares 0.75 0.5 0.3]
        [--processes 1] [--minutes 30] [--output FILE.json] [--check]

One small model of each module of timm, and of each configuration of transformers that has a model for causal, masked or
sequence-to-sequence language modelling or image classification (made small). Each trains a few steps with AdamW in a
process of its own, plain and then in rooms with shares of the plain peak as their budgets. Losses, parameters, buffers
and the state of the random generator have to be the same to the last bit, and the bytes that a meter outside of ours
sees may not be more than the budget in any step. `Infeasible` is a result as well.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import hashlib
import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from writing import write_results

import elbowroom
from elbowroom.errors import Infeasible, Thrashing
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.native import library
from elbowroom.workloads import _packages

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.native import outside_meter  # noqa: E402

STEPS = 5
LARGEST = 60_000_000
"""Parameters of the largest model."""
HINTS = ("nano", "atto", "tiny", "_ti", "xx", "_xs", "small", "_s", "18", "_t0", "_t8", "_b0", "_m0", "050", "_002")
CANDIDATES = 4
"""Models of a module whose parameters are counted."""
SMALL = {
    "vocab_size": 503, "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embedding_size": 64, "emb_dim": 64,
    "intermediate_size": 128, "ffn_dim": 128, "d_ff": 128, "d_inner": 128, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "num_hidden_layers": 3, "n_layer": 3, "n_layers": 3, "num_layers": 3, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "d_kv": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "n_positions": 128, "max_position_embeddings": 128, "image_size": 64, "patch_size": 8,
}  # fmt: skip
"""Settings of a configuration that are made small, where it has them."""


def list_families(libraries: list[str]) -> list[str]:
    """Return the names of all models, with their library or kind."""
    found: list[str] = []
    if "timm" in libraries:
        timm = _packages.import_package("timm")
        modules: dict[str, list[str]] = {}
        for name in timm.list_models():
            modules.setdefault(timm.models._registry._model_to_module[name], []).append(name)
        found += [f"timm:{name}" for names in modules.values() if (name := find_smallest(timm, names))]
    if "transformers" in libraries:
        _packages.import_package("transformers")
        from transformers.models.auto import modeling_auto as auto

        kinds = {
            "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
            "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            "image": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        }
        seen: set[str] = set()
        for kind, names in kinds.items():
            found += [f"{kind}:{name}" for name in names if name not in seen]
            seen |= set(names)
    return found


def find_smallest(timm: Any, names: list[str]) -> str:
    """Return the model of a module with the fewest parameters, among those whose name says that it is small."""
    names = sorted(names, key=lambda name: (not any(hint in name for hint in HINTS), len(name)))[:CANDIDATES]
    best = (LARGEST, "")
    for name in names:
        with torch.device("meta"), contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            best = min(best, (sum(each.numel() for each in timm.create_model(name).parameters()), name))
    return best[1]


Step = Callable[[int], torch.Tensor]


def build(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, Step]:
    """Make a model, its optimizer, and a function that trains one step on random data."""
    torch.manual_seed(0)
    kind, _, family = name.partition(":")
    if kind == "timm":
        model = _packages.import_package("timm").create_model(family, num_classes=10)
        shape = model.default_cfg["input_size"]
        classes = 10
    else:
        model, shape, classes = build_small(kind, family)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        if shape is not None:
            images = torch.randn(2, *shape, generator=generator)
            targets = torch.randint(classes, (2,), generator=generator)
            output = model(images)
            output = getattr(output, "logits", output)
            output = output[0] if isinstance(output, (tuple, list)) else output
            loss = torch.nn.functional.cross_entropy(output, targets)
        else:
            tokens = torch.randint(3, 500, (4, 64), generator=generator)
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def shrink(config: Any) -> None:
    """Make the settings of a configuration, and of those that it consists of, small."""
    for key, value in SMALL.items():
        with contextlib.suppress(Exception):
            if isinstance(getattr(config, key, None), int):
                setattr(config, key, value)
    for name in getattr(config, "sub_configs", None) or ():
        part = getattr(config, name, None)
        if hasattr(part, "to_dict"):
            shrink(part)
            kept = {key: getattr(part, key) for key in SMALL if isinstance(getattr(part, key, None), int)}
            with contextlib.suppress(Exception):
                made = type(part)(**kept)
                for key, value in vars(part).items():  # those that the whole has set
                    if not hasattr(made, key):
                        setattr(made, key, value)
                setattr(config, name, made)


def build_small(kind: str, family: str) -> tuple[torch.nn.Module, tuple[int, ...] | None, int]:
    """Make a small model of a configuration."""
    transformers = _packages.import_package("transformers")
    config = transformers.AutoConfig.for_model(family)
    shrink(config)
    if not getattr(config, "sub_configs", None):  # else what depends on the settings is made anew in each of its parts
        kept = {key: getattr(config, key) for key in SMALL if isinstance(getattr(config, key, None), int)}
        config = type(config)(**kept)
    makers = {
        "causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM", "seq2seq": "AutoModelForSeq2SeqLM",
        "image": "AutoModelForImageClassification",
    }  # fmt: skip
    if kind == "image":
        config.num_labels = 10
    if kind == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    make = functools.partial(getattr(transformers, makers[kind]).from_config, config)
    count = 0
    with torch.device("meta"), contextlib.suppress(Exception):
        count = sum(each.numel() for each in make().parameters())
    if count > LARGEST:
        raise ValueError("too large")
    model = make()
    if kind != "image":
        return model, None, 0
    size = getattr(config, "image_size", 64)
    size = size if isinstance(size, int) else 64
    return model, (getattr(config, "num_channels", 3), size, size), 10


class Bench:
    """Trains one model, and meters it.

    Args:
        meter: the library that counts.
    """

    def __init__(self, meter: str, profile: HardwareProfile) -> None:
        library.load().make_scope().close()  # the ledger is registered, and the meter before it
        self._meter, self._profile = ctypes.CDLL(meter), profile
        self._meter.reset_peak.restype = self._meter.read_peak.restype = ctypes.c_int64
        self._meter.register_meter()

    def train(self, name: str, budget_bytes: int | None) -> dict[str, Any]:
        """Train some steps. Returns peaks, bits and modes of the steps, and why it ended if it did."""
        gc.collect()
        base = self._meter.reset_peak()
        model, optimizer, step = build(name)
        found: dict[str, Any] = {"peaks": [], "losses": []}
        with contextlib.ExitStack() as stack:
            room = None
            try:
                if budget_bytes is not None:
                    room = elbowroom.fit(model, optimizer, budget_bytes, profile=self._profile)
                    stack.callback(room.detach)
                for index in range(STEPS):
                    with room.step() if room is not None else contextlib.nullcontext():
                        self._meter.reset_peak()
                        found["losses"].append(digest([step(index)]))
                    found["peaks"].append(self._meter.read_peak() - base)
            except (Infeasible, Thrashing) as error:
                found["refused"] = f"{type(error).__name__}: {error}"[:400]
                found["peaks"].append(self._meter.read_peak() - base)
            if room is not None:
                records = room.journal().steps
                found["modes"] = [str(record.mode) for record in records]
                found["notes"] = sorted({record.note for record in records if record.note})
                found["moved_bytes"] = max((record.offloaded_bytes or 0 for record in records), default=0)
        tensors = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
        found["bits"] = digest(tensors)
        return found


def digest(tensors: list[torch.Tensor]) -> str:
    """Return a digest of the bytes of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().clone().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def judge(plain: dict[str, Any], found: dict[str, Any], budget_bytes: int) -> str:
    """Return what came of a run in a room: "ok", "refused", "wrong bits", "over budget"."""
    if found["losses"] != plain["losses"][: len(found["losses"])]:
        return "wrong bits"
    if max(found["peaks"], default=0) > budget_bytes:
        return "over budget"
    if "refused" in found:
        return "refused"
    return "ok" if found["bits"] == plain["bits"] else "wrong bits"


def work(options: argparse.Namespace) -> None:
    """Train one model in all ways, and print what came of it as a line of JSON."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    bench = Bench(options.meter, elbowroom.load(HardwareProfile, options.profile))
    result: dict[str, Any] = {"name": options.work}
    try:
        again = [bench.train(options.work, None) for _ in range(2)]
    except Exception as error:  # a model that does not train this way at all
        result["left_out"] = f"{type(error).__name__}: {error}"[:200]
        print(json.dumps(result), flush=True)
        return
    plain = again[1]
    if again[0]["bits"] != plain["bits"]:
        result["left_out"] = "plain steps are not deterministic"
    result |= {"plain_peak_bytes": max(plain["peaks"]), "runs": {}}
    for share in options.shares if "left_out" not in result else ():
        budget_bytes = int(share * max(plain["peaks"]))
        try:
            found = bench.train(options.work, budget_bytes)
            run = {"result": judge(plain, found, budget_bytes), "over_bytes": max(found["peaks"]) - budget_bytes}
            run |= {key: found[key] for key in ("modes", "notes", "moved_bytes", "refused") if key in found}
        except Exception as error:
            run = {"result": "error", "error": f"{type(error).__name__}: {error}"[:400]}
        result["runs"][str(share)] = run
    print(json.dumps(result), flush=True)


def run_all(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train all models, each in a process of its own."""
    names = options.only or list_families(options.libraries)
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="families-") as folder:
        meter, profile = outside_meter.build(pathlib.Path(folder)), f"{folder}/profile.json"
        elbowroom.save(elbowroom.probe("cpu"), profile)

        def run(name: str) -> dict[str, Any]:
            if time.monotonic() > end:
                return {"name": name, "left_out": "no time"}
            command = [sys.executable, __file__, "--work", name, "--meter", str(meter), "--profile", profile]
            command += ["--shares", *map(str, options.shares)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            except subprocess.TimeoutExpired:
                return {"name": name, "left_out": "takes more than 300 s"}
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if lines:
                return json.loads(lines[-1])
            return {"name": name, "runs": {"": {"result": "died", "error": done.stderr[-600:]}}}

        with ThreadPoolExecutor(options.processes) as pool:
            yield from pool.map(run, names)


def main() -> None:
    """Train all models, print a line for each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", nargs="+", choices=["timm", "transformers"], default=["timm", "transformers"])
    parser.add_argument("--only", nargs="+", help="names such as timm:resnet18 or causal:llama")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.75, 0.5, 0.3])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a result is wrong")
    for hidden in ("--work", "--meter", "--profile"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    results, counts = [], Counter[str]()
    for result in run_all(options):
        results.append(result)
        outcomes = {share: run["result"] for share, run in result.get("runs", {}).items()}
        counts.update(outcomes.values())
        print(f"{result['name']:40} {result.get('left_out') or outcomes}", flush=True)
        for run in result.get("runs", {}).values():
            if run["result"] not in ("ok", "refused"):
                print(f"    {json.dumps(run)}", flush=True)
        if options.output:
            write_results(str(options.output), results)
    print(dict(counts))
    if options.check and set(counts) - {"ok", "refused"}:
        sys.exit(1)


if __name__ == "__main__":
    main()

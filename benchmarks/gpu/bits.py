"""Small whole models, trained plainly twice and within two budgets each, compared to the last bit.

What plain PyTorch does not repeat is said and not counted against anybody.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

import benchmarks.gpu.own_tests  # noqa: F401 -- before tests.models
import elbowroom
from benchmarks.gpu.measure import release_all
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.planner.problem import pose
from tests.models import MODELS

NO_LIMIT_BYTES = 1 << 62
CASES = (
    ("resnet50", False), ("gpt2", False), ("vit", False), ("gpt2", True), ("unet", False), ("resnet50", True),
    ("lstm", False), ("bert", False), ("vgg16_bn", False), ("gpt2_accumulation", False), ("t5", False),
    ("gpt2_checkpoint", False), ("mobilenet_v3_large", False), ("densenet121", False),
)  # fmt: skip
"""Of tests/models.py, with and without autocast to bfloat16; the most telling first, since time may run out."""
TINY_CASES = (("lstm", False), ("unet", False))


def compare_all(options: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
    """Train as many cases as there is time for, and report after each."""
    profile = elbowroom.load(HardwareProfile, options["profile"])
    deadline = time.monotonic() + options["seconds"]
    cases = (TINY_CASES if options["tiny"] else CASES)[options["part"] :: options["parts"]]
    found: dict[str, Any] = {"steps": 5, "cases": [], "left_out": []}
    for name, autocast in cases:
        label = f"{name} (bfloat16)" if autocast else name
        if time.monotonic() > deadline:
            found["left_out"].append(label)
            continue
        begin = time.perf_counter()
        try:
            case = _compare(MODELS[name](), options["device"], profile, autocast)
        except Exception as error:
            traceback.print_exc()
            case = {"error": f"{type(error).__name__}: {error}"}
        case |= {"case": label, "seconds": time.perf_counter() - begin}
        found["cases"].append(case)
        print(f"  {label:28} {_describe_case(case)}  ({case['seconds']:.1f} s)", flush=True)
        report(found)
    report(found)


def _describe_case(case: dict[str, Any]) -> str:
    if "error" in case:
        return case["error"].splitlines()[0]
    if case["plain_differences"]:
        return "plain PyTorch differs from itself here: nothing to compare with"
    wrong = [f"{item['share']}: {item['differences'][:3]}" for item in case["budgets"] if item["differences"]]
    return "DIFFERS at " + "; ".join(wrong) if wrong else "the same bits at both budgets"


def _compare(case: Any, device: str, profile: Any, autocast: bool) -> dict[str, Any]:
    strict = True
    try:
        make_repeatable(strict=True)
        plain, _ = _train(case, device, None, profile, autocast)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        strict = False  # an op has no deterministic form: perhaps it repeats itself all the same
        make_repeatable(strict=False)
        plain, _ = _train(case, device, None, profile, autocast)
    again, _ = _train(case, device, None, profile, autocast)
    own_differences = find_differences(plain, again)
    result: dict[str, Any] = {"deterministic_ops": strict, "plain_differences": own_differences, "budgets": []}
    if own_differences:
        return result
    _, room = _train(case, device, NO_LIMIT_BYTES, profile, autocast, steps=4)
    if room.planned is None:
        raise RuntimeError("no step was planned within four: " + str([r.note for r in room.journal().steps]))
    floor = pose(room.planned.trace, room.planned.costs, 1).floor.peak_bytes
    top = room.planned.forecast.peak_bytes
    for share in (0.0, 0.5):
        # The floor was found with measured workspaces, which vary a little from one process history to the next.
        budget = int((floor + share * (top - floor)) * 1.01)
        ours, room = _train(case, device, budget, profile, autocast)
        records = room.journal().steps
        result["budgets"].append({
            "share": share,
            "budget_bytes": budget,
            "modes": [str(record.mode) for record in records],
            "notes": sorted({record.note for record in records if record.note}),
            "offloaded_bytes": records[-1].offloaded_bytes,
            "recomputed": records[-1].recomputed,
            "peak_bytes": max(record.peak_bytes or 0 for record in records),
            "peaks_bytes": [record.peak_bytes for record in records],
            "refusals": torch.cuda.memory_stats()["num_ooms"] if device == "cuda" else 0,
            "differences": find_differences(plain, ours),
        })  # fmt: skip
    return result


def make_repeatable(*, strict: bool) -> None:
    """Let the same step give the same bits twice. cuBLAS needs CUBLAS_WORKSPACE_CONFIG, which the check sets."""
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    torch.backends.cudnn.benchmark = False
    # It would write to every new block, which no training does.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _train(
    case: Any, device: str, budget_bytes: int | None, profile: Any, autocast: bool, steps: int = 5
) -> tuple[dict[str, list[Any]], Any]:
    release_all(torch.device(device))  # what earlier trainings hold would count within the budget
    with torch.device(device):  # the cases make everything where the default device is
        model, optimizer, step = case.make()
    room = None
    if budget_bytes is not None:
        room = elbowroom.fit(model, optimizer, budget_bytes, profile=profile)
    losses = []
    for index in range(steps):
        within = room.step() if room is not None else contextlib.nullcontext()
        with within, torch.autocast(device, torch.bfloat16, enabled=autocast):
            losses.append(step(index))
    if room is not None:
        room.detach()
    tensors = {"losses": losses, "parameters": [*model.parameters()], "buffers": [*model.buffers()]}
    return {kind: [each.detach().cpu().clone() for each in found] for kind, found in tensors.items()}, room


def find_differences(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> list[str]:
    """Return the names of tensors that differ in a bit."""
    found = []
    for kind in ("losses", "parameters", "buffers"):
        tensors = one[kind]
        for index, (left, right) in enumerate(zip(tensors, other[kind], strict=True)):
            ours, theirs = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (left, right))
            if not torch.equal(ours, theirs):
                found.append(f"{kind}[{index}]")
    return found

"""Does every differentiable op have the same bits in a room as out of it?

    python benchmarks/opinfo_sweep.py [--ways dynamic pressed ...] [--dtypes float32 float64] [--ops NAME ...]
        [--samples 3] [--seconds 120] [--output FILE.json] [--check]

The ops and their inputs are those of PyTorch's own op database (`torch.testing._internal.opinfo`). Each runs forward,
backward and twice backward, also in place where it can, on inputs that only autograd holds. Ways to run it:

    dynamic        steps that are decided on as they go, with room for everything
    pressed        the same, and at each allocation everything that may leave is offloaded or dropped
    pressed_lru    the same, and everything that may leave is offloaded
    pressed_all    the same, and model state and all results of ops leave as well
    offload_all    captured steps, and then planned ones in which everything is offloaded
    recompute_all  captured steps, and then planned ones in which everything is computed again

Outputs and gradients of both orders are compared bit by bit with those of the same program without a room, and so are
errors. A case whose bits differ between runs without a room is counted as unstable and not compared: its result
rests on where its blocks lie (LAPACK), or on memory that nobody has written to.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import json
import logging
import pathlib
import subprocess
import sys
import tempfile
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from writing import write_results

import elbowroom
import elbowroom.step_planner
from elbowroom.errors import ElbowroomError
from elbowroom.ir.hardware import HardwareProfile

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.pressure import ask_at_every_request, let_everything_go, let_results_go  # noqa: E402

WAYS = ("dynamic", "pressed", "pressed_lru", "pressed_all", "offload_all", "recompute_all")
POLICIES = {"dynamic": "predictive", "pressed": "dtr", "pressed_lru": "lru", "pressed_all": "lru"}
HUGE = 1 << 40
LOOKED_AT = 24
"""Samples of an op, of which some are taken."""
PLANNED_STEPS = 5
UNSTABLE = (
    "its bits differ between runs without a room: LAPACK's rest on where blocks lie, "
    "or memory is read that nobody wrote"
)

Values = list[Any]
"""What one case made: arrays with their strides, or the name of an error."""


def list_ops() -> list[Any]:
    """The differentiable ops of PyTorch's database."""
    if "expecttest" not in sys.modules:  # which its tests need and its op database does not
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules.setdefault("expecttest", stub)
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.supports_autograd]


def name_op(op: Any) -> str:
    """Unique: of an op that has several entries, with the variant."""
    return str(op.name) + (f".{op.variant_test_name}" if op.variant_test_name else "")


def is_float(value: Any) -> bool:
    """Whether it is a tensor that may have a gradient."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def keep(value: torch.Tensor | None) -> Any:
    """Return a copy that no allocator of PyTorch's has made."""
    if value is None:
        return None
    value = value.detach()
    if value.layout is not torch.strided:
        value = value.to_dense()
    stride = value.stride() if value.numel() > 1 else ()  # of others it means nothing
    value = value.resolve_conj().resolve_neg()
    if value.dtype in (torch.bfloat16, torch.float16):
        value = value.view(torch.int16)
    return np.array(value.numpy(), order="C"), stride


def is_same(one: Any, other: Any) -> bool:
    """Whether two cases made the same; one NaN is as good as another."""
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, np.ndarray):
        if not isinstance(other, np.ndarray) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        return one.tobytes() == other.tobytes() or np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    return bool(one == other)


class Case:
    """One sample of one op.

    Args:
        call: the op.
        sample: its arguments.
        twice: whether its gradient has one.
    """

    def __init__(self, call: Callable[..., Any], sample: Any, twice: bool) -> None:
        self._call, self._sample, self._twice = call, sample, twice

    def run(self) -> Values:
        """Run it forward, backward and twice backward. An error is a result as well, but one of ours."""
        made: Values = []
        torch.manual_seed(1)
        try:
            self._differentiate(made)
        except ElbowroomError:
            raise
        except Exception as error:
            made.append(type(error).__name__)
        return made

    def _differentiate(self, made: Values) -> None:
        leaves: list[torch.Tensor] = []

        def enter(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            copy = value.detach().clone()
            if not value.requires_grad:
                return copy
            leaves.append(copy.requires_grad_())
            return copy * 1 if is_float(copy) and copy.layout is torch.strided else copy  # nobody else holds it

        sample = self._sample
        arguments = tree_map(enter, (sample.input, sample.args, sample.kwargs))
        found = sample.output_process_fn_grad(self._call(arguments[0], *arguments[1], **arguments[2]))
        del arguments
        results = [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)]
        made.extend(map(keep, results))
        roots = [each for each in results if is_float(each) and each.requires_grad]
        del found, results
        if not roots or not leaves:
            return
        seeds = [torch.randn_like(each, layout=torch.strided).requires_grad_(self._twice) for each in roots]
        first = torch.autograd.grad(roots, leaves, seeds, create_graph=self._twice, allow_unused=True)
        del roots
        made.extend(map(keep, first))
        second = [each for each in first if each is not None and each.requires_grad]
        del first
        if second:
            ways = [torch.randn_like(each, layout=torch.strided) for each in second]
            inputs = [each for each in (*leaves, *seeds) if each.requires_grad]
            made.extend(map(keep, torch.autograd.grad(second, inputs, ways, allow_unused=True)))


def list_cases(op: Any, dtypes: list[torch.dtype], most: int) -> list[Case]:
    """Make the cases of an op: samples from its list, far from each other."""
    cases = []
    for dtype in dtypes:
        if dtype not in op.supported_backward_dtypes("cpu"):
            continue
        torch.manual_seed(0)
        samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=True), LOOKED_AT))
        stride = max(1, len(samples) // most)
        chosen = samples[::stride][:most]
        cases += [Case(op.op, each, op.supports_gradgrad) for each in chosen]
        if op.inplace_variant is not None:
            fitting = [each for each in chosen if not each.broadcasts_input]
            cases += [Case(op.inplace_variant, each, op.supports_gradgrad) for each in fitting[:1]]
    return cases


class Sweep:
    """Runs the cases of op after op in one way, in rooms.

    Args:
        way: one of `WAYS`.
        profile: of this machine.
    """

    def __init__(self, way: str, profile: HardwareProfile) -> None:
        self._way, self._profile = way, profile
        self._patch = pytest.MonkeyPatch()
        self._room: Any = None
        if way.startswith("pressed"):
            ask_at_every_request(self._patch, let_results_go if way == "pressed_all" else let_everything_go)
        elif way.endswith("_all"):
            self._patch.setattr(elbowroom.step_planner, "keep_all_if_it_fits", lambda *_: None)

    def _fit(self) -> Any:
        options: dict[str, Any] = {"strategy": self._way}
        if self._way in POLICIES:
            options = {"mode": "dynamic", "policy": POLICIES[self._way]}
        return elbowroom.fit(nn.Linear(1, 1), [], HUGE, min_offload_bytes=1, profile=self._profile, **options)

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        """Open a room: one for all ops, but where plans are made of their steps."""
        if self._way not in POLICIES:
            with self._fit() as room:
                yield room
            return
        self._room = self._room or self._fit()
        yield self._room

    def run(self, name: str, cases: list[Case]) -> dict[str, Any]:
        """Say what became of the cases of one op."""
        once, again = ([case.run() for case in cases] for _ in range(2))
        unstable = [index for index in range(len(cases)) if not is_same(once[index], again[index])]
        found: dict[str, Any] = {"op": name, "way": self._way, "cases": len(cases)}
        wrong: list[str] = []
        modes: Counter[str] = Counter()
        with self._open() as room:
            begin = len(room.journal().steps)
            for step in range(1 if self._way in POLICIES else PLANNED_STEPS):
                try:
                    with room.step():
                        made = [case.run() for case in cases]
                except Exception as error:
                    wrong.append(f"step {step}: {type(error).__name__}: {str(error)[:300]}")
                    self._room = None
                    break
                for index, values in enumerate(made):
                    if index in unstable or is_same(once[index], values):
                        continue
                    if is_unstable(cases[index], once[index]):
                        unstable.append(index)
                    else:
                        wrong.append(f"step {step}, case {index}: {explain(once[index], values)}")
            records = room.journal().steps[begin:]
            modes.update(record.mode.value for record in records)
            found["unstable"] = len(unstable)
            if unstable:
                found["reason"] = UNSTABLE
            found["moved"] = sum(record.offloaded_bytes + record.recomputed for record in records)
        return {**found, "modes": dict(modes), "wrong": wrong}


def is_unstable(case: Case, expected: Values) -> bool:
    """Whether a case has other bits without a room, too, where memory has been used in another way before."""
    used = []
    for size in range(100):
        used.append(torch.empty(37 * size % 501 + 1))
        if size % 3 == 0:
            used.pop(size % len(used))
        if not is_same(case.run(), expected):
            return True
    return False


def explain(expected: Values, made: Values) -> str:
    """Say where two cases differ first."""
    if len(expected) != len(made):
        return f"{len(expected)} results became {len(made)}; the last one is {str(made[-1:])[:100]}"
    where = next(index for index, pair in enumerate(zip(expected, made, strict=True)) if not is_same(*pair))
    return f"result {where} of {len(made)}: {str(expected[where])[:150]} became {str(made[where])[:150]}"


def work(options: argparse.Namespace) -> None:
    """Run ops from one on, and print what became of each; one that hangs ends the process."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    sweep = Sweep(options.ways[0], elbowroom.load(HardwareProfile, options.profile))
    dtypes = [getattr(torch, each) for each in options.dtypes]
    for index, op in enumerate(list_ops()):
        name = name_op(op)
        if index < options.first or (options.ops and name not in options.ops and op.name not in options.ops):
            continue
        print(json.dumps({"begun": index, "op": name}), flush=True)
        faulthandler.dump_traceback_later(options.seconds, exit=True)
        cases = list_cases(op, dtypes, options.samples)
        found = sweep.run(name, cases) if cases else {"op": name, "way": options.ways[0], "cases": 0, "wrong": []}
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(found), flush=True)


def sweep_all(way: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all ops in one way, in a process of their own; where it dies, another one goes on behind."""
    results: list[dict[str, Any]] = []
    first = 0
    while True:
        command = [sys.executable, __file__, "--work", "--ways", way, "--profile", options.profile]
        command += ["--dtypes", *options.dtypes, "--samples", str(options.samples), "--first", str(first)]
        command += ["--seconds", str(options.seconds), *(["--ops", *options.ops] if options.ops else [])]
        begun: dict[str, Any] | None = None
        with (
            tempfile.TemporaryFile("w+") as said,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith("{"):
                    continue
                read = json.loads(line)
                if "begun" in read:
                    begun = read
                    continue
                results.append(read)
                begun = None
                if read["wrong"]:
                    print(f"{way}, {read['op']}: {read['wrong'][0]}", flush=True)
            code = process.wait()
            said.seek(0)
            text = said.read()[-1500:]
        if begun is None:
            if code != 0:
                raise RuntimeError(f"a worker died outside of an op: {text}")
            return results
        print(f"{way}, {begun['op']}: died with {code}: {text}", flush=True)
        results.append({"op": begun["op"], "way": way, "wrong": [f"died with {code}: {text}"]})
        first = begun["begun"] + 1


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64"])
    parser.add_argument("--ops", nargs="+", default=[])
    parser.add_argument("--samples", type=int, default=3, help="of each op and dtype")
    parser.add_argument("--profile", help="of this machine; measured if left out")
    parser.add_argument("--seconds", type=float, default=120.0, help="that one op may take")
    parser.add_argument("--output")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return 0
    results = []
    with tempfile.TemporaryDirectory() as folder:
        if options.profile is None:
            options.profile = str(pathlib.Path(folder) / "profile.json")
            elbowroom.save(elbowroom.probe(), options.profile)
        for way in options.ways:
            found = sweep_all(way, options)
            results += found
            cases = sum(each.get("cases", 0) for each in found)
            unstable = sum(each.get("unstable", 0) for each in found)
            wrong = sum(bool(each["wrong"]) for each in found)
            print(f"{way}: {len(found)} ops, {cases} cases, {unstable} unstable without a room; {wrong} ops went wrong")
    write_results(options.output, results)
    return 1 if options.check and any(each["wrong"] for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())

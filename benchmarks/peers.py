"""Elbowroom beside what people would use instead: the same model at the same measured peak, paired, with the same bits?

    python benchmarks/peers.py [--models resnet50 ...] [--peers checkpoint ...] [--peaks 75 50 35 25] [--rounds 5]
        [--points 2] [--quick] [--output benchmarks/results/peers.json] [--picture docs/peers.png] [--table]

1. Survey: each peer, in several configurations, trains each model in a process of its own. Measured are the peak of a
   settled step, seconds, and whether losses and parameters after three steps are those of plain PyTorch, bit for bit.
2. A heat: for each of --peaks (per cent of the plain peak), the fastest configuration whose peak is at or below it and
   the fastest one with plain PyTorch's bits, and Elbowroom with that many bytes; so too for the peaks of --points peers
   that no other beats in both. These and plain are in processes of their own, all at once, and step in turn.

The peak is measured by PyTorch's profiler, which sees each allocation; of Elbowroom it is that of all its steps, the
first among them, and of others that of a settled step. All use the allocator of Elbowroom's extension, which keeps its
pages, so that ratios are about what is saved and recomputed, not about page faults. A ratio is the median over rounds
of seconds of the fastest peer over Elbowroom's. Results of a run replace those of the same kind in --output, so parts
can run one by one; --rounds 0 makes the survey alone, --peers none the heat alone, --table nothing but the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from peer_contenders import FAMILIES, list_contenders
from peer_models import MODELS
from peer_table import draw, list_front, print_tables

import elbowroom

HERE = pathlib.Path(__file__).parent
SURVEY_STEPS = 1


class Process:
    """A contender in a process of its own."""

    def __init__(self, model: str, contender: str, profile: str, is_small: bool) -> None:
        self.contender = contender
        command = [sys.executable, str(HERE / "peer_worker.py"), model, contender, profile]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command + ["--small"] * is_small, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            text=True, env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        )  # fmt: skip

    def read(self) -> dict[str, Any]:
        """Return the next line of JSON, or why there is none."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        self.errors.seek(0)
        lines = [line for line in self.errors.read().splitlines() if line.strip()]
        return {"failed": f"ended with {self.process.wait()}: {lines[-1][:300] if lines else ''}"}

    def step(self) -> dict[str, Any]:
        """Do one step. Returns its seconds."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("step\n")
            self.process.stdin.flush()
        return self.read()

    def end(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()


@contextlib.contextmanager
def running(processes: list[Process]) -> Iterator[list[Process]]:
    """Contenders that are ended at the end."""
    try:
        yield processes
    finally:
        for process in processes:
            process.end()


class Survey:
    """Runs contenders and keeps what came of them in a file."""

    def __init__(self, path: pathlib.Path, profile: str, is_small: bool) -> None:
        self.path, self.profile, self.is_small = path, profile, is_small
        self.models: dict[str, dict[str, Any]] = {}
        if path.exists():
            self.models = json.loads(path.read_text())["models"]

    def write(self) -> None:
        """Write all results."""
        document = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "small": self.is_small,
            "models": self.models,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(document, indent=1) + "\n")

    def start(self, model: str, contender: str) -> Process:
        """Start a contender."""
        return Process(model, contender, self.profile, self.is_small)

    def survey(self, name: str, contenders: list[str]) -> None:
        """Measure the peak and the bits of contenders one by one, and some steps."""
        model = self.models.setdefault(name, {"title": MODELS[name].title, "survey": {}})
        for contender in contenders:
            with running([self.start(name, contender)]) as (process,):
                found = process.read()
                if "failed" not in found:
                    steps = [process.step() for _ in range(SURVEY_STEPS)]
                    found["seconds"] = [step["seconds"] for step in steps if "seconds" in step]
            model["survey"][contender] = found
            compare_bits(found, model["survey"].get("plain", {}))
            self.write()
            print(f"{name:16} {contender:28} {describe(found)}", flush=True)

    def survey_fewest(self, name: str, shares: list[int]) -> None:
        """Find the fewest blocks to checkpoint for each peak, and measure them as well."""
        plain = self.models[name]["survey"]["plain"]["peak_bytes"]
        targets = [plain * share // 100 for share in shares]
        with running([self.start(name, f"fewest:{json.dumps(targets)}")]) as (process,):
            found = process.read()
        counts = sorted({count for count in found.get("counts", {}).values() if 0 < count < found["blocks"]})
        self.survey(name, [f"checkpoint:first={count}" for count in counts])

    def run_heat(self, name: str, targets: list[dict[str, Any]], rounds: int) -> None:
        """Run plain, the fastest peers and Elbowroom within each target step by step in turn, and keep all rounds."""
        model = self.models[name]
        budgets = dict.fromkeys(target["budget_bytes"] for target in targets)
        fastest = {budget: find_fastest(model["survey"], budget) for budget in budgets}
        peers = {peer for fitting in fastest.values() for peer in fitting}
        peers |= {target["peer"] for target in targets if "peer" in target}
        others = sorted(peers, key=list(model["survey"]).index)
        compiled = [budget for budget in budgets if any("inductor" in peer for peer in fastest[budget])]
        ours = [f"elbowroom:{budget}" for budget in budgets] + [f"elbowroom-inductor:{budget}" for budget in compiled]
        results: dict[str, Any] = {}
        with running([]) as processes:
            for contender in ["plain", *others, *ours]:  # one by one: a room measures its ops as it starts
                processes.append(self.start(name, contender))
                found = {**processes[-1].read(), "seconds": [], "processor_seconds": [], "mode": []}
                results[contender] = found
                compare_bits(found, results["plain"])
                print(f"{name:16} {contender:28} started: {describe(found)}", flush=True)
            live = [process for process in processes if "failed" not in results[process.contender]]
            for index in range(rounds):
                for process in live if index % 2 == 0 else reversed(live):
                    step = process.step()
                    for key in ("seconds", "processor_seconds", "mode"):
                        results[process.contender][key].append(step[key])
        model["heat"] = {"targets": targets, "contenders": results}
        self.write()
        for contender, found in results.items():
            print(f"{name:16} heat {contender:28} {describe(found)}", flush=True)

    def list_targets(self, name: str, shares: list[int], points: int) -> list[dict[str, Any]]:
        """Return the peaks at which a model's contenders are compared."""
        survey = self.models[name]["survey"]
        plain = survey["plain"]["peak_bytes"]
        targets: list[dict[str, Any]] = [{"share": share, "budget_bytes": plain * share // 100} for share in shares]
        front = [each for each in list_front(survey) if survey[each]["peak_bytes"] < 0.99 * plain]
        chosen = front[:: max(1, -(-len(front) // points))] if points else []
        return targets + [{"peer": peer, "budget_bytes": survey[peer]["peak_bytes"]} for peer in chosen]


def compare_bits(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """Note whether losses and parameters are those of plain PyTorch, and whether buffers are."""
    if "bits" in found and "bits" in plain:
        state, _, buffers = found["bits"].rpartition(" ")
        own, _, own_buffers = plain["bits"].rpartition(" ")
        found |= {"same_bits": state == own, "same_buffers": buffers == own_buffers}


def find_fastest(survey: dict[str, Any], budget_bytes: int) -> list[str]:
    """Return the fastest peer within a peak, and the fastest one with plain PyTorch's bits."""
    fitting = [
        peer
        for peer, found in survey.items()
        if peer != "plain" and found.get("seconds") and found["peak_bytes"] <= budget_bytes
    ]
    fitting.sort(key=lambda peer: min(survey[peer]["seconds"]))
    exact = [peer for peer in fitting if survey[peer].get("same_bits")]
    return list(dict.fromkeys([*fitting[:1], *exact[:1]]))


def describe(found: dict[str, Any]) -> str:
    """Return one line on a contender."""
    if "failed" in found:
        return f"failed: {found['failed'][:120]}"
    seconds = sorted(found["seconds"])
    middle = f"{seconds[len(seconds) // 2]:.2f} s" if seconds else "-"
    return f"{found['peak_bytes'] / 2**20:8.1f} MiB  {middle}  same bits: {found.get('same_bits', '-')}"


def main() -> None:
    """Run what was asked for, print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--peers", nargs="+", choices=[*FAMILIES, "none"], default=list(FAMILIES))
    parser.add_argument("--peaks", nargs="*", type=int, default=[75, 50, 35, 25])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--points", type=int, default=2, help="peers whose peak is a budget, too")
    parser.add_argument("--quick", action="store_true", help="small models, to try this script")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "peers.json")
    parser.add_argument("--picture", type=pathlib.Path)
    parser.add_argument("--table", action="store_true", help="nothing but table and picture")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        profile = f"{folder}/profile.json"
        survey = Survey(options.output, profile, options.quick)
        if not options.table:
            elbowroom.save(elbowroom.probe("cpu"), profile)
            for name in options.models:
                survey.survey(name, list_contenders(MODELS[name], tuple(options.peers)))
                if "checkpoint" in options.peers:
                    survey.survey_fewest(name, options.peaks)
                if options.rounds:
                    survey.run_heat(name, survey.list_targets(name, options.peaks, options.points), options.rounds)
    print_tables(survey.models)
    if options.picture:
        draw(survey.models, options.picture)


if __name__ == "__main__":
    main()

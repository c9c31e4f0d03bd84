"""Does Elbowroom work on this CUDA device, and how well? Everything in one command, at most nine minutes.

Each part runs in processes of its own with a time limit, prints as it goes, and does not stop the others by failing.
This file imports neither torch nor Elbowroom, so that whatever is wrong with them is reported too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PARTS = ("tests", "probe", "bits", "features", "overhead", "models")
NAMES = ("resnet50", "vgg16", "vit_b_16", "gpt2")
SHARES = (0.5, 1.1, 0.0, 0.25, 0.75)
"""How far each budget lies on the way from the smallest that works to the plain peak, or beyond it; in the order of
running, so that what time cuts off is the same for every model."""

WHOLE_SECONDS = 525.0
LIMITS = {
    "machine": 60.0,
    "build": 200.0,
    "tests": 115.0,
    "probe": 60.0,
    "bits": 110.0,
    "feature": 100.0,
    "overhead": 60.0,
    "reference": 45.0,
    "peers": 45.0,
    "budget": 45.0,
}
FEATURES = (("state", ""), ("slices", ""), ("compiled", "inductor"), ("compiled", "aot_eager"), ("addresses", ""))
"""Of features.py, with the compiler's backend."""
BITS_PROCESSES = 4
PEERS = ("checkpoint", "save_on_cpu", "trl", "torchao")
EXACT_BLOCKS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Without it the caching allocator hands out, and counts, cached blocks of up to 1 MiB more than was asked for."""
REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""cuBLAS repeats itself to the last bit only with workspaces of a fixed size."""
LEAST_SECONDS = 12.0
"""A job is not begun with less time than this."""
KILL_SECONDS = 5.0
CPU_PATIENCE = 4.0
"""Limits are so many times as long where a CPU stands in for the card."""


class Check:
    """Runs jobs, and keeps what they report."""

    def __init__(self, device: str, tiny: bool, folder: pathlib.Path, scratch: pathlib.Path) -> None:
        self.device, self.tiny = device, tiny
        self.folder, self.scratch = folder, scratch
        self.patience = 1.0 if device == "cuda" else CPU_PATIENCE
        self.begin = time.monotonic()
        self.results: dict[str, Any] = {"format": "elbowroom-gpu-check", "version": 1, "device": device, "tiny": tiny}
        self.failures: list[str] = []
        self.runs_peers = True
        self._numbers = itertools.count()
        self._writing = threading.Lock()

    def left(self) -> float:
        """Seconds until everything must have ended."""
        return self.patience * WHOLE_SECONDS - (time.monotonic() - self.begin)

    def fail(self, what: str) -> None:
        """Remember and print what did not pass."""
        print(f"NOT PASSED: {what}", flush=True)
        self.failures.append(what)
        self.write()

    def write(self) -> None:
        """The results so far, as JSON."""
        self.results["failures"] = self.failures
        self.results["seconds"] = time.monotonic() - self.begin
        path = self.folder / "gpu.json"
        draft = path.with_suffix(".draft")
        with self._writing:  # parts run side by side: no indentation, since only json's C encoder copies what it writes
            draft.write_text(json.dumps(self.results))
            draft.replace(path)

    def run(self, job: str, label: str, extra: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
        """Run one job in a process of its own. Returns what it reported, with "error" if it did not come to its end."""
        limit = min(self.patience * LIMITS[job], self.left() - KILL_SECONDS)
        if limit < LEAST_SECONDS:
            return {"error": "left out: the nine minutes are over", "left_out": True}
        print(f"\n== {label} (at most {limit:.0f} s, {self.left():.0f} s left)", flush=True)
        result = self.scratch / f"{next(self._numbers)}.json"
        options |= {"device": self.device, "tiny": self.tiny, "profile": str(self.folder / "profile.json")}
        if job == "bits":
            options["seconds"] = 0.8 * limit
        command = [sys.executable, "-u", str(HERE / "jobs.py"), job, json.dumps(options), str(result)]
        begin = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **(extra or {})}, start_new_session=True)
        error = ""
        try:
            code = process.wait(timeout=limit)
            error = f"it ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            error = f"it took longer than {limit:.0f} s"
        finally:
            _end(process)
        found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        if error:
            found.setdefault("error", error)
        found["wall_seconds"] = time.monotonic() - begin
        return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process of ours and whatever it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# Parts ----------------------------------------------------------------------------------------------------------------


def run_build(check: Check) -> None:
    """The extension, compiled. Rooms have the planner's loops compiled, which every later part waits for once."""
    build = check.results["build"] = check.run("build", "compile the extension")
    if "error" in build:
        check.fail(f"build: {build['error']}")


def run_tests(check: Check) -> None:
    """Part 1: the tests under tests/gpu, streams under artificial delays among them."""
    found = check.results["tests"] = check.run("tests", "tests/gpu", REPEATABLE)
    if "error" in found:
        check.fail(f"tests: {found['error']}")
    for name in found.get("failed", ()):
        check.fail(f"test {name}")
    if check.device == "cuda" and not found.get("passed") and not found.get("failed"):
        check.fail("tests: none ran")


def run_probe(check: Check) -> None:
    """Part 2: rates and links."""
    found = check.results["probe"] = check.run("probe", "probe")
    if "error" in found:
        check.fail(f"probe: {found['error']}")


def run_bits(check: Check) -> None:
    """Part 3: bits equal."""
    settings = {**REPEATABLE, **EXACT_BLOCKS}
    processes = BITS_PROCESSES if check.device == "cuda" else 1
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        running = [
            pool.submit(check.run, "bits", f"the same bits as plain PyTorch ({part + 1} of {processes})", settings,
                        part=part, parts=processes) for part in range(processes)
        ]  # fmt: skip
        parts = [each.result() for each in running]
    found = check.results["bits"] = {"cases": [case for part in parts for case in part.get("cases", ())]}
    found["left_out"] = [name for part in parts for name in part.get("left_out", ())]
    for part in parts:
        if "error" in part:
            check.fail(f"bits: {part['error']}")
    for case in found.get("cases", ()):
        if "error" in case:
            check.fail(f"bits of {case['case']}: {case['error'].splitlines()[0]}")
        for budget in case.get("budgets", ()):
            if budget["differences"]:
                check.fail(f"bits of {case['case']} at share {budget['share']} differ: {budget['differences'][:3]}")
            if "planned" not in budget["modes"]:
                check.fail(f"bits of {case['case']} at share {budget['share']}: no step was planned: {budget['notes']}")


def run_features(check: Check) -> None:
    """Part 4: state under one budget, ops in slices, compiled models, planned addresses; each in its own process."""
    found = check.results["features"] = {"shared": {"skipped": "it needs a broker and a second process"}}
    with concurrent.futures.ThreadPoolExecutor(len(FEATURES) if check.device == "cuda" else 1) as pool:
        running = {
            f"{name} {backend}".strip(): pool.submit(
                check.run, "feature", f"{name} {backend}", REPEATABLE if name == "addresses" else
                {**REPEATABLE, **EXACT_BLOCKS}, name=name, backend=backend)
            for name, backend in FEATURES
        }  # fmt: skip
    for label, ended in running.items():
        result = found[label] = ended.result()
        if result.get("left_out") or result.get("skipped"):
            print(f"  {label}: {result.get('error') or result['skipped']}", flush=True)
        elif "error" in result:
            check.fail(f"{label}: {result['error'].splitlines()[0]}")
        elif result.get("plain_differences"):
            print(f"  {label}: plain PyTorch differs from itself; {describe_feature(result)}", flush=True)
        elif result["differences"]:
            check.fail(f"{label}: other bits than without a room: {result['differences'][:3]}")
        elif result["peak_bytes"] > result["budget_bytes"]:
            check.fail(f"{label}: peak {result['peak_bytes']} bytes, budget {result['budget_bytes']}")
        else:
            print(f"  {describe_feature(result)}", flush=True)
    check.write()


def describe_feature(found: dict[str, Any]) -> str:
    """Return one line on a feature that works."""
    budget, peak, offloaded = (mebibytes(found[f"{key}_bytes"]) for key in ("budget", "peak", "offloaded"))
    return (
        f"within {budget}: peak {peak}, {found['seconds']:.4f} s, plain {found['plain_seconds']:.4f} s; "
        f"offloaded {offloaded}, {found['recomputed']} replays, {found['sliced_ops']} ops in slices"
    )


def run_overhead(check: Check) -> None:
    """Part 5: what a room costs where the program sets the pace."""
    found = check.results["overhead"] = check.run("overhead", "overhead of small steps", EXACT_BLOCKS)
    if "error" in found:
        check.fail(f"overhead: {found['error']}")


def run_models(check: Check, names: tuple[str, ...], steps: int) -> None:
    """Part 6: real models, each without Elbowroom and within several budgets."""
    models = check.results["models"] = {name: {"budgets": []} for name in names}
    batches: dict[str, int | None] = dict.fromkeys(names)
    for name in names:
        for _ in range(4):
            found = check.run("reference", f"{name} without Elbowroom", EXACT_BLOCKS, model=name, steps=steps,
                              batch=batches[name])  # fmt: skip
            if not found.get("out_of_memory") or found["batch"] < 2:
                break
            batches[name] = found["batch"] // 2
            print(f"batch {found['batch']} does not fit this device plainly: half of it", flush=True)
        models[name]["reference"] = found
        if "error" in found or "floor_bytes" not in found:
            check.fail(f"{name} without Elbowroom: {found.get('error', 'out of memory')}")
        check.write()
    for name in names:
        if "error" in models[name]["reference"]:
            continue
        if not check.runs_peers:
            continue
        # Not ours, and not needed: what does not work is said in the table, and no reason to fail.
        found = check.run("peers", f"{name}: what a user would do instead", EXACT_BLOCKS, model=name, steps=steps,
                          batch=batches[name], peers=True)  # fmt: skip
        models[name]["reference"] = {**found, **models[name]["reference"]}
        check.write()
    for share in SHARES:
        for name in names:
            _run_budget(check, name, share, models[name], steps, batches[name])


def _run_budget(check: Check, name: str, share: float, model: dict[str, Any], steps: int, batch: int | None) -> None:
    reference = model["reference"]
    if "floor_bytes" not in reference:
        return
    floor, plain = reference["floor_bytes"], reference["plain"]["peak_bytes"]["allocated"]
    budget = floor + int(share * (plain - floor))
    label = f"{name} within {mebibytes(budget)} ({share:.0%} of the way from {mebibytes(floor)} to {mebibytes(plain)})"
    found = check.run("budget", label, EXACT_BLOCKS, model=name, budget_bytes=budget, steps=steps, batch=batch)
    found |= {"share": share, "plain_bytes": plain, "plain_seconds": reference["plain"]["seconds"]}
    found["held"] = find_peak(found) <= found.get("budget_bytes", budget) if find_peak(found) else None
    model["budgets"].append(found)
    if "error" in found:
        check.fail(f"{name} at {share:.0%}: {found['error'].splitlines()[0]}")
    elif not found["held"]:
        check.fail(f"{name} at {share:.0%}: peak {find_peak(found)} bytes, budget {found['budget_bytes']}")
    elif found["modes"][-1] not in ("planned", "plain"):  # plain: all of it fits, so nothing is done
        check.fail(f"{name} at {share:.0%}: the last step was not planned: {found['modes']} {found['notes']}")
    else:
        print(
            f"  forecast {mebibytes(found['forecast']['peak_bytes'])}, measured {mebibytes(find_peak(found))}; "
            f"forecast {found['forecast']['step_seconds']:.4f} s, measured {found['seconds']:.4f} s, "
            f"plain {found['plain_seconds']:.4f} s; overlap {found['overlap']:.0%}",
            flush=True,
        )
    check.write()


def find_peak(found: dict[str, Any]) -> int:
    """Most bytes of all steps that a job metered, captured ones included."""
    return int(max(found.get("peak_bytes", {}).get("allocated", 0), found.get("capture_peak_bytes", 0)))


# The table ------------------------------------------------------------------------------------------------------------


def mebibytes(nbytes: float) -> str:
    """Bytes for a table."""
    return f"{nbytes / 2**20:,.0f} MiB"


def print_tables(results: dict[str, Any]) -> None:
    """What was found, in short."""
    machine, tests, bits = (results.get(part, {}) for part in ("machine", "tests", "bits"))
    print(f"\n{'=' * 118}\n{machine.get('device', '?')}, torch {machine.get('torch', '?')}, CUDA {machine.get('cuda')}")
    if tests:
        print(f"tests: {tests.get('passed', 0)} passed, {len(tests.get('failed', ()))} failed, "
              f"{tests.get('skipped', 0)} skipped")  # fmt: skip
    for link in results.get("probe", {}).get("profile", {}).get("links", ()):
        print(f"link {link['upper']} to {link['lower']}: out {link['out_bytes_per_second'] / 1e9:.1f} GB/s, "
              f"back {link['back_bytes_per_second'] / 1e9:.1f} GB/s, half-duplex: {link['half_duplex']}")  # fmt: skip
    if bits:
        cases = bits.get("cases", ())
        same = [c for c in cases if c.get("budgets") and not any(b["differences"] for b in c["budgets"])]
        unsteady = [c["case"] for c in cases if c.get("plain_differences")]
        print(f"bits: the same in {len(same)} of {len(cases)} models; plain PyTorch differs from itself in "
              f"{unsteady or 'none'}; no time for {bits.get('left_out') or 'none'}")  # fmt: skip
    for name, feature in results.get("features", {}).items():
        words = feature.get("skipped") or feature.get("error") or describe_feature(feature)
        print(f"{name}: {words.splitlines()[0]}")
    for name, row in results.get("overhead", {}).items():
        if isinstance(row, dict):
            print(f"overhead of {name}: {row['ratio']:.3f} x plain ({row['plain_seconds']:.4f} s), {row['mode']}")
    for name, model in results.get("models", {}).items():
        _print_model(name, model)


def _print_model(name: str, model: dict[str, Any]) -> None:
    reference = model.get("reference", {})
    plain = reference.get("plain")
    if plain is None:
        print(f"\n{name}: {reference.get('error', 'not measured')}")
        return
    plain_seconds = plain["seconds"]
    print(f"\n{name}, batch {reference['batch']}: budgets and peaks in MiB, seconds a step\n"
          f"  {'':22}{'budget':>9}{'forecast':>10}{'measured':>10}{'held':>6}{'forecast':>11}{'measured':>10}"
          f"{'x plain':>9}{'offloaded':>11}{'stall':>9}{'overlap':>9}{'replays':>9}")  # fmt: skip
    for key in ("plain", *PEERS):
        label = f"{key} {reference.get('checkpointed_blocks', '')}" if key == "checkpoint" else key
        row = reference.get(key, {})
        if "seconds" in row:
            print(f"  {label:22}{'':>9}{'':>10}{_number(row['peak_bytes']['allocated']):>10}{'':>6}{'':>11}"
                  f"{row['seconds']:>10.4f}{row['seconds'] / plain_seconds:>9.3f}")  # fmt: skip
        else:
            print(f"  {label:22}{row.get('error', 'not measured')[:80]}")
    for row in sorted(model["budgets"], key=lambda row: row["share"]):
        label = f"Elbowroom, {row['share']:.0%}"
        if "forecast" not in row:
            print(f"  {label:22}{row.get('error', 'not measured').splitlines()[0][:90]}")
            continue
        forecast = row["forecast"]
        print(f"  {label:22}{_number(row['budget_bytes']):>9}{_number(forecast['peak_bytes']):>10}"
              f"{_number(find_peak(row)):>10}{'yes' if row['held'] else 'NO':>6}{forecast['step_seconds']:>11.4f}"
              f"{row['seconds']:>10.4f}{row['seconds'] / plain_seconds:>9.3f}{_number(row['offloaded_bytes']):>11}"
              f"{row['exposed_seconds']:>9.4f}{row['overlap']:>9.0%}{row['recomputed']:>9}")  # fmt: skip


def _number(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f}"


def find_revision() -> str:
    """The commit that is checked out; "" where that cannot be told."""
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip()


def main() -> int:
    """Run all parts, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="folder for gpu.json and profile.json")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of: " + ",".join(PARTS))
    parser.add_argument("--models", default=",".join(NAMES), help="some of: " + ",".join(NAMES))
    parser.add_argument("--profile", help="file with the profile of this device, so that it is not probed")
    parser.add_argument("--without-peers", action="store_true", help="only plain PyTorch beside rooms")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each contender")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try this script")
    parser.add_argument("--tiny", action="store_true", help="small models, to try this script")
    options = parser.parse_args()
    parts, names = tuple(options.parts.split(",")), tuple(options.models.split(","))
    for given, known in ((parts, PARTS), (names, NAMES)):
        if not set(given) <= set(known):
            parser.error(f"{sorted(set(given) - set(known))}: there are {', '.join(known)}")
    folder = pathlib.Path(options.output or os.environ.get("OUT") or ROOT / "benchmarks" / "results").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="elbowroom-gpu-") as scratch:
        check = Check(options.device, options.tiny, folder, pathlib.Path(scratch))
        check.runs_peers = not options.without_peers
        try:
            if options.profile:
                shutil.copy(options.profile, folder / "profile.json")
            run_parts(check, parts, names, options.steps, probes=not options.profile)
        except KeyboardInterrupt:
            check.fail("interrupted")
        check.write()
    print_tables(check.results)
    print(f"\n{folder / 'gpu.json'}; {check.results['seconds']:.0f} s")
    for failure in check.failures:
        print(f"NOT PASSED: {failure}")
    print("all passed" if not check.failures else f"{len(check.failures)} not passed", flush=True)
    return 1 if check.failures else 0


def run_parts(check: Check, parts: tuple[str, ...], names: tuple[str, ...], steps: int, *, probes: bool) -> None:
    """The parts asked for, in order; the probe too if there is no profile, since the later ones need one."""
    machine = check.results["machine"] = check.run("machine", "this machine")
    check.results["revision"] = find_revision()
    if "error" in machine:
        check.fail(f"this machine: {machine['error']}")
        return
    print(json.dumps(machine), flush=True)
    run_build(check)
    if probes and set(parts) - {"tests"}:
        run_probe(check)
        if "error" in check.results["probe"]:
            return
    untimed = {"tests": run_tests, "bits": run_bits, "features": run_features}
    # Nothing is timed in these, and much of their time goes into planning: they share the device.
    with concurrent.futures.ThreadPoolExecutor(len(untimed) if check.device == "cuda" else 1) as pool:
        for running in [pool.submit(run, check) for part, run in untimed.items() if part in parts]:
            running.result()
    if "overhead" in parts:
        run_overhead(check)
    if "models" in parts:
        run_models(check, names, steps)


if __name__ == "__main__":
    sys.exit(main())

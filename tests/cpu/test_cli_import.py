"""`elbowroom import`: a foreign log becomes files that the other commands take."""

from __future__ import annotations

import json
import pathlib

import elbowroom
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.scripts.exit_codes import MISUSED
from tests.cpu.test_cli import document, fail, succeed
from tests.pure.test_importers import STEP, call, constant, kernels, release, write

KIB = 1024


def make_log(folder: pathlib.Path) -> pathlib.Path:
    """A chain forward and backward."""
    size = 64 * KIB
    forward = [call(f"forward{index}", [f"x{index}", "w"], {f"x{index + 1}": size}, 9_000_000) for index in range(6)]
    backward = [
        [*call(f"backward{index}", [f"g{index + 1}", f"x{index}"], {f"g{index}": size}, 9_000_000),
         *release(f"x{index}", f"g{index + 1}")]
        for index in reversed(range(6))
    ]  # fmt: skip
    first = [*constant("w", KIB), *call("load", ["w"], {"x0": size}), *forward[0]]
    return write(folder, first, *forward[1:], [*call("loss", ["x6"], {"g6": size}), *release("x6")], *backward)


def test_import_plan_simulate(tmp_path: pathlib.Path) -> None:
    log = make_log(tmp_path)
    trace_file, costs_file, plan_file = (tmp_path / name for name in ("trace.json.gz", "costs.json.gz", "plan.json"))
    shown = succeed("import", "dtr", log, "-o", trace_file, "--costs", costs_file)
    for word in ("step, imported from dtr", "plain peak", "as logged", str(trace_file), str(costs_file)):
        assert word in shown
    found = document("import", "dtr", log)
    trace, costs = elbowroom.load(Trace, trace_file), elbowroom.load(Costs, costs_file)
    assert found["ops"] == len(trace.ops) and found["needs"] == len(trace.needs) > 0
    assert found["digest"] == costs.trace_digest
    assert found["output"] is None and found["costs"] is None
    costs_given = ("--costs", costs_file)
    planned = document(
        "plan", trace_file, *costs_given, "--budget", "70%peak", "--strategy", "offload_all", "-o", plan_file
    )
    assert planned["plain_peak_bytes"] == found["plain_peak_bytes"]
    assert planned["plain_step_seconds"] == found["plain_step_seconds"]
    assert planned["forecast_peak_bytes"] <= planned["budget_bytes"] < found["plain_peak_bytes"]
    assert document("simulate", trace_file, plan_file, *costs_given)["fits"]


def test_import_of_kernels_for_another_machine(tmp_path: pathlib.Path) -> None:
    kernels(tmp_path, *STEP)
    costs_file = tmp_path / "costs.json"
    found = document("import", "g10", tmp_path, "--costs", costs_file, "--hardware", "v100", "--release", "last_use")
    assert found["format"] == "g10" and found["plain_peak_bytes"] == 680
    assert "PCI Express 3.0" in json.loads(costs_file.read_text())["value"]["link"]["source"]


def test_what_cannot_be_imported(tmp_path: pathlib.Path) -> None:
    log = make_log(tmp_path)
    assert "there are: dtr, g10" in fail(MISUSED, "import", "xla", log)
    assert "No such file" in fail(MISUSED, "import", "dtr", tmp_path / "missing")
    assert "is not a folder" in fail(MISUSED, "import", "dtr", log, "-o", tmp_path / "no" / "trace.json")
    assert "is not a folder" in fail(MISUSED, "import", "dtr", log, "--costs", tmp_path / "no" / "costs.json")
    assert "line 1: after 0 kernels" in fail(MISUSED, "import", "g10", log)
    assert "no shipped profile is called" in fail(MISUSED, "import", "dtr", log, "--hardware", "abacus")
    log.write_text(log.read_text()[:-20])
    assert "or truncated" in fail(MISUSED, "import", "dtr", log)

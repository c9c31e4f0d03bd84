"""The commands `compare` and `max-batch`: for people, for programs, as pictures, interrupted, and called wrongly."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import pathlib
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner, Result

import elbowroom
from elbowroom.cli.lists import read_budgets, read_strategies
from elbowroom.cli.main import make_app
from elbowroom.errors import InternalError, UnknownMember, UsageError
from elbowroom.hardware.shipped import load_shipped
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.trace import Trace
from elbowroom.planner.comparison import strategies_compared
from elbowroom.planner.problem import list_strategies
from elbowroom.scripts.exit_codes import FAILED, INFEASIBLE, INTERRUPTED, MISUSED

STRATEGIES = "auto,keep_all,offload_all"
BUDGETS = "90%peak:100%peak:2"


def call(*arguments: object) -> Result:
    """Run the program in this process."""
    return CliRunner().invoke(make_app(), [str(argument) for argument in arguments])


def succeed(*arguments: object) -> str:
    """Run the program; what it printed."""
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def document(*arguments: object) -> dict[str, Any]:
    """Run the program with `--json`; its document."""
    found: dict[str, Any] = json.loads(succeed(*arguments, "--json"))
    assert found["command"] == arguments[0] and found.get("complete", True)
    return found


def fail(code: int, *arguments: object) -> str:
    """Run the program into an error of ours; what it said."""
    result = call(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A file with the trace of a small model."""
    path = tmp_path_factory.mktemp("traces") / "trace.json.gz"
    small = ("--batch", "8", "--image-size", "96", "--optimizer", "sgd")
    succeed("capture", "torchvision:squeezenet1_1", *small, "-o", path)
    return path


@pytest.fixture
def spec(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A perceptron whose activations outweigh its weights, as a function in the current folder."""
    (tmp_path / "mine_for_batches.py").write_text(
        "import torch\n"
        "def build(batch=8, device='cpu'):\n"
        "    print('a word on stdout')\n"
        "    layers = [m for _ in range(3) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]\n"
        "    model = torch.nn.Sequential(*layers)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    x = torch.randn(batch, 64)\n"
        "    def step():\n"
        "        loss = model(x).mean(); loss.backward(); optimizer.step(); optimizer.zero_grad(); return loss\n"
        "    return model, optimizer, step\n"
    )
    monkeypatch.chdir(tmp_path)
    return "mine_for_batches:build"


# -- lists ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20%peak:100%peak:5", (200, 400, 600, 800, 1000)),
        ("20%peak:1%:2", (200, 1000)),
        ("100:200:3", (100, 150, 200)),
        ("60%peak,100,1KB", (100, 600, 1000)),
        ("50%peak,500,300:500:2", (300, 500)),
        ("2%,1K", (1024, 2000)),
        ("100:100:9", (100,)),
        (" 7 B , 1 : 3 : 3 ", (1, 2, 3, 7)),
    ],
)
def test_budgets(text: str, expected: tuple[int, ...]) -> None:
    assert read_budgets(text, device_bytes=100_000, peak_bytes=1000) == expected


@pytest.mark.parametrize(
    "text", ["", "much", "20%,", "20%:100%", "20%:100%:1", "20%:100%:x", "20%:100%:9:9", "100%:20%:9", "5%:110%:3",
             "0%:50%:2", "1:2:100000"],
)  # fmt: skip
def test_budgets_that_mean_nothing(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--budgets: "):
        read_budgets(text, device_bytes=1000, peak_bytes=1000)


def test_shares_of_what_is_not_known() -> None:
    with pytest.raises(UsageError, match=r"--budgets: '60%' is a share of the device"):
        read_budgets("60%", peak_bytes=1000)


def test_strategies() -> None:
    assert read_strategies("all") == list_strategies()
    assert read_strategies("keep_all, auto,keep_all") == ("keep_all", "auto")
    assert read_strategies("keep_all,all") == ("keep_all", *(name for name in list_strategies() if name != "keep_all"))


def test_options_of_strategies_stay_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elbowroom.planner.options.find_strategy", lambda text: None)
    found = read_strategies("auto,one:score=doa,mode=strict,two,three:size=4,four")
    assert found == ("auto", "one:score=doa,mode=strict", "two", "three:size=4", "four")


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("", UsageError, "names no strategy"),
        (" , ", UsageError, "names no strategy"),
        ("auto,wishful", UnknownMember, "keep_all"),
        ("keep_all:speed=9", UsageError, "speed"),
        ("keep_all,speed=9", UsageError, "speed=9"),
        ("speed=9", UnknownMember, "speed=9"),
    ],
)
def test_strategies_that_mean_nothing(text: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_strategies(text)


# -- compare ----------------------------------------------------------------------------------------------------------


def test_compare(trace: pathlib.Path, tmp_path: pathlib.Path) -> None:
    arguments = ("compare", trace, "--hardware", "v100", "--strategies", STRATEGIES, "--budgets", BUDGETS)
    found = document(*arguments, "-o", tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text()) == found
    entries = found["entries"]
    peak = found["plain_peak_bytes"]
    assert [entry["budget_bytes"] for entry in entries] == [int(peak * 0.9)] * 3 + [peak] * 3
    assert [entry["strategy"] for entry in entries] == STRATEGIES.split(",") * 2
    assert [entry["fits"] for entry in entries] == [True, False, True, True, True, True]
    assert entries[1]["plan"] is None and entries[1]["needed_bytes"] == peak
    planned = document("plan", trace, "--hardware", "v100", "--budget", entries[0]["budget_bytes"])
    made = entries[0]["plan"]
    assert made["step_seconds"] == planned["forecast_step_seconds"] and made["slowdown"] == planned["slowdown"]
    assert made["peak_bytes"] == planned["forecast_peak_bytes"]
    assert found["smallest_budget_bytes"] == planned["smallest_budget_bytes"]
    assert made["gap"] == pytest.approx(made["step_seconds"] / entries[0]["bound_seconds"] - 1)
    assert {each["budget_bytes"] for each in found["front"]} <= {entry["budget_bytes"] for entry in entries}


def test_compare_for_people(trace: pathlib.Path) -> None:
    result = call("compare", trace, "--hardware", "v100", "--strategies", STRATEGIES, "--budgets", BUDGETS)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert "squeezenet1_1 on NVIDIA Tesla V100" in lines[0]
    assert "plain step" in lines[1] and "smallest budget that works" in lines[1]
    (refused,) = (line for line in lines if "does not fit" in line)
    assert "keep_all" in refused and "needs" in refused
    assert sum("bound" in line and "%" in line for line in lines) == 2  # one for each budget
    for name in STRATEGIES.split(","):
        assert sum(f"  {name} " in line for line in lines) == 2
    assert max(map(len, lines)) <= 80
    assert "auto within" in result.stderr and "(1 of 6)" in result.stderr and "(6 of 6)" in result.stderr


def test_compare_below_what_whole_ops_need(trace: pathlib.Path) -> None:
    """With `--slices`, as `elbowroom plan` plans it: the same forecast, above the bound of these slices."""
    arguments = ("compare", trace, "--hardware", "v100", "--strategies", "offload_all")
    needed = document(*arguments, "--budgets", "100%peak")["smallest_budget_bytes"]
    budget = needed - needed // 20
    (refused,) = document(*arguments, "--budgets", budget)["entries"]
    assert not refused["fits"] and refused["bound_seconds"] is None
    (entry,) = document(*arguments, "--budgets", budget, "--slices", "any")["entries"]
    planned = document(
        "plan", trace, "--hardware", "v100", "--budget", budget, "--strategy", "offload_all", "--slices", "any"
    )
    assert planned["ops_in_slices"] > 0 and entry["fits"]
    assert entry["plan"]["step_seconds"] == planned["forecast_step_seconds"] >= entry["bound_seconds"]
    assert entry["plan"]["peak_bytes"] == planned["forecast_peak_bytes"] <= budget
    assert "choice of ops to slice" in fail(MISUSED, *arguments, "--slices", "all")


@pytest.mark.parametrize("ending", [".svg", ".png", ".pdf"])
def test_pictures_of_the_front(trace: pathlib.Path, tmp_path: pathlib.Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    front = (
        "compare",
        trace,
        "--hardware",
        "v100",
        "--strategies",
        "keep_all,offload_all",
        "--budgets",
        BUDGETS,
        "--picture",
    )
    paths = [tmp_path / f"{name}{ending}" for name in ("first", "second")]
    for path in paths:
        assert f"written to {path}" in succeed(*front, path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert first.startswith({".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}[ending])
    if ending == ".svg":
        text = first.decode()
        for words in (
            "keep_all",
            "offload_all",
            "bound",
            "Pareto front",
            "smallest feasible",
            "torchvision:squeezenet",
        ):
            assert f">{words}" in text


def test_pictures_need_matplotlib(trace: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    for command in (("compare", trace), ("max-batch", "torchvision:resnet18")):
        said = fail(MISUSED, *command, "--hardware", "v100", "--picture", tmp_path / "front.svg")
        assert "pip install 'elbowroom[pictures]'" in said
    assert not (tmp_path / "front.svg").exists()


def test_one_file_is_not_for_two_results(trace: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    both = ("--picture", tmp_path / "both.svg", "-o", tmp_path / "." / "both.svg")
    for command in (("compare", trace, "--hardware", "v100"), ("max-batch", "torchvision:resnet18"), ("layout", trace)):
        assert "it is given for two results" in fail(MISUSED, *command, *both)
    assert "one of the files that are read" in fail(
        MISUSED, "layout", tmp_path / "a.svg", "--picture", tmp_path / "a.svg"
    )
    assert not (tmp_path / "both.svg").exists()


def interrupt_after(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    attempt, counter = strategies_compared.attempt, itertools.count()

    def stop(*arguments: Any, **options: Any) -> Any:
        if next(counter) == count:
            raise error
        return attempt(*arguments, **options)

    monkeypatch.setattr(strategies_compared, "attempt", stop)
    monkeypatch.setattr("elbowroom.planner.comparison.batches.attempt", stop)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), INTERRUPTED), (InternalError("a bug"), FAILED)])
def test_stopped_in_the_middle_it_shows_what_there_is(
    trace: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    arguments = ("compare", trace, "--hardware", "v100", "--strategies", STRATEGIES, "--budgets", BUDGETS)
    interrupt_after(monkeypatch, 4, error)
    result = call(*arguments, "--json", "-o", tmp_path / "results.json")
    assert result.exit_code == code
    found = json.loads(result.stdout)
    assert len(found["entries"]) == 4 and not found["complete"]
    assert json.loads((tmp_path / "results.json").read_text()) == found
    assert ("interrupted" if code == INTERRUPTED else "a bug") in result.stderr
    monkeypatch.undo()
    interrupt_after(monkeypatch, 1, error)
    result = call(*arguments)
    assert result.exit_code == code and "  auto " in result.stdout and "keep_all" not in result.stdout
    monkeypatch.undo()
    interrupt_after(monkeypatch, 0, error)
    fail(code, *arguments)


def test_an_interrupted_search_ends_the_comparison(trace: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("elbowroom.planner.searching.choice_search._search", search)
    strategies = ("--strategies", "offload_all,auto,tensile", "--budgets", "90%peak")
    result = call("compare", trace, "--hardware", "v100", *strategies)
    assert result.exit_code == INTERRUPTED
    assert "offload_all" in result.stdout and " auto " not in result.stdout and "tensile" not in result.stdout


# -- max-batch --------------------------------------------------------------------------------------------------------


def test_max_batch(spec: str, tmp_path: pathlib.Path) -> None:
    arguments = ("max-batch", spec, "--memory", "2MiB", "--hardware", "v100")
    found = document(*arguments, "-o", tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text()) == found
    assert found["memory_bytes"] == 2 << 20 and found["host_bytes"] > 1 << 30
    trials = {trial["batch"]: trial for trial in found["trials"]}
    largest, plain = found["largest_batch"], found["largest_plain_batch"]
    assert 1 < plain < largest
    for batch, fits, fits_plain in (
        (plain, True, True), (plain + 1, True, False), (largest, True, False), (largest + 1, False, False),
    ):  # fmt: skip
        assert (trials[batch]["fits"], trials[batch]["fits_plain"]) == (fits, fits_plain)
        # What was found is what `plan` says of each batch by itself.
        call_plan = ("plan", spec, "--batch", batch, "--hardware", "v100", "--budget", "2MiB")
        assert call(*call_plan).exit_code == (0 if fits else INFEASIBLE)
        assert call(*call_plan, "--strategy", "keep_all").exit_code == (0 if fits_plain else INFEASIBLE)
    best = max(trials.values(), key=lambda trial: trial["samples_per_second"])
    assert trials[found["fastest_batch"]]["samples_per_second"] == best["samples_per_second"] > 0
    assert found["fastest_plain_batch"] <= plain


def test_max_batch_for_people(spec: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "rate.svg"
    arguments = ("max-batch", spec, "--memory", "2MiB", "--hardware", "v100", "--strategy", "offload_all")
    result = call(*arguments, "--picture", path)
    assert result.exit_code == 0, result.output
    lines = result.stdout.replace("a word on stdout\n", "").splitlines()
    assert "within 2.0 MiB on NVIDIA Tesla V100" in lines[0]
    for words in ("largest batch ", "largest batch, plain", "fastest batch ", "fastest batch, plain"):
        assert sum(line.startswith(words) for line in lines) == 1
    assert sum("one more does not fit" in line for line in lines) == 2
    assert sum(line.count("too large") == 2 for line in lines) >= 1
    assert max(len(line) for line in lines if not line.startswith("written to")) <= 80
    assert result.stderr.count("captured on cpu but priced for") == 1
    text = path.read_text()
    for words in ("with Elbowroom (offload_all)", "plain", "samples per second", "fastest: "):
        assert f">{words}" in text


def test_max_batch_takes_the_whole_device_where_nothing_is_said(spec: str, tmp_path: pathlib.Path) -> None:
    profile = elbowroom.load(HardwareProfile, _small_device(tmp_path))
    given = ("max-batch", spec, "--hardware", _small_device(tmp_path), "--strategy", "offload_all")
    found = document(*given)
    assert found["memory_bytes"] == profile.tiers[0].capacity_bytes == 1 << 20
    half = document(*given, "--memory", "50%")
    assert half["memory_bytes"] == 1 << 19 and half["largest_batch"] < found["largest_batch"]


def _small_device(folder: pathlib.Path) -> pathlib.Path:
    profile = load_shipped("v100")
    device = dataclasses.replace(profile.tiers[0], capacity_bytes=1 << 20)
    elbowroom.save(dataclasses.replace(profile, tiers=(device, *profile.tiers[1:])), folder / "small.json")
    return folder / "small.json"


def test_shares_are_of_the_device_of_the_hardware(trace: pathlib.Path, tmp_path: pathlib.Path) -> None:
    given = ("--hardware", "v100", "--strategies", "keep_all")
    whole = load_shipped("v100").tiers[0].capacity_bytes
    found = document("compare", trace, "--budgets", "50%:100%:2,100%peak", *given)
    assert [entry["budget_bytes"] for entry in found["entries"]] == [found["plain_peak_bytes"], whole // 2, whole]
    planned = call("plan", trace, "--budget", "50%", "--hardware", "v100", "--json")
    assert json.loads(planned.stdout)["budget_bytes"] == whole // 2
    assert f"({whole // 2} bytes), a share of device memory" in planned.stderr
    costs = tmp_path / "costs.json"
    elbowroom.save(elbowroom.price(elbowroom.load(Trace, trace), load_shipped("v100")), costs)
    assert "a share of the device" in fail(MISUSED, "plan", trace, "--budget", "50%", "--costs", costs)
    again = document("plan", trace, "--budget", "50%", "--costs", costs, "--hardware", "v100")
    assert again["budget_bytes"] == whole // 2
    assert "peak of the step without a plan" in fail(
        MISUSED, "max-batch", "torchvision:resnet18", "--hardware", "v100", "--memory", "50%peak"
    )


def test_refused_cells_are_empty_and_say_why(trace: pathlib.Path) -> None:
    arguments = ("compare", trace, "--hardware", "v100", "--budgets", BUDGETS, "--strategies", "exact:most_gaps=0,auto")
    found = document(*arguments)
    refused, planned = found["entries"][:2]
    assert not refused["fits"] and refused["needed_bytes"] is None and "small traces" in refused["refusal"]
    assert planned["fits"] and planned["refusal"] is None
    shown = succeed(*arguments)
    assert "refused" in shown and "exact:most_gaps=0 refused 1 of 2 budgets: exact is for small traces" in shown


def test_max_batch_of_models_that_refuse_one_sample(spec: str, tmp_path: pathlib.Path) -> None:
    """Batch norm over one value a channel."""
    source = (tmp_path / "mine_for_batches.py").read_text()
    (tmp_path / "mine_with_norms.py").write_text(source.replace("torch.nn.GELU()", "torch.nn.BatchNorm1d(64)"))
    given = ("--memory", "1MiB", "--hardware", "v100", "--strategy", "keep_all")
    found = document("max-batch", "mine_with_norms:build", *given)
    assert found["trials"][0]["batch"] == 2 and found["largest_batch"] == found["largest_plain_batch"]


def test_max_batch_stopped_in_the_middle(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(monkeypatch, 3, KeyboardInterrupt())
    result = call("max-batch", spec, "--memory", "2MiB", "--hardware", "v100", "--json")
    assert result.exit_code == INTERRUPTED
    found = json.loads(result.stdout)
    assert len(found["trials"]) == 3 and not found["complete"]
    monkeypatch.undo()
    interrupt_after(monkeypatch, 3, KeyboardInterrupt())
    result = call("max-batch", spec, "--memory", "2MiB", "--hardware", "v100")
    assert "whether one more fits was not tried" in result.stdout


def test_not_even_one_sample_fits(spec: str) -> None:
    result = call("max-batch", spec, "--memory", "64KiB", "--hardware", "v100", "--json")
    assert result.exit_code == INFEASIBLE and result.stdout == ""
    assert "65536 bytes" in result.stderr and "not even with a batch of 1" in result.stderr


# -- calls that cannot mean anything ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "no-such-file.json.gz", "--hardware", "v100"), "no-such-file"),
        (("compare", "TRACE", "--hardware", "rtx9999"), "rtx3090"),
        (("compare", "TRACE", "--budgets", "20%:"), "--budgets"),
        (("compare", "TRACE", "--strategies", "wishful"), "keep_all"),
        (("compare", "TRACE", "--batch", "4"), "--batch"),
        (("compare", "TRACE", "--picture", "front.gif"), ".svg"),
        (("compare", "TRACE", "--picture", "no/such/folder/front.svg"), "no/such/folder"),
        (("compare", "TRACE", "-o", "no/such/folder/results.json"), "no/such/folder"),
        (("max-batch", "TRACE", "--memory", "1GiB"), "is a file"),
        (("max-batch", "resnet18", "--memory", "1GiB", "--hardware", "v100"), "names no workload"),
        (("max-batch", "torchvision:resnet5000", "--hardware", "v100"), "resnet50"),
        (("max-batch", "torchvision:resnet18", "--hardware", "rtx9999"), "rtx3090"),
        (("max-batch", "torchvision:resnet18", "--memory", "much"), "--memory"),
        (("max-batch", "torchvision:resnet18", "--memory", "120%"), "--memory"),
        (("max-batch", "torchvision:resnet18", "--strategy", "wishful"), "keep_all"),
        (("max-batch", "torchvision:resnet18", "--picture", "rate.gif"), ".svg"),
        (("max-batch", "torchvision:resnet18", "-o", "no/such/folder/results.json"), "no/such/folder"),
    ],
)
def test_what_cannot_mean_anything(trace: pathlib.Path, arguments: tuple[str, ...], words: str) -> None:
    assert words in fail(MISUSED, *(trace if each == "TRACE" else each for each in arguments))

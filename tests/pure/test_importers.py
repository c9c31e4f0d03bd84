"""Imported logs: plain peak and time are those of a walk over the log, every block may be away, bad logs are refused.

With ELBOWROOM_DTR_LOGS (a folder of the DTR prototype's logs) and ELBOWROOM_G10 (one in which the G10 artifact was run)
the real files are walked too.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.errors import TraceError, UnknownMember, UsageError
from elbowroom.importers import Imported, LoggedRelease, list_formats, read_log
from elbowroom.importers._log import MOST_BYTES
from elbowroom.importers.g10 import CYCLES_PER_SECOND
from elbowroom.ir.check import check_trace
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import PERSISTENT_ROLES, Role
from elbowroom.planner.problem import pose
from elbowroom.simulator.simulate import simulate
from tests.generators import make_link

Line = dict[str, Any]


def plain(imported: Imported) -> Forecast:
    """The step if nothing moves."""
    digest = imported.costs.trace_digest
    nothing = Plan(trace_digest=digest, strategy="keep_all", budget_bytes=0, decisions=(), segments=())
    return simulate(imported.trace, imported.costs, nothing)


# -- DTR: writing and walking a log -----------------------------------------------------------------------------------


def constant(name: str, nbytes: object) -> list[Line]:
    return [{"INSTRUCTION": "CONSTANT", "NAME": name}, {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(nbytes)}]


def call(
    name: str, arguments: Sequence[str], results: dict[str, object], time: object = 1000, **views: int
) -> list[Line]:
    """An op; `views` says of which argument a result is a view."""
    lines: list[Line] = [
        {"INSTRUCTION": "CALL", "NAME": name, "ARGS": list(arguments), "RESULT": list(results), "TIME": str(time)}
    ]
    for result, nbytes in results.items():
        lines.append({"INSTRUCTION": "MEMORY", "NAME": result, "MEMORY": str(nbytes)})
        lines.append({"INSTRUCTION": "ALIAS", "NAME": result, "ALIAS": str(views.get(result, -1))})
    return lines


def mutate(name: str, arguments: Sequence[str], positions: Sequence[int], time: int = 1000) -> list[Line]:
    return [{"INSTRUCTION": "MUTATE", "NAME": name, "ARGS": list(arguments), "MUTATE": list(positions), "TIME": time}]


def release(*names: str) -> list[Line]:
    return [{"INSTRUCTION": "RELEASE", "NAME": name} for name in names]


def copy(target: str, source: str, kind: str = "COPY") -> list[Line]:
    return [{"INSTRUCTION": kind, "DST": target, "SRC": source}]


def annotate(word: str) -> list[Line]:
    return [{"INSTRUCTION": "ANNOTATE", "ANNOTATION": word}]


def write(folder: pathlib.Path, *parts: list[Line]) -> pathlib.Path:
    path = folder / "step.log"
    path.write_text("".join(json.dumps(line) + "\n" for part in parts for line in part))
    return path


def walk(path: pathlib.Path) -> tuple[int, int]:
    """Peak bytes and nanoseconds, by going through the log with a counter for each storage; constants stay."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    storage_of: dict[str, int] = {}
    sizes: list[int] = []
    counts: list[int] = []
    lasting: set[int] = set()
    live = peak = nanoseconds = 0

    def make(name: str, nbytes: int) -> None:
        nonlocal live, peak
        storage_of[name] = len(sizes)
        sizes.append(nbytes)
        counts.append(1)
        live += nbytes

    def drop(storage: int) -> None:
        nonlocal live
        counts[storage] -= 1
        if not counts[storage] and storage not in lasting:
            live -= sizes[storage]

    facts = {(line["NAME"], kind): int(line[kind]) for line in lines for kind in ("MEMORY", "ALIAS")
             if line["INSTRUCTION"] == kind}  # fmt: skip
    for line in lines:
        kind = line["INSTRUCTION"]
        if kind == "CONSTANT":
            make(line["NAME"], facts[line["NAME"], "MEMORY"])
            lasting.add(storage_of[line["NAME"]])
        elif kind == "CALL":
            nanoseconds += int(line["TIME"])
            for name in line["RESULT"]:
                alias = facts[name, "ALIAS"]
                if alias < 0:
                    make(name, facts[name, "MEMORY"])
                else:
                    storage_of[name] = storage_of[line["ARGS"][alias]]
                    counts[storage_of[name]] += 1
        elif kind == "MUTATE":
            nanoseconds += int(line["TIME"])
            old = [(name, storage_of[name]) for name in (line["ARGS"][each] for each in line["MUTATE"])]
            for name, storage in old:
                make(name, sizes[storage])
            peak = max(peak, live)
            for _, storage in old:
                drop(storage)
        elif kind in ("COPY", "COPY_FROM"):
            storage = storage_of[line["SRC"]]
            counts[storage] += 1
            if kind == "COPY_FROM":
                drop(storage_of[line["DST"]])
            storage_of[line["DST"]] = storage
        elif kind == "RELEASE":
            drop(storage_of[line["NAME"]])
        peak = max(peak, live)
    return peak, nanoseconds


@some.composite
def logs(draw: some.DrawFn) -> list[list[Line]]:
    """Random steps that use every instruction."""
    parts = [annotate("START")]
    names = [f"c{index}" for index in range(draw(some.integers(1, 3)))]
    for name in names:
        parts.append(constant(name, draw(some.integers(0, 900))))
    held = list(names)
    for step in range(draw(some.integers(1, 14))):
        arguments = draw(some.lists(some.sampled_from(held), min_size=1, max_size=3))
        kind = draw(some.sampled_from(["call", "call", "call", "view", "mutate", "copy", "copy_from", "constant"]))
        fresh = f"x{step}"
        time = draw(some.integers(0, 5000))
        if kind == "call":
            results = {f"{fresh}{letter}": draw(some.integers(0, 5000)) for letter in "ab"[: draw(some.integers(1, 2))]}
            parts.append(call(f"op{step}", arguments, dict(results), time))
            held += results
        elif kind == "view":
            parts.append(
                call("view", arguments, {fresh: 0}, time, **{fresh: draw(some.integers(0, len(arguments) - 1))})
            )
            held.append(fresh)
        elif kind == "mutate":
            chosen = sorted({arguments.index(name) for name in arguments})[: draw(some.integers(1, 2))]
            parts.append(mutate("op_", arguments, chosen, time))
        elif kind == "copy":
            parts.append(copy(fresh, arguments[0]))
            held.append(fresh)
        elif kind == "copy_from":
            parts.append(copy(arguments[-1], arguments[0], "COPY_FROM"))
        else:
            parts.append(constant(fresh, draw(some.integers(0, 300))))
            held.append(fresh)
        for name in draw(some.lists(some.sampled_from(held), max_size=2, unique=True)):
            if len(held) > 1:
                held.remove(name)
                parts.append(release(name))
    return [*parts, call("last", held[:1], {"end": 1})]


@given(parts=logs())
def test_plain_peak_and_seconds_are_those_of_the_log(parts: list[list[Line]], tmp_path_factory: Any) -> None:
    path = write(tmp_path_factory.mktemp("log"), *parts)
    peak, nanoseconds = walk(path)
    imported = read_log("dtr", path)
    check_trace(imported.trace)
    forecast = plain(imported)
    assert forecast.peak_bytes == peak
    assert forecast.step_seconds == pytest.approx(nanoseconds / 1e9)
    assert plain(read_log("dtr", path, release=LoggedRelease.LAST_USE)).peak_bytes <= peak


@given(parts=logs())
def test_every_block_can_be_away_whenever_it_is_not_used(parts: list[list[Line]], tmp_path_factory: Any) -> None:
    """So the smallest budget is what is there for good, with the most that one op uses, or with the step's results."""
    path = write(tmp_path_factory.mktemp("log"), *parts)
    imported = read_log("dtr", path, release=LoggedRelease.LAST_USE)
    trace = imported.trace
    assert {each for each in trace.gaps if trace.storages[each].role not in PERSISTENT_ROLES} == set(trace.movable)
    smallest = 0
    for op in trace.ops:
        fixed = {home.id for home in trace.storages if home.role in PERSISTENT_ROLES and home.created <= op.tick}
        used = {view.storage for view in (*op.reads, *op.writes)} | fixed
        smallest = max(smallest, sum(trace.storages[each].nbytes for each in used))
    results = {trace.saves[need.save].storage for need in trace.needs if need.released == trace.end}
    results |= {home.id for home in trace.storages if home.released == trace.end}
    smallest = max(smallest, sum(trace.storages[each].nbytes for each in results))
    problem = pose(trace, imported.costs, 1, min_offload_bytes=1)
    assert problem.floor.peak_bytes == smallest


# -- DTR: what each instruction means ---------------------------------------------------------------------------------


def test_a_block_is_saved_after_its_first_run_of_uses_and_needed_before_each_other(tmp_path: pathlib.Path) -> None:
    path = write(
        tmp_path,
        constant("w", 10),
        call("a", ["w"], {"x": 100}, 7_000),
        call("b", ["x"], {"y": 20}),  # at once: no stretch
        call("c", ["y"], {"z": 30}),
        call("d", ["x", "z"], {"r": 40}),
        release("x", "y", "z"),
        call("e", ["r"], {"s": 5}),
    )
    imported = read_log("dtr", path)
    trace = imported.trace
    assert [op.name for op in trace.ops] == ["a", "b", "c", "d", "e"]
    homes = {home.label: home for home in trace.storages}
    x = homes["x"]
    ticks = [op.tick for op in trace.ops]
    (save,) = [each for each in trace.saves if each.storage == x.id]
    assert ticks[1] < save.tick < ticks[2] and x.released == save.tick
    (gap,) = trace.gaps[x.id]
    assert ticks[2] < gap.closes < ticks[3]
    # w stays; y is in use from its making to its last use; r and s are results, and only r has a stretch to lie idle.
    assert homes["w"].role is Role.PARAMETER and homes["y"].role is Role.TEMPORARY
    assert set(trace.gaps) == {x.id}
    assert homes["s"].released == homes["r"].released == trace.end
    assert imported.costs.op_seconds[0] == pytest.approx(7e-6) and imported.costs.measured


def test_a_result_is_needed_when_the_step_ends(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, constant("w", 1), call("a", ["w"], {"g": 9}), call("b", ["w"], {"h": 9}))
    trace = read_log("dtr", path).trace
    result = next(home.id for home in trace.storages if home.label == "g")
    (gap,) = trace.gaps[result]
    assert gap.closes == trace.end - 1 > trace.ops[-1].tick


def test_what_is_changed_is_a_new_block_of_the_same_size(tmp_path: pathlib.Path) -> None:
    path = write(
        tmp_path, constant("w", 8), call("a", ["w"], {"x": 100}), mutate("add_", ["x", "w"], [0]), release("x")
    )
    imported = read_log("dtr", path)
    assert [home.nbytes for home in imported.trace.storages] == [8, 100, 100]
    assert plain(imported).peak_bytes == 208


def test_what_comes_before_start_is_another_step(tmp_path: pathlib.Path) -> None:
    before = [*constant("old", 5), *call("earlier", ["old"], {"o": 7})]
    path = write(tmp_path, before, annotate("START"), release("old"), constant("w", 1), call("a", ["w"], {"x": 2}))
    imported = read_log("dtr", path)
    assert [op.name for op in imported.trace.ops] == ["a"]
    assert plain(imported).peak_bytes == 3


def test_zero_and_enormous_sizes(tmp_path: pathlib.Path) -> None:
    big = 1 << 56
    path = write(
        tmp_path, constant("w", 0), call("a", ["w"], {"x": big, "n": 0}, 0), call("b", ["w"], {"y": big}),
        call("c", ["x", "n"], {"z": 0}), release("x", "y", "z", "n"),
    )  # fmt: skip
    imported = read_log("dtr", path)
    assert plain(imported).peak_bytes == 2 * big and imported.costs.op_seconds[0] == 0
    problem = pose(imported.trace, imported.costs, 1)
    assert problem.floor.peak_bytes == 2 * big  # y is never used again, so it cannot leave
    more = [call(f"more{index}", ["w"], {f"m{index}": MOST_BYTES // 2}) for index in range(3)]
    with pytest.raises(TraceError, match=r"at op 2 \(more2\) \d+ bytes are live"):
        read_log("dtr", write(tmp_path, constant("w", 0), *more))


def test_the_link_is_what_it_is_said_to_be(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, constant("w", 0), call("a", ["w"], {"x": 1}))
    link = make_link(per_second=3e9)
    assert read_log("dtr", path, link=link).costs.link == link
    assert read_log("dtr", path).costs.link.out_bytes_per_second == 12e9


# -- DTR: what is refused ---------------------------------------------------------------------------------------------

HEAD = [*constant("w", 8), *call("a", ["w"], {"x": 100})]  # five lines

BAD_LOGS: dict[str, tuple[list[Line], str]] = {
    "use before definition": (call("b", ["y"], {"z": 1}), "line 6: b uses y, which is not defined before"),
    "cycle": (call("b", ["z"], {"z": 1}), "line 6: b uses z, which is not defined before"),
    "release twice": (release("x", "x"), "line 7: RELEASE uses x, which was released before"),
    "release of nothing": (release("y"), "line 6: RELEASE uses y, which is not defined"),
    "use after release": ([*release("x"), *call("b", ["x"], {"z": 1})], "line 7: b uses x, which was released"),
    "copy of nothing": (copy("y", "q"), "line 6: COPY uses q, which is not defined"),
    "copy onto nothing": (copy("y", "x", "COPY_FROM"), "line 6: COPY_FROM uses y, which is not defined"),
    "defined twice": (call("b", ["w"], {"x": 1}), "line 8: x is defined a second time"),
    "unknown instruction": ([{"INSTRUCTION": "JUMP"}], "line 6: unknown instruction 'JUMP'; there are: CONSTANT"),
    "no instruction": ([{"NAME": "x"}], "line 6: unknown instruction None"),
    "stray memory": ([{"INSTRUCTION": "MEMORY", "NAME": "x", "MEMORY": "1"}], "line 6: unknown instruction 'MEMORY'"),
    "negative time": (call("b", ["w"], {"y": 1}, -5), r"line 6: b: TIME is '-5', not a whole number from 0"),
    "endless time": (call("b", ["w"], {"y": 1}, 10**300), "line 6: b: TIME is"),
    "negative size": (call("b", ["w"], {"y": -1}), "line 7: y: MEMORY is '-1', not a whole number from 0"),
    "no number": (call("b", ["w"], {"y": "many"}), "line 7: y: MEMORY is 'many'"),
    "a fraction": (mutate("b", ["w"], [0], 1.5), "line 6: b: TIME is 1.5"),  # type: ignore[arg-type]
    "too large": (call("b", ["w"], {"y": 2**62 + 1}), "line 6: y has 4611686018427387905 bytes"),
    "view of nothing": (call("b", ["w"], {"y": 0}, 1, y=1), "line 8: b: y is a view of argument 1 of 1"),
    "view of less": (call("b", ["w"], {"y": 0}, 1, y=-2), "line 8: y: ALIAS is '-2'"),
    "memory of another": ([call("b", ["w"], {"y": 1})[0], *constant("q", 1)[1:]], "line 7: expected the MEMORY of y"),
    "changes what it has not": (mutate("b", ["w"], [1]), r"line 6: b changes arguments \[1\] of 1"),
    "changes twice": (mutate("b", ["w", "x"], [0, 0]), r"line 6: b changes arguments \[0, 0\] of 2"),
    "changes a name": (mutate("b", ["w"], ["w"]), "line 6: b: MUTATE must be a list of positions"),  # type: ignore[list-item]
    "cut off within an op": (call("b", ["w"], {"y": 1})[:2], "line 7: the log is truncated here"),
    "not a name": ([{"INSTRUCTION": "RELEASE", "NAME": 7}], "line 6: RELEASE: NAME is .*not a list of names"),
    "unprintable": (release("\ud800"), "line 6: RELEASE: NAME is .*not a list of names"),
    "no arguments": (
        [{"INSTRUCTION": "CALL", "NAME": "b", "ARGS": "w"}],
        "line 6: CALL: ARGS is 'w', not a list of names",
    ),
}


@pytest.mark.parametrize("case", BAD_LOGS)
def test_bad_logs_are_refused_with_their_line(case: str, tmp_path: pathlib.Path) -> None:
    lines, message = BAD_LOGS[case]
    with pytest.raises(TraceError, match=rf"step\.log, {message}"):
        read_log("dtr", write(tmp_path, HEAD, lines))


def test_a_line_that_is_cut_off(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, HEAD, release("x"))
    path.write_text(path.read_text()[:-9])
    with pytest.raises(TraceError, match="line 6: not a line of JSON, or truncated"):
        read_log("dtr", path)
    path.write_text('["CALL"]\n')
    with pytest.raises(TraceError, match="line 1: expected an instruction"):
        read_log("dtr", path)
    path.write_text("")
    with pytest.raises(TraceError, match="no step was logged"):
        read_log("dtr", path)
    start = '{"INSTRUCTION":"ANNOTATE","ANNOTATION":"START"}\n'
    for earlier in ('{"RESULT":5}\n', '{"RESULT":null,"NAME":[],"DST":{}}\n', '{"RESULT":[5,null]}\n'):
        path.write_text(earlier + start)
        with pytest.raises(TraceError, match="no step was logged"):
            read_log("dtr", path)
    with pytest.raises(TraceError, match="no step was logged"):
        read_log("dtr", write(tmp_path, constant("w", 1)))


@pytest.mark.parametrize("name", list_formats())
def test_files_that_are_no_logs(name: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_log(name, tmp_path / "missing")
    with pytest.raises(UsageError, match="cannot read"):
        read_log(name, "a\0b")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="is not a text file"):
        read_log(name, tmp_path / "binary")


def test_formats_are_listed() -> None:
    assert list_formats() == ("dtr", "g10")
    with pytest.raises(UnknownMember, match="there are: dtr, g10"):
        read_log("vdnn", "x")


# -- G10 --------------------------------------------------------------------------------------------------------------


def kernel(index: int, name: str, cycles: object, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """One kernel; a tensor is its number, `g` if it is global, and bytes: "3:100" or "3g:100"."""

    def tensor(text: str) -> str:
        number, nbytes = text.split(":")
        is_global = int(number.endswith("g"))
        return f"tensor{number.rstrip('g')} Is weight (global)?: {is_global}, Size in byte: {nbytes}, Range:0--1"

    lines = [f"Kernel ID: {index}, Name: {name}", f"Parent OP ID:{index}; Name: Op", f"Execution Time: {cycles}"]
    lines += ["(1,2,3,4)", "Input Tensors:", *map(tensor, inputs), "Output Tensors:", *map(tensor, outputs), "_" * 68]
    return "\n".join(lines) + "\n"


STEP = [
    kernel(0, "LoadData_A0", 1200, [], ["0:64"]),
    kernel(1, "Conv2d_Forward", 2400, ["0:64", "1g:16"], ["2:100", "3:500"]),  # 3 is workspace: nothing reads it
    kernel(2, "ReLU_Forward", 600, ["2:100"], ["2:100"]),  # in place
    kernel(3, "Dropout_Forward", 600, ["2:100", "4:8"], ["5:100"]),  # 4 comes from outside
    kernel(4, "makeLoss", 600, ["5:100"], ["6:40"]),
    kernel(5, "Conv2d_Backward", 2400, ["6:40", "2:100", "0:64"], ["1g:16"]),
]


def kernels(folder: pathlib.Path, *texts: str) -> pathlib.Path:
    path = folder / "kernels.config"
    path.write_text("".join(texts))
    return path


def test_a_kernel_trace(tmp_path: pathlib.Path) -> None:
    path = kernels(tmp_path, *STEP)
    imported = read_log("g10", path)
    assert read_log("g10", tmp_path) == imported  # the folder will do
    assert read_log("g10", path, release=LoggedRelease.LAST_USE).trace == imported.trace
    trace = imported.trace
    homes = {home.label: home for home in trace.storages}
    assert [op.name for op in trace.ops] == [
        "LoadData_A0", "Conv2d_Forward", "ReLU_Forward", "input", "Dropout_Forward", "makeLoss", "Conv2d_Backward",
    ]  # fmt: skip
    assert sum(imported.costs.op_seconds) == pytest.approx(7800 / CYCLES_PER_SECOND)
    assert plain(imported).peak_bytes == 16 + 64 + 100 + 500
    assert homes["tensor1"].role is Role.PARAMETER and homes["tensor1"].created == -1
    assert homes["tensor3"].role is Role.TEMPORARY
    assert homes["tensor6"].released == trace.end  # read by the last kernel
    # 0 lies idle from its convolution to the backward one; so does 2, which was overwritten before it was put aside.
    assert {trace.storages[each].label for each in trace.movable} == {"tensor0", "tensor2"}
    assert [op.name for op in trace.ops if op.barrier] == ["input", "Dropout_Forward"]


BAD_KERNELS: dict[str, tuple[str, str]] = {
    "missing kernel": (
        kernel(7, "B", 1, [], []),
        r"line \d+: after 6 kernels: found kernel 7 \(B\) instead of kernel 6",
    ),
    "negative time": (kernel(6, "B", -1, [], []), r"kernel 6 \(B\): it takes -1 cycles"),
    "negative size": (kernel(6, "B", 1, [], ["9:-4"]), r"kernel 6 \(B\): tensor9 has -4 bytes"),
    "negative global": (kernel(6, "B", 1, ["9g:-4"], []), r"line \d+: tensor9 has -4 bytes"),
    "another size": (kernel(6, "B", 1, ["0:65"], []), r"kernel 6 \(B\): tensor0 had 64 bytes before and has 65 here"),
    "global now": (kernel(6, "B", 1, ["0g:64"], []), r"kernel 6 \(B\): tensor0 had 64 bytes before and has 64 here"),
    "no number": (kernel(6, "B", "soon", [], []), r"kernel 6 \(B\): 'Execution Time: soon' is not a line of this"),
    "enormous time": (kernel(6, "B", "9" * 40, [], []), r"kernel 6 \(B\): 'Execution Time: 9+' is not a line of this"),
    "no time": (re.sub("Exec.*\n", "", kernel(6, "B", 1, [], [])), r"kernel 6 \(B\): it is not complete here"),
    "no outputs": (re.sub("Output.*\n", "", kernel(6, "B", 1, ["0:64"], [])), r"kernel 6 \(B\): it is not complete"),
    "cut off": ("\n".join(kernel(6, "B", 1, ["0:64"], []).splitlines()[:-2]), r"kernel 6 \(B\): the file is truncated"),
    "cut off and on": (
        kernel(6, "B", 1, [], [])[:40] + "\n" + kernel(7, "C", 1, [], []),
        r"kernel 6 \(B\): it is trunc",
    ),
    "something else": ("hello\n", "after 6 kernels: 'hello' is not a line of this format"),
    "homeless tensor": ("tensor9 Is weight (global)?: 0, Size in byte: 4\n", "tensor9 is neither input nor output"),
}


@pytest.mark.parametrize("case", BAD_KERNELS)
def test_bad_kernel_traces_are_refused_with_their_line(case: str, tmp_path: pathlib.Path) -> None:
    text, message = BAD_KERNELS[case]
    with pytest.raises(TraceError, match=message) as caught:
        read_log("g10", kernels(tmp_path, *STEP, text))
    assert "kernels.config, line" in str(caught.value)


def test_no_kernels_at_all(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TraceError, match="has no kernels"):
        read_log("g10", kernels(tmp_path, "\n"))


# -- the real files ---------------------------------------------------------------------------------------------------


def real_files(variable: str, pattern: str) -> list[pathlib.Path]:
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"{variable} names no folder")
    found = sorted(pathlib.Path(folder).rglob(pattern))
    assert found, f"{folder} holds no {pattern}"
    return found


def test_the_real_dtr_logs() -> None:
    for path in real_files("ELBOWROOM_DTR_LOGS", "*.log"):
        peak, nanoseconds = walk(path)
        forecast = plain(read_log("dtr", path))
        assert (path.name, forecast.peak_bytes) == (path.name, peak)
        assert forecast.step_seconds == pytest.approx(nanoseconds / 1e9, rel=1e-12)


def test_the_real_g10_kernels() -> None:
    for path in real_files("ELBOWROOM_G10", "*kernels.config"):
        peak, cycles = walk_kernels(path)
        forecast = plain(read_log("g10", path))
        assert (path, forecast.peak_bytes) == (path, peak)
        assert forecast.step_seconds == pytest.approx(cycles / CYCLES_PER_SECOND, rel=1e-12)


def walk_kernels(path: pathlib.Path) -> tuple[int, int]:
    """Peak bytes and cycles: a tensor counts from its first to its last kernel, a global one always."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    sizes: dict[str, int] = {}
    always, cycles, index = 0, 0, -1
    find: Callable[[str], re.Match[str] | None] = re.compile(r"(tensor\d+) .*\?: (\d), Size in byte: (\d+)").match
    for line in path.read_text().splitlines():
        if line.startswith("Kernel ID"):
            index += 1
        elif line.startswith("Execution Time"):
            cycles += int(line.split()[-1])
        elif found := find(line):
            name, is_global, nbytes = found.groups()
            if is_global == "1":
                always += int(nbytes) if name not in sizes else 0
            else:
                first.setdefault(name, index)
                last[name] = index
            sizes[name] = int(nbytes)
    live = [always] * (index + 1)
    for name, begin in first.items():
        for at in range(begin, last[name] + 1):
            live[at] += sizes[name]
    return max(live), cycles

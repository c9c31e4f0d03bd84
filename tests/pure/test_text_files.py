"""What reading a file takes of memory is bounded by its text, and its text by a limit. No torch."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given

from elbowroom.cli.commands.report import load_journal
from elbowroom.errors import TraceError, UsageError
from elbowroom.importers import read_log
from elbowroom.ir import files, json_text, text_files
from elbowroom.ir.digest import digest
from elbowroom.ir.journal import Journal, Mode, StepRecord
from elbowroom.ir.trace import Trace
from elbowroom.layout.tables import read_buffers
from tests.generators import example, traces

TEXT_BYTES = 1_500_000

STEP = StepRecord(
    step=300, mode=Mode.PLAIN, seconds=0.5, stall_seconds=0.25, budget_bytes=900, peak_bytes=1000, resident_bytes=2000,
    offloaded_bytes=3000, reloaded_bytes=4000, recomputed=500, saves=600, needs=700, note=""
)  # fmt: skip

FIGURES = (
    "peak_bytes", "peak_tick", "step_seconds", "compute_seconds", "recompute_seconds", "stall_seconds",
    "offloaded_bytes", "reloaded_bytes", "lower_tier_bytes",
)  # fmt: skip


def _document(kind: str, value: str) -> str:
    return f'{{"format":"elbowroom.{kind}","version":1,"value":{value}}}'


def _repeat(item: str, separator: str = ",") -> str:
    """As long as every text is here."""
    return separator.join([item] * (TEXT_BYTES // (len(item) + len(separator))))


def _list_texts() -> Iterator[tuple[str, str]]:
    """Each with what it is to be read as. All are as long; the first of each kind is the worst that we know."""
    trace = '{"name":"","device":"cpu","end":0,'
    forecast = "{" + "".join(f'"{name}":0,' for name in FIGURES) + '"live_bytes":'
    yield "trace", _document("trace", f'{trace}"ops":[{_repeat("[]")}]}}')
    yield "trace", _document("trace", f'{trace}"saves":[{_repeat("{}")}]}}')
    yield "trace", _document("trace", f'{trace}"ops":[{{"tick":0,"reads":[{_repeat("[]")}]}}]}}')
    yield "trace", _document("trace", trace + '"ops":' + "[" * TEXT_BYTES)
    yield "trace", _document("trace", '{"device":"' + "x" * TEXT_BYTES + '"}')
    yield "trace", '{"x":[' + _repeat("{}") + "]}"
    yield "forecast", _document("forecast", f"{forecast}[{_repeat('0')}]}}")
    yield (
        "forecast",
        _document("forecast", f"{forecast}[{','.join(map(str, range(10**5, 10**5 + TEXT_BYTES // 7)))}]}}"),
    )
    yield "costs", _document("costs", f'{{"op_seconds":[{_repeat("0")}]}}')
    yield "journal", _document("journal", f'{{"steps":[{_repeat(json.dumps(files.to_json(STEP)))}]}}')
    yield "plan", _document("plan", '{"segments":[' + _repeat('{"ops":[1],"outputs":[2],"leaves":[3]}') + "]}")
    yield "run", '{"command":"run","journal":{"steps":[' + _repeat("[]") + "]}}"
    yield "run", '{"command":"run","x":[' + _repeat("{}") + "]}"
    yield "csv", "id,lower,upper,size\n" + "".join(f"{row},300,301,302\n" for row in range(TEXT_BYTES // 18))
    yield "csv", "id,lower,upper,size" + "," * TEXT_BYTES
    yield "dtr", _repeat('{"INSTRUCTION":"CALL","NAME":"a","ARGS":[],"RESULT":[],"TIME":0}', "\n")
    yield "dtr", "[" * TEXT_BYTES


MEASURE = """
import os, pathlib, sys
from elbowroom.cli.commands.report import load_journal
from elbowroom.errors import ElbowroomError
from elbowroom.importers import dtr
from elbowroom.ir import files
from elbowroom.layout.tables import read_buffers

def read_peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

readers = {name.partition(".")[2]: kind for kind, name in files._FORMATS.items()}
for name in sorted(os.listdir(sys.argv[1])):
    path, kind = pathlib.Path(sys.argv[1], name), name.partition("-")[2]
    if os.fork() == 0:  # with a peak of its own
        before = read_peak()
        try:
            if kind in readers:
                files.load(readers[kind], path)
            else:
                {"run": load_journal, "csv": read_buffers, "dtr": dtr.read}[kind](path)
        except ElbowroomError as error:
            assert len(str(error)) < 1000
        print(name, read_peak() - before, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
def test_reading_takes_at_most_ten_times_the_text(tmp_path: pathlib.Path) -> None:
    sizes: dict[str, int] = {}
    for index, (kind, text) in enumerate(_list_texts()):
        path = tmp_path / f"{index:02}-{kind}"
        sizes[path.name] = path.write_text(text)
        assert 0.8 * TEXT_BYTES <= sizes[path.name] <= 1.3 * TEXT_BYTES
    done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, check=True)
    peaks = {name: int(nbytes) for name, nbytes in (line.split() for line in done.stdout.splitlines())}
    assert peaks.keys() == sizes.keys(), done.stderr
    over = {name: peaks[name] / size for name, size in sizes.items() if peaks[name] > 10 * size + (2 << 20)}
    assert not over


# -- the limit --------------------------------------------------------------------------------------------------------


def test_what_is_too_large_is_refused_with_its_numbers(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LARGEST_FILE_BYTES", 1 << 20)
    plain, packed = tmp_path / "plain.json", tmp_path / "packed.json.gz"
    plain.write_bytes(b" " * (2 << 20))
    with pytest.raises(TraceError, match=r"plain\.json has 2097152 bytes \(2.0 MiB\); at most 1048576 bytes"):
        files.load(Trace, plain)
    packed.write_bytes(gzip.compress(b" " * (64 << 20)))
    size = packed.stat().st_size
    with pytest.raises(TraceError, match=rf"has {size} bytes, which unpack to more than 1048576; at most .* Put less"):
        files.load(Trace, packed)
    table = tmp_path / "table.csv"
    table.write_bytes(plain.read_bytes())
    with pytest.raises(TraceError, match=r"table\.csv has 2097152 bytes"):
        read_buffers(table)


def test_logs_have_a_limit_of_their_own(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "step.log"
    with open(path, "wb") as file:
        file.truncate((1 << 26) + 1)
    for name in ("dtr", "g10"):
        with pytest.raises(TraceError, match=r"has 67108865 bytes \(64.0 MiB\); at most 67108864 bytes"):
            read_log(name, path)


def test_devices_and_pipes_are_refused_at_once(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    readers: list[Callable[[Any], Any]] = [
        lambda path: files.load(Trace, path), load_journal, read_buffers, lambda path: read_log("dtr", path)
    ]  # fmt: skip
    for read in readers:
        for path, kind in ((pathlib.Path("/dev/zero"), "device"), (tmp_path / "pipe", "pipe")):
            with pytest.raises(UsageError, match=f"cannot read {path}: it is a {kind}, not a file"):
                read(path)


# -- text that comes in pieces ----------------------------------------------------------------------------------------


@pytest.fixture(params=[1, 7, 64])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "PIECE_BYTES", request.param)
    monkeypatch.setattr(json_text, "WINDOW_CHARS", 2 * request.param)


@pytest.mark.usefixtures("pieces")
def test_pieces_make_no_difference(tmp_path: pathlib.Path) -> None:
    trace, costs = example()
    path = tmp_path / "noun.json"
    for noun in (trace, costs, Journal(steps=(STEP, STEP))):
        document = {"format": files._FORMATS[type(noun)], "version": files.version_of(type(noun)), "other": [{"a": []}]}
        document["value"] = files.to_json(noun)
        for text in (json.dumps(document), json.dumps(document, indent=1), json.dumps(document, sort_keys=True)):
            path.write_text(text)
            assert files.load(type(noun), path) == noun
    step = {"command": "run", "é": ["[", '"', {"journal": None}], "budget_bytes": 5, "journal": {"steps": []}}
    path.write_text(json.dumps(step, ensure_ascii=False))
    assert load_journal(path) == (Journal(steps=()), 5)


def test_what_a_report_is_of_is_checked(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.json"
    for budget, said in (("9" * 5000, "too many digits"), ("0", "not a number of bytes"), ("true", "expected an int")):
        path.write_text(f'{{"command":"run","budget_bytes":{budget},"journal":{{"steps":[]}}}}')
        with pytest.raises(TraceError, match=said):
            load_journal(path)
    for text in ('{"command":"run"}', '{"command":"plan","journal":{"steps":[]}}', '["command"]', '{"command":'):
        path.write_text(text)
        with pytest.raises(TraceError, match=r"run\.json"):
            load_journal(path)


@pytest.mark.usefixtures("pieces")
def test_pieces_hide_no_mistake(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "noun.json"
    for steps, said in (
        ("[1,2]", r"\$\.steps\[0\]: expected an object, found 1"),
        ("[{}]", r"\$\.steps\[0\]: missing fields"),
        ('{"a":1}', r"\$\.steps: expected a list, found dict"),
        ("[", "character 60: a value is missing here"),
        ("[,]", "character 60: a value is missing here"),
        ("[]]", "character 61: ',' is missing here"),
        ("nul", "character 59"),
        ('[],"steps":[]', "given twice"),
        ("[]}} {", "something comes after the end"),
        ("9" * 5000, "too many digits"),
    ):
        path.write_text(f'{{"format":"elbowroom.journal","version":1,"value":{{"steps":{steps}}}}}')
        with pytest.raises(TraceError, match=said):
            files.load(Journal, path)


def test_lines_are_as_they_are(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    for text, lines in (
        ("", []),
        ("\n", [""]),
        ("é\r\n\nb", ["é", "", "b"]),
        ("\ufeffa\nb\n", ["a", "b"]),
        ("x" * 50 + "\n" + "y" * 50, ["x" * 50, "y" * 50]),
    ):
        path.write_bytes(text.encode())
        for piece_bytes in (1, 2, 3, 7, 1 << 16):
            monkeypatch.setattr(text_files, "PIECE_BYTES", piece_bytes)
            assert list(text_files.read_lines(path)) == lines


@given(traces)
def test_a_digest_is_that_of_the_whole_text(trace: Trace) -> None:
    contents = files.to_json(trace)
    del contents["name"], contents["slicing"]
    if not trace.presences:
        del contents["presences"]
    for each in (*contents["ops"], *contents["storages"]):
        del each["module"], each["line"]
    text = json.dumps(contents, sort_keys=True, separators=(",", ":"))
    assert digest(trace) == hashlib.sha256(text.encode()).hexdigest()

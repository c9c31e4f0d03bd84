"""Nouns as files: what is written is read back, and nothing else is. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import pathlib
import random
import sys
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.errors import ElbowroomError, Infeasible, TraceError, UsageError
from elbowroom.ir import files, text_files
from elbowroom.ir.check import check
from elbowroom.ir.costs import Costs, Measurements
from elbowroom.ir.digest import digest
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.hardware import HardwareProfile, Link, Rate, Tier
from elbowroom.ir.journal import Journal, Mode, StepRecord
from elbowroom.ir.measured_profile import MeasuredProfile
from elbowroom.ir.network import Network, NetworkLevel
from elbowroom.ir.op_times import OpTime, OpTimes
from elbowroom.ir.plan import Choice, Plan
from elbowroom.ir.trace import Role, Trace
from elbowroom.planner.problem import plan
from elbowroom.simulator.simulate import simulate
from tests.generators import example, jobs, keep_everything, make_chain, make_costs, make_link, traces


def _name_modules(trace: Trace) -> Trace:
    return dataclasses.replace(
        trace,
        ops=tuple(dataclasses.replace(op, module=f"h.{op.tick}", line="model.py:7") for op in trace.ops),
        storages=tuple(dataclasses.replace(each, module="", line=f"model.py:{each.id}") for each in trace.storages),
    )


def _make_nouns() -> dict[str, Any]:
    trace, costs = example()
    made = plan(trace, costs, simulate(trace, costs, keep_everything(costs)).peak_bytes * 2 // 3)
    assert {decision.choice for decision in made.decisions} == {Choice.OFFLOAD, Choice.RECOMPUTE}
    profile = HardwareProfile(
        name='Gerät Nr. 1 "quick" \\ \t',
        device="cuda",
        isa="",
        rates=(Rate(kind="matmul", dtype="float32", per_second=1.5e13, source="measured"),),
        tiers=(Tier(name="device", capacity_bytes=1 << 34), Tier(name="below", capacity_bytes=1 << 37)),
        links=(make_link(half_duplex=True),),
        op_latency_seconds=4e-6,
        hook_seconds=1e-6,
        alignment_bytes=512,
    )
    record = StepRecord(
        step=0, mode=Mode.DRIFTED, seconds=0.1 + 0.2, stall_seconds=1e-300, budget_bytes=7, peak_bytes=2**62,
        resident_bytes=1, offloaded_bytes=2, reloaded_bytes=3, recomputed=4, saves=5, needs=6, note="why\nnot"
    )  # fmt: skip
    return {
        "trace": _name_modules(trace),
        "profile": profile,
        "costs": costs,
        "measurements": Measurements(
            op_seconds=(0.0, 0.5), workspace_bytes=(0, 9), step_seconds=1.0, stall_seconds=0.0
        ),
        "plan": dataclasses.replace(made, host_bytes=9),
        "forecast": simulate(trace, costs, made),
        "op_times": OpTimes(machine="CPU; 2 threads", times=(OpTime(key="aten.mm.default ab", seconds=0.5, steps=3),)),
        "measured_profile": MeasuredProfile(
            machine="GPU; PyTorch 2", profile=profile, most_bytes=1 << 30, begin_seconds=1.5e9, check_seconds=1e-3
        ),
        "network": Network(
            name="pair",
            launch_seconds=1e-5,
            levels=(
                NetworkLevel(name="wire", members=4, bytes_per_second=1e9, latency_seconds=0.0, source="measured"),
            ),
        ),
        "journal": Journal(steps=(record, dataclasses.replace(record, step=1, mode=Mode.PLAIN))),
    }


NOUNS = _make_nouns()
NAMES = list(NOUNS)
GOOD: dict[str, Any] = {
    name: {"format": files._FORMATS[type(noun)], "version": files.version_of(type(noun)), "value": files.to_json(noun)}
    for name, noun in NOUNS.items()
}


def write(folder: pathlib.Path, document: Any) -> pathlib.Path:
    path = folder / "noun.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_every_noun_is_here() -> None:
    assert {type(noun) for noun in NOUNS.values()} == set(files._FORMATS)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_back(tmp_path: pathlib.Path, name: str, suffix: str) -> None:
    path = tmp_path / f"noun{suffix}"
    files.save(NOUNS[name], path)
    found = files.load(type(NOUNS[name]), path)
    assert found == NOUNS[name]
    assert repr(found) == repr(NOUNS[name])  # ints are ints and floats are floats
    files.save(found, tmp_path / f"again{suffix}")
    assert (tmp_path / f"again{suffix}").read_bytes() == path.read_bytes()
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"again{suffix}", f"noun{suffix}"]


@given(traces)
def test_any_trace_survives(trace: Trace) -> None:
    found = files.from_json(Trace, json.loads(json.dumps(files.to_json(trace))))
    assert found == trace
    assert digest(found) == digest(trace) == digest(dataclasses.replace(trace, name="another name"))


def test_a_digest_is_of_the_contents() -> None:
    trace = example()[0]
    longer = dataclasses.replace(trace.storages[3], nbytes=trace.storages[3].nbytes + 1)
    assert digest(trace) != digest(
        dataclasses.replace(trace, storages=(*trace.storages[:3], longer, *trace.storages[4:]))
    )


TRACE_OF_VERSION_1 = """
{"format":"elbowroom.trace","version":1,"value":{"name":"chain","device":"cpu","ops":[
{"tick":0,"name":"layer0","reads":[{"storage":0,"version":0,"dtype":"uint8","shape":[16384]},
{"storage":1,"version":0,"dtype":"uint8","shape":[4096]}],
"writes":[{"storage":2,"version":0,"dtype":"uint8","shape":[64]}],"flops":0,"barrier":""},
{"tick":2,"name":"seed","reads":[{"storage":2,"version":0,"dtype":"uint8","shape":[64]}],
"writes":[{"storage":3,"version":0,"dtype":"uint8","shape":[64]}],"flops":0,"barrier":""},
{"tick":4,"name":"weight0","reads":[{"storage":3,"version":0,"dtype":"uint8","shape":[64]},
{"storage":0,"version":0,"dtype":"uint8","shape":[16384]},{"storage":1,"version":0,"dtype":"uint8","shape":[4096]}],
"writes":[{"storage":4,"version":0,"dtype":"uint8","shape":[4096]}],"flops":0,"barrier":""}],
"storages":[{"id":0,"nbytes":16384,"role":"input","created":-1,"released":5,"label":"input"},
{"id":1,"nbytes":4096,"role":"parameter","created":-1,"released":5,"label":"parameter"},
{"id":2,"nbytes":64,"role":"activation","created":0,"released":3,"label":"layer0"},
{"id":3,"nbytes":64,"role":"temporary","created":2,"released":5,"label":"seed"},
{"id":4,"nbytes":4096,"role":"gradient","created":4,"released":5,"label":"weight0"}],
"saves":[{"tick":1,"storage":0,"released":5}],"needs":[{"tick":3,"save":0,"released":5}],"end":5}}
"""


def test_a_trace_of_version_1_has_no_modules_and_the_digest_it_had(tmp_path: pathlib.Path) -> None:
    found = files.load(Trace, write(tmp_path, TRACE_OF_VERSION_1))
    assert found == make_chain([64])
    assert {(each.module, each.line) for each in (*found.ops, *found.storages)} == {(None, "")}
    assert digest(found) == "d31282e48d05277ac97a80739d44c3aa6e7addaea04da36340bd8839ea2269a8"
    # Where the version comes last, what is missing is known only afterwards.
    moved = (
        '{"value"'
        + TRACE_OF_VERSION_1.strip().partition('"value"')[2][:-1]
        + ',"version":1,"format":"elbowroom.trace"}'
    )
    assert files.load(Trace, write(tmp_path, moved)) == found
    # A file of today's version must have all fields.
    with pytest.raises(TraceError, match=r"\$\.ops\[0\]: missing fields \['line', 'module'\]"):
        files.load(Trace, write(tmp_path, TRACE_OF_VERSION_1.replace('"version":1,"value"', '"version":2,"value"')))


def test_modules_and_lines_are_read_back_and_in_no_digest(tmp_path: pathlib.Path) -> None:
    trace, named = example()[0], NOUNS["trace"]
    files.save(named, tmp_path / "named.json")
    found = files.load(Trace, tmp_path / "named.json")
    assert [(op.module, op.line) for op in found.ops] == [(f"h.{op.tick}", "model.py:7") for op in trace.ops]
    assert [(each.module, each.line) for each in found.storages] == [
        ("", f"model.py:{each.id}") for each in trace.storages
    ]
    assert found == trace and digest(found) == digest(trace)


# -- what is no noun --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "{",
        "null",
        "[]",
        "17",
        "NaN",
        '"text"',
        "{}",
        "\x00",
        "\ufeff{}",
        '{"format": "elbowroom.trace"}',
        '{"format": "elbowroom.trace", "version": 1}',
        '{"format": "elbowroom.trace", "version": 1, "value": null}',
        '{"format": "elbowroom.plan", "version": 1, "value": {}}',
        '{"format": ["elbowroom.trace"], "version": 1, "value": {}}',
        '{"format": {"a": 1}, "version": 1, "value": {}}',
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 50_000 + "1" + "}" * 50_000,
        "9" * 10_000,
        "-" * 1000,
        "cos\nsystem\n(S'true'\ntR.",
        "__import__('os').system('true')",
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceError, match=r"noun\.json"):
        files.load(Trace, path)


@pytest.mark.parametrize("version", [0, -1, 5, 10**30, 1.0, "1", True, None, [1], {}])
def test_other_versions_are_refused(tmp_path: pathlib.Path, version: object) -> None:
    path = write(tmp_path, {**GOOD["trace"], "version": version})
    with pytest.raises(TraceError, match="version"):
        files.load(Trace, path)


def test_a_noun_is_not_another(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "noun.json"
    for name in NAMES:
        files.save(NOUNS[name], path)
        for other in NAMES:
            if other != name:
                with pytest.raises(TraceError, match="format"):
                    files.load(type(NOUNS[other]), path)
    files.save(NOUNS["plan"], path)
    with pytest.raises(TraceError, match=r"'elbowroom.plan'. `elbowroom simulate TRACE PLAN` and"):
        files.load(Journal, path)


def test_only_nouns_are_files(tmp_path: pathlib.Path) -> None:
    for value in (5, {}, "text", NOUNS["trace"].ops[0], None):
        with pytest.raises(UsageError, match="Trace"):
            files.save(value, tmp_path / "noun.json")
    with pytest.raises(UsageError, match="Trace"):
        files.load(Link, tmp_path / "noun.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["missing.json", "missing/noun.json", ".", "nul\x00.json", "x" * 5000])
def test_files_that_cannot_be_read(tmp_path: pathlib.Path, where: str) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        files.load(Trace, tmp_path / where)


def test_binary_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "noun.json"
    for data in (b"\x80\x04\x95", b"\xff\xfe{\x00}\x00", bytes(range(256)), gzip.compress(b"{}")):
        path.write_bytes(data)
        with pytest.raises(TraceError, match=r"noun\.json"):
            files.load(Trace, path)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("name", ["trace", "plan"])
def test_files_that_are_cut_off(tmp_path: pathlib.Path, name: str, suffix: str) -> None:
    path = tmp_path / f"noun{suffix}"
    files.save(NOUNS[name], path)
    whole = path.read_bytes()
    for kept in [*range(20), *range(20, len(whole) - 1, max(1, len(whole) // 40)), len(whole) - 1]:
        path.write_bytes(whole[:kept])
        with pytest.raises(TraceError, match=r"noun\.json"):
            files.load(type(NOUNS[name]), path)


def test_files_with_flipped_bits(tmp_path: pathlib.Path) -> None:
    """Either it does not show (inside a label) or it is refused, cleanly."""
    path = tmp_path / "noun.json.gz"
    dice = random.Random(0)
    for plain in (True, False):
        path = tmp_path / ("noun.json" if plain else "noun.json.gz")
        files.save(NOUNS["trace"], path)
        whole = path.read_bytes()
        for _ in range(200):
            damaged = bytearray(whole)
            damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
            path.write_bytes(damaged)
            with contextlib.suppress(TraceError):
                files.load(Trace, path)


# -- too large --------------------------------------------------------------------------------------------------------


def test_large_files_are_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LARGEST_FILE_BYTES", 10_000)
    path = write(tmp_path, " " * 10_001)
    with pytest.raises(TraceError, match="10000 bytes"):
        files.load(Trace, path)


def test_small_files_that_unpack_to_large_ones_are_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "LARGEST_FILE_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * (64 << 20)))
    assert path.stat().st_size < text_files.LARGEST_FILE_BYTES
    with pytest.raises(TraceError, match="bomb"):
        files.load(Trace, path)


def test_what_is_no_regular_file_is_refused(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path, kind in (("/dev/zero", "device"), (tmp_path / "pipe.json", "pipe")):
        with pytest.raises(UsageError, match=f"it is a {kind}, not a file"):
            files.load(Trace, path)


# -- wrong inside -----------------------------------------------------------------------------------------------------


def _walk(value: Any, path: tuple[Any, ...] = ()) -> typing.Iterator[tuple[Any, ...]]:
    """Every place in plain data: the first item of each list stands for all."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, (*path, key))
    elif isinstance(value, list) and value:
        yield from _walk(value[0], (*path, 0))


def _put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    document = json.loads(json.dumps(document))
    target = document
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return document


def _name(path: tuple[Any, ...]) -> str:
    return "$" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


PLACES = [(name, path) for name in NAMES for path in _walk(GOOD[name]["value"]) if path]


@pytest.mark.parametrize(("name", "path"), PLACES, ids=lambda each: each if isinstance(each, str) else _name(each))
def test_wrong_types_are_refused_by_place(name: str, path: tuple[Any, ...]) -> None:
    value = GOOD[name]["value"]
    right: Any = value
    for key in path:
        right = right[key]
    wrong: list[Any] = [None, {}, {"nbytes": 1}, [[]], [None], 10**5000, -2, -(10**400)]
    wrong += [float("nan"), float("inf"), float("-inf"), -0.5]
    wrong += [] if isinstance(right, str) else ["text", ""]
    wrong += [] if isinstance(right, bool) else [True]
    wrong += ["\ud800"]
    wrong += [] if isinstance(right, float) else [0.5]
    for each in wrong:
        if each is None and path[-1] in ("peak_bytes", "resident_bytes") and name == "journal":
            continue  # not metered
        if each is None and path[-1] in ("host_bytes", "most_bytes", "module", "members"):
            continue  # no limit; outside of the model; any number
        if isinstance(right, list) and each == right:
            continue
        with pytest.raises(TraceError) as caught:
            files.from_json(type(NOUNS[name]), _put_plainly(value, path, each))
        assert _name(path) in str(caught.value)
        assert len(str(caught.value)) < 500
        str(caught.value).encode()


def _put_plainly(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """As `_put`, for what JSON cannot spell."""
    if not path:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = _put_plainly(value[path[0]], path[1:], new)
    return copied


@pytest.mark.parametrize("name", NAMES)
def test_missing_and_unknown_fields_are_refused(name: str) -> None:
    kind, value = type(NOUNS[name]), GOOD[name]["value"]
    for field in value:
        with pytest.raises(TraceError, match=field):
            files.from_json(kind, {key: item for key, item in value.items() if key != field})
    for extra in ("extra", "__class__", "__init__", "", "\ud800", "x" * 10**6):
        with pytest.raises(TraceError, match="unknown") as caught:
            files.from_json(kind, {**value, extra: 1})
        assert len(str(caught.value)) < 500
        str(caught.value).encode()


def test_choices_are_refused_with_the_known_ones(tmp_path: pathlib.Path) -> None:
    for name, path, known in (
        ("trace", ("value", "storages", 0, "role"), Role),
        ("plan", ("value", "decisions", 0, "choice"), Choice),
        ("journal", ("value", "steps", 0, "mode"), Mode),
    ):
        for wrong in ("KEEP", "", 1, None, [], {}):
            with pytest.raises(TraceError, match=next(iter(known))) as caught:
                files.load(type(NOUNS[name]), write(tmp_path, _put(GOOD[name], path, wrong)))
            assert _name(path[1:]) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "path", "wrong", "place"),
    [
        ("profile", ("alignment_bytes",), 0, "alignment_bytes"),
        ("profile", ("rates", 0, "per_second"), 0, r"rates\[0\]"),
        ("profile", ("links", 0, "out_bytes_per_second"), 0, r"links\[0\]"),
        ("profile", ("links", 0, "upper"), "elsewhere", r"links\[0\]"),
        ("profile", ("tiers", 0, "capacity_bytes"), -1, r"tiers\[0\]"),
        ("costs", ("alignment_bytes",), -1, "alignment_bytes"),
        ("costs", ("link", "back_bytes_per_second"), 0, "link"),
        ("costs", ("workspace_bytes", 0), -1, r"workspace_bytes\[0\]"),
        ("costs", ("workspace_bytes",), [], "workspace_bytes"),
        ("measurements", ("workspace_bytes", 1), -1, r"workspace_bytes\[1\]"),
        ("trace", ("ops", 0, "writes", 0, "storage"), 10**6, r"ops\[0\]"),
        ("trace", ("end",), 10**12, "end|ticks"),
    ],
)
def test_values_that_cannot_be_are_refused_by_place(
    tmp_path: pathlib.Path, name: str, path: tuple[Any, ...], wrong: Any, place: str
) -> None:
    files.load(type(NOUNS[name]), write(tmp_path, GOOD[name]))
    with pytest.raises(TraceError, match=place):
        files.load(type(NOUNS[name]), write(tmp_path, _put(GOOD[name], ("value", *path), wrong)))


def test_hostile_text_is_only_text(tmp_path: pathlib.Path) -> None:
    for text in ("../../etc/passwd", "\x1b[2J", "[bold]", "<script>", "${HOME}", "%s%n", "\x00", "'; drop", "\u202e"):
        path = write(tmp_path, _put(GOOD["trace"], ("value", "storages", 0, "label"), text))
        assert files.load(Trace, path).storages[0].label == text
        with pytest.raises(TraceError) as caught:
            files.load(Trace, write(tmp_path, {**GOOD["trace"], "format": text}))
        assert str(caught.value).isprintable()


@given(data=some.data(), job=jobs())
def test_whatever_a_file_says_only_our_errors_come_of_it(data: some.DataObject, job: tuple[Trace, Costs]) -> None:
    """Numbers changed at random: refused when read, or else whatever is then asked of it ends well."""
    trace, costs = job
    value = files.to_json(trace)
    for _ in range(data.draw(some.integers(1, 3))):
        kind = data.draw(some.sampled_from(["storages", "ops", "saves", "needs"]))
        if not value[kind]:
            continue
        item = data.draw(some.sampled_from(value[kind]))
        if kind == "ops":
            item = data.draw(some.sampled_from(item[data.draw(some.sampled_from(["reads", "writes"]))] or [item]))
        field = data.draw(some.sampled_from(sorted(key for key, each in item.items() if isinstance(each, int))))
        item[field] = data.draw(some.integers(-1, 60) | some.just(item[field] + 1))
    try:
        found = files.from_json(Trace, value)
        files.check_noun(found)
        known = make_costs(found, op_seconds=costs.op_seconds, link=costs.link)
        simulate(found, known, keep_everything(known))
        for strategy in ("auto", "recompute_all"):
            made = plan(found, known, 1 << 19, strategy=strategy, min_offload_bytes=1)
            check(found, made)
    except (TraceError, Infeasible):
        pass


short_text = some.text(max_size=8)
plain_data = some.recursive(
    some.none() | some.booleans() | some.floats() | some.integers() | short_text,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(short_text, inner, max_size=3),
)


@given(plain_data)
def test_any_data_is_a_noun_or_a_trace_error(data: Any) -> None:
    for noun in NOUNS.values():
        with pytest.raises(TraceError):
            files.from_json(type(noun), data)


# -- writing ----------------------------------------------------------------------------------------------------------


def test_a_file_is_whole_or_as_before(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "noun.json"
    files.save(NOUNS["plan"], path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(UsageError, match="space"):
            files.save(NOUNS["plan"], path)
    with pytest.raises(TraceError, match="finite"):
        files.save(dataclasses.replace(NOUNS["forecast"], step_seconds=float("nan")), path)
    with pytest.raises(UsageError, match=r"missing is not a folder"):
        files.save(NOUNS["plan"], tmp_path / "missing" / "noun.json")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["noun.json"]


def test_links_between_nouns_are_names_only() -> None:
    """Each noun is plain data to the last field: what is read back can hold nothing that acts."""
    plain = (int, float, str, bool)

    def look(value: Any) -> None:
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                look(getattr(value, field.name))
        elif isinstance(value, tuple):
            for item in value:
                look(item)
        else:
            assert isinstance(value, plain)

    for noun in NOUNS.values():
        look(noun)
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
            noun.name = "changed"
    assert isinstance(NOUNS["forecast"], Forecast)
    assert isinstance(NOUNS["plan"], Plan)
    assert issubclass(TraceError, ElbowroomError)
    assert sys.getrecursionlimit() < 100_000


def test_a_journal_of_version_1_says_0_where_a_step_was_not_metered(tmp_path: pathlib.Path) -> None:
    old = json.loads(json.dumps(GOOD["journal"])) | {"version": 1}
    first, second = old["value"]["steps"]
    first |= {"peak_bytes": 0, "resident_bytes": 0}
    second |= {"peak_bytes": 7, "resident_bytes": 0}
    (tmp_path / "journal.json").write_text(json.dumps(old))
    steps = files.load(Journal, tmp_path / "journal.json").steps
    assert [(step.peak_bytes, step.resident_bytes) for step in steps] == [(None, None), (7, None)]
    files.save(Journal(steps=steps), tmp_path / "again.json")
    assert files.load(Journal, tmp_path / "again.json").steps == steps
    assert Journal(steps=steps).peak_bytes == 7 and Journal(steps=steps[:1]).peak_bytes is None


def test_damage_in_a_journal_of_version_1_is_named(tmp_path: pathlib.Path) -> None:
    for steps in (None, [None], [{"peak_bytes": 0}]):
        (tmp_path / "journal.json").write_text(json.dumps(GOOD["journal"] | {"version": 1, "value": {"steps": steps}}))
        with pytest.raises(TraceError, match="steps"):
            files.load(Journal, tmp_path / "journal.json")

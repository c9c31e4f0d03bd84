"""`elbowroom layout`, from a table to a table."""

from __future__ import annotations

import json
import pathlib

import pytest
from typer.testing import CliRunner

import elbowroom
from elbowroom.cli.main import make_app
from tests.generators import make_chain


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(make_app(), list(words))
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def table(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "step.csv"
    path.write_text("id,lower,upper,size\n1,0,4,1024\n2,2,6,2048\n3,4,8,1024\n")
    return path


def test_a_table_is_laid_out(table: pathlib.Path) -> None:
    output = table.with_name("solution.csv")
    code, stdout, _ = run("layout", str(table), "--output", str(output), "--json")
    document = json.loads(stdout)
    assert (code, document["arena_bytes"], document["bound_bytes"], document["is_optimal"]) == (0, 3072, 3072, True)
    assert output.read_text().splitlines()[0] == "id,lower,upper,size,offset"


def test_too_little_and_malformed(table: pathlib.Path) -> None:
    code, _, stderr = run("layout", str(table), "--capacity", "3000")
    assert code == 3 and "3072 bytes are needed" in stderr
    table.write_text("id,lower,upper,size\n1,0,4,x\n")
    code, _, stderr = run("layout", str(table))
    assert code == 2 and "line 2" in stderr


def test_a_picture(table: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    picture = table.with_suffix(".svg")
    code, _, _ = run("layout", str(table), "--allocator", "best_fit", "--picture", str(picture))
    assert code == 0 and picture.read_text().startswith("<?xml")


def test_options_that_say_nothing_are_refused(table: pathlib.Path, tmp_path: pathlib.Path) -> None:
    trace = tmp_path / "trace.json"
    elbowroom.save(make_chain((64, 64, 64)), trace)
    for arguments, words in (
        ((str(trace), "--hardware", "v100"), "--hardware belongs to --plan"),
        ((str(table), "--costs", "none.json"), "--costs belongs to --plan"),
        ((str(trace), "--pinned"), "is a trace"),
        ((str(trace), "--pinned", "--plan", "plan.json"), "a plan has none"),
    ):
        code, _, stderr = run("layout", *arguments)
        assert code == 2 and words in " ".join(stderr.split())
    assert run("layout", str(trace))[0] == 0

"""`elbowroom share --simulate` and `elbowroom jobs`: what they print, and how they refuse. No torch."""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from elbowroom._family import names
from elbowroom.cli.main import make_app
from elbowroom.sharing import policies
from elbowroom.sharing.transport.address import FOLDER_VARIABLE
from elbowroom.sharing.transport.client import BrokerClient
from tests.pure.test_sharing_transport import MIB, Stage

JOBS = {
    "device_bytes": 100,
    "jobs": [
        {"name": "a", "steps": 10, "front": [[40, 2.0, 0.1], [80, 1.0, 0.1]]},
        {"name": "b", "steps": 10, "front": [[40, 2.0, 0.1], [80, 1.0, 0.1]]},
    ],
}


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(make_app(), [str(each) for each in arguments])
    return done.exit_code, done.output


def test_simulated_policies(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(JOBS))
    code, text = run("share", "--simulate", path, "--policy", "all")
    assert code == 0
    assert all(name in text for name in names(policies))
    code, text = run("share", "--simulate", path, "--policy", "queue,fair", "--memory", "160", "--json")
    found = json.loads(text[text.index("{") :])
    assert [each["policy"] for each in found["policies"]] == ["queue", "fair"]
    assert [each["makespan_seconds"] for each in found["policies"]] == [10.0, 10.0]  # both fit at their fastest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["share"], "--memory is missing"),
        (["share", "--memory", "many"], "--memory"),
        (["share", "--memory", "1GiB", "--policy", "no_such"], "no_such"),
        (["share", "--memory", "1GiB", "--device", "../x"], "is no device"),
        (["share", "--memory", "1GiB", "--device", "tpu"], "is no device"),
        (["share", "--memory", "1GiB", "--quantum", "-1"], "seconds above 0"),
        (["share", "--memory", "1GiB", "--end-silent", "-1"], "--end-silent is at least the 10 s of --heartbeat"),
        (["share", "--memory", "1GiB", "--end-silent", "nan"], "--end-silent is at least"),
        (["share", "--memory", "1GiB", "--end-silent", "inf"], "--end-silent is at least"),
        (["share", "--memory", "1GiB", "--heartbeat", "20", "--end-silent", "19"], "the 20 s of --heartbeat"),
        (["share", "--simulate", "missing.json"], "cannot read missing.json"),
        (["jobs"], "no device is shared"),
        (["jobs", "--device", "cuda:3"], "no broker serves cuda:3"),
    ],
)
def test_refusals(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "none"))
    code, text = run(*arguments)
    assert code == 2
    assert message in " ".join(text.split())


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="er-") as folder:
        made = Stage(pathlib.Path(folder) / "share")
        monkeypatch.setenv(FOLDER_VARIABLE, str(made.address.folder))
        try:
            yield made
        finally:
            made.end()


def test_jobs_shows_who_has_what(stage: Stage) -> None:
    stage.start_broker()
    client = BrokerClient(stage.address, name="resnet [/bold]", floor_bytes=60 * MIB, held_bytes=0)
    try:
        client.wait(None, lambda text: None)
        code, text = run("jobs", "--once")
        assert code == 0
        assert "resnet [/bold]" in text
        assert "100.0 MiB" in text
        code, text = run("jobs", "--json")
        (broker,) = json.loads(text)["brokers"]
        assert (broker["device"], broker["device_bytes"], broker["jobs"][0]["state"]) == ("cpu", 100 * MIB, "running")
    finally:
        client.close()

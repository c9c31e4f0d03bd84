"""Options: what was given, else the environment, else the defaults. No torch."""

from __future__ import annotations

import dataclasses
import os
import pathlib

import pytest

from elbowroom.config import Config, read_budget_variable, read_config
from elbowroom.errors import ElbowroomError, UsageError


def test_the_defaults() -> None:
    assert read_config({}) == Config()


def test_the_environment() -> None:
    environment = {
        "ELBOWROOM_STRATEGY": "offload_all",
        "ELBOWROOM_SPILL_FOLDER": "/somewhere",
        "ELBOWROOM_HOST_BYTES": "2GiB",
        "ELBOWROOM_MIN_OFFLOAD_BYTES": "1MiB",
        "ELBOWROOM_SETTLING_STEPS": "2",
        "ELBOWROOM_ALWAYS_WATCH": "1",
        "ELBOWROOM_OP_TIME_STORE": "0",
        "ELBOWROOM_UNRELATED": "is left alone",
        "STRATEGY": "is not ours",
    }
    assert read_config(environment) == Config(
        strategy="offload_all",
        spill_folder="/somewhere",
        host_bytes=2 << 30,
        min_offload_bytes=1 << 20,
        settling_steps=2,
        always_watch=True,
        op_time_store=False,
    )


def test_what_is_given_comes_first() -> None:
    environment = {"ELBOWROOM_STRATEGY": "offload_all", "ELBOWROOM_SETTLING_STEPS": "not even a number"}
    found = read_config(environment, strategy="keep_all", settling_steps=5, spill_folder=None)
    assert (found.strategy, found.settling_steps) == ("keep_all", 5)


def test_every_option_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"mode": "dynamic", "strategy": "auto", "policy": "lru", "spill_folder": "/x"}
    texts |= {
        "always_watch": "1",
        "op_time_store": "0",
        "profile_store": "0",
        "exact": "0",
        "manages": "activations",
        "without_broker": "stop",
        "if_ranks_differ": "dynamic",
    }
    for field in dataclasses.fields(Config):
        monkeypatch.setenv(f"ELBOWROOM_{field.name.upper()}", texts.get(field.name, "5"))
    found = read_config()
    for field in dataclasses.fields(Config):
        if field.name not in texts:
            assert getattr(found, field.name) == 5


def test_paths_and_zero() -> None:
    assert read_config({}, spill_folder="spilled").spill_folder == os.path.abspath("spilled")
    found = read_config({}, spill_folder=pathlib.Path("/somewhere"), min_offload_bytes=0)
    assert (found.spill_folder, found.min_offload_bytes) == ("/somewhere", 0)
    assert read_config({"ELBOWROOM_MIN_OFFLOAD_BYTES": "0"}).min_offload_bytes == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host_bytes", "much"),
        ("host_bytes", "50%"),
        ("host_bytes", -1),
        ("host_bytes", True),
        ("host_bytes", False),
        ("min_offload_bytes", float("nan")),
        ("min_offload_bytes", []),
        ("settling_steps", "often"),
        ("settling_steps", -1),
        ("settling_steps", 1.5),
        ("settling_steps", True),
        ("settling_steps", 0),
        ("settling_steps", ""),
        ("always_watch", "maybe"),
        ("always_watch", 2),
        ("strategy", 5),
        ("strategy", ""),
        ("strategy", b"auto"),
        ("spill_folder", 3.5),
        ("spill_folder", ""),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name):
        read_config({}, **{name: value})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Config)])
def test_an_empty_variable_is_as_good_as_none(name: str) -> None:
    assert read_config({f"ELBOWROOM_{name.upper()}": ""}) == Config()


def test_unknown_options_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"spil_folder.*spill_folder") as caught:
        read_config({}, spil_folder="/tmp")
    assert isinstance(caught.value, ElbowroomError)
    assert isinstance(caught.value, ValueError)


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(UsageError, match=r"invalid ELBOWROOM_MODE='fast'.*auto, dynamic"):
        read_config({"ELBOWROOM_MODE": "fast"})
    for variable, value in (("ELBOWROOM_MEMORY_BUDGET", "much"), ("ELBOWROOM_MEMORY_BUDGET", "0%")):
        with pytest.raises(UsageError, match=f"{variable}: "):
            read_budget_variable({variable: value})
    with pytest.warns(FutureWarning), pytest.raises(UsageError, match="ELBOWROOM_BUDGET: "):
        read_budget_variable({"ELBOWROOM_BUDGET": "3 pounds"})
    assert [read_budget_variable({"ELBOWROOM_MEMORY_BUDGET": each}) for each in ("60%", "shared")] == ["60%", "shared"]

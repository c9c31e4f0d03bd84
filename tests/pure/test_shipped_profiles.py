"""The shipped profiles: they load, say where each figure comes from, and stand to each other as the cards do."""

from __future__ import annotations

import re

import pytest

from elbowroom.cost.roofline import find_rate, index_rates
from elbowroom.errors import UnknownMember
from elbowroom.hardware.shipped import list_shipped, load_shipped
from elbowroom.ir.hardware import HardwareProfile

NAMES = ("a100", "h100", "h200", "p100", "rtx2080ti", "rtx3090", "rtx4090", "titanv", "v100")


def rate_of(name: str, kind: str, dtype: str) -> float:
    return find_rate(index_rates(load_shipped(name)), kind, dtype)


def test_the_list_is_what_is_there() -> None:
    assert list_shipped() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_is_whole_and_says_where_it_comes_from(name: str) -> None:
    profile = load_shipped(name)
    assert isinstance(profile, HardwareProfile) and profile.device == "cuda"
    assert [tier.name for tier in profile.tiers] == ["device", "host", "disk"]
    assert [(link.upper, link.lower) for link in profile.links] == [("device", "host"), ("host", "disk")]
    kinds = {(rate.kind, rate.dtype) for rate in profile.rates}
    assert {(kind, "float32") for kind in ("matmul", "convolution", "attention", "elementwise")} <= kinds
    assert len(kinds) == len(profile.rates)
    assert profile.op_latency_seconds > 0 and profile.alignment_bytes == 512
    for rate in profile.rates:
        # Both the promise and the share of it that was assumed.
        assert re.search(r"NVIDIA .*: [\d.]+ (TFLOPS|GB/s)", rate.source) and "assumed reachable" in rate.source
        share = float(re.search(r"([\d.]+) % assumed", rate.source)[1]) / 100
        unit = 1e12 if "TFLOPS" in rate.source else 1e9
        promise = float(re.search(r": ([\d.]+) (?:TFLOPS|GB/s)", rate.source)[1]) * unit
        assert rate.per_second == pytest.approx(promise * share)
    for link in profile.links:
        assert "assumed" in link.source
        assert link.out_bytes_per_second > link.back_bytes_per_second / 3 > 0
    assert profile.links[0].out_bytes_per_second > profile.links[1].out_bytes_per_second


def test_newer_cards_are_faster() -> None:
    for kind in ("matmul", "convolution", "attention"):
        for slower, faster in (("p100", "v100"), ("v100", "a100"), ("a100", "h100"), ("rtx2080ti", "rtx4090")):
            assert rate_of(slower, kind, "float16") < rate_of(faster, kind, "float16")
        for name in NAMES:
            assert rate_of(name, kind, "float32") <= rate_of(name, kind, "float16")
    bandwidths = [rate_of(name, "elementwise", "float32") for name in ("p100", "v100", "a100", "h100", "h200")]
    assert bandwidths == sorted(bandwidths) and len(set(bandwidths)) == 5
    capacities = {name: load_shipped(name).tiers[0].capacity_bytes / 2**30 for name in NAMES}
    assert 10 < capacities["rtx2080ti"] < 11 < capacities["titanv"] < 12
    assert 15 < capacities["v100"] < 16 and 130 < capacities["h200"] < 141
    links = [load_shipped(name).links[0].out_bytes_per_second for name in ("v100", "a100", "h100")]
    assert links == sorted(links) and len(set(links)) == 3


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("v100", "NVIDIA Tesla V100 SXM2 16GB"),
        ("RTX 3090", "NVIDIA GeForce RTX 3090"),
        ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100 SXM4 40GB"),
        ("Titan V", "NVIDIA TITAN V"),
    ],
)
def test_names_as_people_write_them(asked: str, found: str) -> None:
    assert load_shipped(asked).name == found


@pytest.mark.parametrize("asked", ["", "gtx1080", "A100 80GB", "rtx", "v10", "v100.json"])
def test_other_cards_are_not_passed_off_as_known_ones(asked: str) -> None:
    with pytest.raises(UnknownMember, match="rtx3090"):
        load_shipped(asked)

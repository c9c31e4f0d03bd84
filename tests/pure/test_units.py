"""Bytes and seconds as people write them. No torch."""

from __future__ import annotations

import contextlib
import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1, 1),
        (8589934592, 8589934592),
        (2000.9, 2000),
        ("8589934592", 8589934592),
        ("1", 1),
        ("1b", 1),
        ("8GiB", 8 << 30),
        ("8gib", 8 << 30),
        (" 8 GiB ", 8 << 30),
        ("8GB", 8 * 10**9),
        ("512 MiB", 512 << 20),
        ("1.5kib", 1536),
        (".5KB", 500),
        ("2TiB", 2 << 40),
        ("3 PB", 3 * 10**15),
        (str(2**62 + 1), 2**62 + 1),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_amounts(text: int | float | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


def test_numbers_of_numpy() -> None:
    assert parse_bytes(numpy.int64(7)) == 7 and parse_bytes(numpy.float32(2048.5)) == 2048  # type: ignore[arg-type]


def test_shares() -> None:
    assert parse_bytes("60%", device_bytes=1000) == 600
    assert parse_bytes("60%", device_bytes=1000, peak_bytes=10) == 600
    assert parse_bytes("60%peak", device_bytes=1000, peak_bytes=10) == 6
    assert parse_bytes(" 60 % Peak ", peak_bytes=10) == 6
    assert parse_bytes("12.5 %", device_bytes=1000) == 125
    assert parse_bytes("100%", device_bytes=7) == 7
    assert parse_bytes("0.001%", device_bytes=10) == 1


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        0.5,
        1.5,
        "1.5",
        "1.5 B",
        math.nan,
        math.inf,
        -math.inf,
        2**63,
        1e300,
        True,
        None,
        [],
        b"8GiB",
        "",
        " ",
        "GiB",
        "-8GiB",
        "8 GiB extra",
        "8GiBB",
        "8 apples",
        "1e9",
        "1_000",
        "1,5GiB",
        "nan",
        "inf",
        "0",
        "0%",
        "60%",
        "60%peak",
        "60%peaks",
        "60peak",
        "٣GiB",
        "8\x00GiB",
        "9999999PiB",
        "9" * 400 + "." + "9" * 400,
        "9" * 5000,
    ],
)
def test_what_is_no_amount_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_bytes(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"), [("60%", "a share of the device"), ("60%peak", "a share of the peak of the step without a plan")]
)
def test_a_share_of_what_is_not_known(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "nbytes"), [("8G", 8 << 30), ("8k", 8 << 10), ("1.5 M", 3 << 19), ("2T", 2 << 40)])
def test_a_letter_alone_counts_in_1024(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "nan%", "1000000%"])
def test_shares_outside_of_everything_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="%"):
        parse_bytes(text, device_bytes=1000)


@given(some.text(max_size=20) | some.floats() | some.integers())
def test_anything_is_an_amount_or_a_value_error(value: str | float | int) -> None:
    with contextlib.suppress(ValueError):
        assert 1 <= parse_bytes(value, device_bytes=1 << 40) < 2**63


@given(some.integers(1, 2**63 - 1))
def test_plain_numbers_are_exact(nbytes: int) -> None:
    assert parse_bytes(nbytes) == parse_bytes(str(nbytes)) == parse_bytes(f"{nbytes}B") == nbytes


@given(some.integers(1, 2**40), some.sampled_from(["KiB", "MiB", "KB", "GB"]))
def test_units_multiply_exactly(count: int, unit: str) -> None:
    factor = {"KiB": 1024, "MiB": 1024**2, "KB": 1000, "GB": 10**9}[unit]
    if count * factor < 2**63:
        assert parse_bytes(f"{count} {unit}") == count * factor


@given(some.integers(1, 2**62))
def test_what_is_printed_is_read_back(nbytes: int) -> None:
    text = format_bytes(nbytes)
    assert parse_bytes(text) == pytest.approx(nbytes, rel=0.06 if "KiB" in text or "MiB" in text else 0.006, abs=1)
    assert format_bytes(-nbytes) == "-" + text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (3 << 29, "1.50 GiB"),
        (-3 << 20, "-3.0 MiB"),
        (5 << 40, "5.00 TiB"),
        (5 << 50, "5120.00 TiB"),
    ],
)
def test_bytes_for_people(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"),
        (1.234, "1.23 s"),
        (119.0, "119.00 s"),
        (0.0456, "45.6 ms"),
        (7.8e-6, "7.8 us"),
        (0.9999, "999.9 ms"),
        (0.99996, "1.00 s"),
        (0.00099999, "1.0 ms"),
        (119.999, "2 min 0 s"),
        (125.0, "2 min 5 s"),
        (179.7, "3 min 0 s"),
        (-0.5, "-500.0 ms"),
        (math.inf, "inf s"),
    ],
)
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text

"""Parses and formats bytes and seconds.

Inside Elbowroom bytes are `int` and seconds are `float`.
"""

from __future__ import annotations

import math
import numbers
import re

_POWERS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _POWERS[f"{_letter}b"] = 1000**_power
    _POWERS[f"{_letter}ib"] = 1024**_power
    _POWERS[_letter] = 1024**_power  # as in Docker, Slurm and Java

_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z]*|%|%\s*peak)\s*", re.IGNORECASE)


def parse_bytes(value: int | float | str, *, device_bytes: int | None = None, peak_bytes: int | None = None) -> int:
    """Read an amount of memory: 8589934592, "8GiB", "8G" (the same), "8GB", "512 MiB", "60%", or "60%peak".

    Args:
        device_bytes: total memory of the device, for "60%"; None if no device is known.
        peak_bytes: peak of the step without a plan, for "60%peak"; None if unknown.

    Returns:
        Bytes, rounded down, at least 1.

    Raises:
        ValueError: not an amount, not positive, not finite, a share outside (0, 100], or a share of an unknown amount.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, (bool, int, float)):  # NumPy's
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"an amount of memory must be a number or text like '8GiB', not {value!r}")
    if isinstance(value, str):
        match = _TEXT.fullmatch(value)
        if match is None:
            known = "8589934592, '8GiB' or '8GB'" if device_bytes is None else "8589934592, '8GiB', '8GB' or '60%'"
            raise ValueError(f"{value!r} is not an amount of memory; write {known}")
        number, unit = float(match[1]), match[2].lower()
        if unit == "%":
            return _take_share(value, number, device_bytes, "of the device, whose memory")
        if unit.startswith("%"):
            return _take_share(value, number, peak_bytes, "of the peak of the step without a plan, which")
        if unit not in _POWERS:
            raise ValueError(
                f"{value!r} has no known unit; use KiB MiB GiB TiB or K M G T (1024), or KB MB GB TB (1000)"
            )
        # Keep integers exact, beyond 2**53.
        exact = int(match[1]) * _POWERS[unit] if match[1].isdigit() else None
        amount: float = exact if exact is not None else number * _POWERS[unit]
    else:
        amount = value
    if math.isfinite(amount) and 1 <= amount < 1024 and amount != int(amount):
        raise ValueError(f"{value!r} is not a whole number of bytes; write '{amount:g}GiB' or '{amount:g}GB'")
    if not math.isfinite(amount) or amount < 1:
        raise ValueError(f"an amount of memory must be at least one byte, not {value!r}")
    if amount >= 2**63:
        raise ValueError(f"{value!r} is more memory than 64 bits can count")
    return int(amount)


def _take_share(text: str, number: float, whole_bytes: int | None, of: str) -> int:
    if not 0 < number <= 100:
        raise ValueError(f"{text!r} is not a share between 0% and 100%")
    if whole_bytes is None:
        raise ValueError(f"{text!r} is a share {of} is not known here; give bytes, as in '8GiB'")
    return max(1, int(whole_bytes * number / 100))


def format_bytes(nbytes: int | float) -> str:
    """Format bytes in powers of 1024: '512 B', '1.50 GiB', '-3.0 MiB'."""
    sign, amount = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    if amount < 1024:
        return f"{sign}{amount:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        amount /= 1024
        if amount < 1023.95 or unit == "TiB":
            break
    digits = 2 if unit in ("GiB", "TiB") else 1
    return f"{sign}{amount:.{digits}f} {unit}"


def format_seconds(seconds: float) -> str:
    """Format seconds: '1.23 s', '45.6 ms', '7.8 us', '2 min 5 s'."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    sign, amount = ("-", -seconds) if seconds < 0 else ("", seconds)
    # Each limit is the value from which on rounding reaches the next unit.
    if amount >= 119.995:
        minutes, rest = divmod(round(amount), 60)
        return f"{sign}{minutes} min {rest} s"
    if amount >= 0.99995 or amount == 0:
        return f"{sign}{amount:.2f} s"
    if amount >= 0.99995e-3:
        return f"{sign}{amount * 1e3:.1f} ms"
    return f"{sign}{amount * 1e6:.1f} us"

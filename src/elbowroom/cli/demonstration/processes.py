"""Runs each part of the demo in its own process, so that no part reuses memory of another one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from elbowroom.errors import ElbowroomError


def run_part(arguments: Sequence[str]) -> dict[str, Any]:
    """Run one command of this program with `--json` and read its document. Its progress goes to stderr.

    Raises:
        ElbowroomError: it failed; its message is on stderr.
    """
    command = [sys.executable, "-m", "elbowroom", *arguments, "--json"]
    finished = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if finished.returncode:
        raise ElbowroomError(f"`elbowroom {' '.join(arguments)}` {_describe(finished.returncode)}")
    try:
        document: dict[str, Any] = json.loads(finished.stdout)
    except ValueError as error:
        raise ElbowroomError(f"`elbowroom {' '.join(arguments)}` did not print a JSON document") from error
    return document


def _describe(code: int) -> str:
    if code == -9:
        return "was killed (signal 9), most likely for lack of memory"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

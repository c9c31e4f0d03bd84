"""Parts of a benchmark that run in processes of their own, and figures of a process."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any


class PartFailed(RuntimeError):
    """A part ended with an error; the text is the end of what it printed."""


def run_apart(script: str, *arguments: object) -> dict[str, Any]:
    """Run a script and return the JSON object in the last line that it prints.

    Raises:
        PartFailed: it ended with an error.
    """
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PartFailed(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def count_faults() -> int:
    """Return the page faults of this process so far that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

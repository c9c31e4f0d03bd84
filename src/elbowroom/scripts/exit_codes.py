"""Exit codes of the programs.

0    success
1    failure
2    invalid request: a malformed budget, an unknown name, a damaged file
3    no plan fits the budget
130  interrupted with Ctrl-C

A script that `elbowroom run` runs has its own exit codes; these are for what Elbowroom itself reports.
"""

from __future__ import annotations

from elbowroom.errors import ElbowroomError, Infeasible, TraceError, UsageError

FAILED = 1
MISUSED = 2
INFEASIBLE = 3
INTERRUPTED = 130


def find_exit_code(error: ElbowroomError) -> int:
    """Return the exit code of an error."""
    if isinstance(error, (UsageError, TraceError)):
        return MISUSED
    return INFEASIBLE if isinstance(error, Infeasible) else FAILED


def find_cause(error: BaseException) -> ElbowroomError | None:
    """Return the error of ours that an exception is, or was raised from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, ElbowroomError):
            return current
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return None

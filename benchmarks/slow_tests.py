"""Which tests are slow: those that `make test` leaves out, and `make test-all` runs.

    make test-all PYTEST_ADDOPTS="--junitxml=/tmp/times.xml -o junit_duration_report=call"
    python benchmarks/slow_tests.py /tmp/times.xml

Writes tests/slow_tests.txt: the tests that took longer than `SECONDS`, without fixtures, which others may share. Of a
test with several cases, the quickest one stays among the others if it took at most `QUICKEST_SECONDS`, and so do those
of `KEPT`.
"""

from __future__ import annotations

import collections
import pathlib
import sys
import xml.etree.ElementTree as ElementTree

SECONDS = 1.5
QUICKEST_SECONDS = 13.0
KEPT = (
    "tests/test_tree.py",
    "tests/cpu/test_cli.py::test_demo",
    "tests/cpu/test_cli.py::test_capture",
    "tests/cpu/test_device_ledger.py::test_watchers_may_be_entered_anew_inside_an_op",
)
LIST = pathlib.Path(__file__).parents[1] / "tests" / "slow_tests.txt"


def read_seconds(path: str) -> dict[str, float]:
    """Return the seconds of each test of a JUnit file, by its pytest id, without those in classes."""
    found = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        if (LIST.parents[1] / file).is_file():
            found[f"{file}::{case.attrib['name']}"] = float(case.attrib["time"])
    return found


def find_slow(seconds: dict[str, float]) -> list[str]:
    """Return the ids of slow tests, in order."""
    cases = collections.defaultdict(list)
    for test in seconds:
        cases[test.partition("[")[0]].append(test)
    slow = []
    for tests in cases.values():
        quickest = min(tests, key=seconds.__getitem__)
        stays = len(tests) > 1 and seconds[quickest] <= QUICKEST_SECONDS
        others = [each for each in tests if not (stays and each == quickest) and not each.startswith(KEPT)]
        slow += [each for each in others if seconds[each] > SECONDS]
    return sorted(slow)


def main() -> None:
    seconds = read_seconds(sys.argv[1])
    slow = find_slow(seconds)
    LIST.write_text("".join(f"{each}\n" for each in slow))
    total, left = sum(seconds.values()), sum(seconds[each] for each in slow)
    print(f"{len(slow)} of {len(seconds)} tests are slow: they took {left:.0f} of {total:.0f} s")


if __name__ == "__main__":
    main()

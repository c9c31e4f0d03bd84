"""Marks every test by its folder, skips what this machine cannot run, and lets nothing leak."""

from __future__ import annotations

import functools
import gc
import os
import pathlib
from collections.abc import Iterator

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from tests.leaks import nothing_leaks, profile  # noqa: F401 -- fixtures of every test

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // WORKERS)))
"""Threads of all workers that wait for each other on the same cores take half as long again."""

os.environ.setdefault("ELBOWROOM_OP_TIME_STORE", "0")
os.environ.setdefault("ELBOWROOM_PROFILE_STORE", "0")
"""What the developer's machine measured before changes no test."""

HERE = pathlib.Path(__file__).parent
NEEDS = {"pure": "pure", "contracts": "pure", "cpu": "cpu", "gpu": "gpu"}

SLOW = frozenset((HERE / "slow_tests.txt").read_text().splitlines())
"""Ids of tests that run with `--slow` only (`benchmarks/slow_tests.py`)."""

FIRST = (
    "test_same_results",
    "test_dynamic_static",
    "test_known_pitfalls",
    "test_strategies",
    "test_allocators",
    "test_cli",
)
"""The files that take longest come first, so that no core waits for another at the end. The first one needs machine
code, and the second, which runs beside it, none: so it is compiled once for both."""

# Examples repeat from run to run, so that a failure is a change. HYPOTHESIS_PROFILE=explore looks for new ones.
hypothesis.settings.register_profile("repeat", deadline=None, derandomize=True, database=None, max_examples=30)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1500)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "repeat")
hypothesis.settings.load_profile(PROFILE)
if PROFILE == "repeat":  # else constants of every module that the process has imported so far change the examples
    providers._get_local_constants = providers.Constants


@pytest.fixture(autouse=True, scope="module")
def what_is_there_stays() -> None:
    """A collection that a test asks for need not look through all that was imported before its file."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def small_hosts() -> Iterator[None]:
    """A disk may follow hosts as small as the steps of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elbowroom.cost.transfers.LEAST_PIECE_BYTES", 1)
        yield


@functools.cache
def _why_no_cuda() -> str:
    import torch

    return "" if torch.cuda.is_available() else "needs a CUDA device, and torch finds none"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run slow tests, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The folder of a test says what it needs; the longest files come first; slow tests are left out."""
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker("slow")
    if not config.getoption("slow"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("slow")])
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        if folder in NEEDS:
            item.add_marker(NEEDS[folder])
        if NEEDS.get(folder) == "gpu" and _why_no_cuda():
            item.add_marker(pytest.mark.skip(reason=_why_no_cuda()))


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """Has kernels divide their work between two threads, for tests of what depends on it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def whole_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has rooms run ops as a whole, for tests of what happens if one does not fit."""
    monkeypatch.setattr("elbowroom.runtime.sliced_ops.SlicedOps.wants", lambda *_: False)


@pytest.fixture
def activations_only(monkeypatch: pytest.MonkeyPatch, whole_ops: None) -> None:
    """Has rooms keep the model's state on the device and run ops as a whole, for tests of how activations leave."""
    monkeypatch.setenv("ELBOWROOM_MANAGES", "activations")

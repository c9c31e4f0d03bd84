"""The allocator that counts: every byte of every thread, and room is asked for before a request goes over the limit."""

from __future__ import annotations

import gc
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import elbowroom
from benchmarks.profiler_meter import ProfilerMeter
from elbowroom.errors import Infeasible, MemoryRefused
from elbowroom.hooks import meter
from elbowroom.hooks.cpu_ledger import CpuLedger
from elbowroom.hooks.ledger import NO_LIMIT
from elbowroom.hooks.loaded_memory import find_loaded
from elbowroom.hooks.meter import CpuMeter
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.native import library
from tests.models import MODELS
from tests.native.outside_meter import check_program
from tests.system_limit import fill_memory, limited_data

pytestmark = pytest.mark.usefixtures("activations_only")

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def ledger() -> Iterator[CpuLedger]:
    made = CpuLedger()
    yield made
    made.close()


def refuse(requested_bytes: int, missing_bytes: int) -> bool:
    raise MemoryError(requested_bytes, missing_bytes)


def never(requested_bytes: int, missing_bytes: int) -> bool:
    raise AssertionError("there is room")


def make(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


@pytest.mark.parametrize("name", ["mobilenet_v3_large", "gpt2", "lstm"])
def test_the_peak_is_what_the_profiler_sees(name: str, ledger: CpuLedger) -> None:
    model, _, step = MODELS[name]().make()
    step(0)
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    meter, scope = ProfilerMeter(), ledger.scope
    with ledger.counting(NO_LIMIT, never):
        scope.reset_peak()
        before = scope.live_bytes
        meter.start()
        step(1)
        meter.stop()
        assert scope.peak_bytes - before == meter.peak_bytes > 0


def test_what_was_there_counts_once_it_is_adopted() -> None:
    find_loaded([])  # its first call allocates two bytes
    there, array = make(1000), np.zeros(500, dtype=np.uint8)
    foreign, shared = torch.from_numpy(array), make(300).share_memory_()
    ledger = CpuLedger()
    scope = ledger.scope
    for _ in range(2):  # each once, by whatever view
        ledger.adopt([there, there[10:], foreign, shared])
        assert (scope.live_bytes, scope.adopted_bytes) == (1800, 1800)
    assert shared.is_shared() and foreign.data_ptr() == array.ctypes.data
    since = make(50)
    ledger.adopt([since])
    assert (scope.live_bytes, scope.adopted_bytes) == (1850, 1800), "it was counted when it was allocated"
    del there, foreign, shared, since
    scope.reset_peak()
    assert scope.live_bytes == 0
    ledger.close()


def test_an_input_that_was_there_before_counts_until_its_step_ends() -> None:
    there = make(3000)
    ledger = CpuLedger()
    since = make(50)
    for _ in range(2):
        with ledger.counting(3500, refuse):
            for tensor in (there, there[10:], since):
                ledger.adopt_input(tensor.untyped_storage())
            assert ledger.scope.live_bytes == 3050
            with pytest.raises(MemoryError):
                make(451)
        assert ledger.scope.live_bytes == 50
    del since
    ledger.close()


def test_room_is_made_for_an_input_before_it_counts() -> None:
    there = make(4 * KIB)
    ledger = CpuLedger()
    scope, held, asked = ledger.scope, [], []

    def give_up_one(requested_bytes: int, missing_bytes: int) -> bool:
        asked.append((requested_bytes, missing_bytes))
        held.pop()
        return True

    with ledger.counting(10 * KIB, give_up_one):
        held += [make(4 * KIB), make(4 * KIB)]
        assert ledger.adopt_inputs([there, there[10:]])
        assert asked == [(4 * KIB, 2 * KIB)] and scope.peak_bytes == 8 * KIB == scope.live_bytes
        assert not ledger.adopt_inputs([there])
    held.clear()
    with ledger.counting(3 * KIB, refuse):
        for adopt in (lambda: ledger.adopt_inputs([there]), lambda: ledger.adopt_input(there.untyped_storage())):
            with pytest.raises(MemoryError) as caught:
                adopt()
            assert caught.value.args == (4 * KIB, KIB)
        assert (scope.live_bytes, scope.adopted_bytes) == (0, 4 * KIB)
    ledger.close()


def test_an_input_that_is_counted_while_room_is_made_for_it_counts_once() -> None:
    there = make(4 * KIB)
    ledger = CpuLedger()

    def count_it(requested_bytes: int, missing_bytes: int) -> bool:
        assert ledger.adopt_inputs([there])
        ledger.set_limit(NO_LIMIT)
        return True

    with ledger.counting(KIB, count_it):
        assert not ledger.adopt_inputs([there])
        assert (ledger.scope.live_bytes, ledger.scope.adopted_bytes) == (4 * KIB, 4 * KIB)
    assert ledger.scope.live_bytes == 0
    ledger.close()


def test_an_adopted_storage_that_grows_is_counted_as_it_is(ledger: CpuLedger) -> None:
    tensor = make(1000)
    ledger.adopt([tensor])
    with ledger.counting(NO_LIMIT, never):
        live = ledger.scope.live_bytes
        tensor.untyped_storage().resize_(5000)
        assert ledger.scope.live_bytes == live + 4000
        tensor.untyped_storage().resize_(0)
        assert ledger.scope.live_bytes == live - 1000


def test_rooms_count_their_own_and_what_is_in_none() -> None:
    one, other = CpuLedger(), CpuLedger()
    lives = one.scope.live_bytes, other.scope.live_bytes
    with one.counting(NO_LIMIT, never):
        own = make(KIB)
        with other.counting(NO_LIMIT, never):
            others = make(10 * KIB)
    nobodys = make(100 * KIB)
    assert one.scope.live_bytes - lives[0] == 101 * KIB and other.scope.live_bytes - lives[1] == 110 * KIB
    late = CpuLedger()
    assert late.scope.live_bytes == 0
    with other.counting(NO_LIMIT, never):
        del own, nobodys  # whoever frees it
    assert one.scope.live_bytes == lives[0] and other.scope.live_bytes - lives[1] == 10 * KIB
    assert late.scope.live_bytes == 0, "what was there before a scope is not taken off it either"
    del others
    for each in (one, other, late):
        each.close()


def test_room_is_asked_for_before_it_is_short(ledger: CpuLedger) -> None:
    held = []
    asked: list[tuple[int, int]] = []

    def give_up_one(requested_bytes: int, missing_bytes: int) -> bool:
        asked.append((requested_bytes, missing_bytes))
        held.pop()
        return True

    scope = ledger.scope
    limit = scope.live_bytes + 10 * KIB
    with ledger.counting(limit, give_up_one):
        held += [make(4 * KIB), make(4 * KIB)]
        scope.reset_peak()
        held.append(make(10 * KIB))
        assert asked == [(10 * KIB, 8 * KIB), (10 * KIB, 4 * KIB)] and len(held) == 1
        assert scope.peak_bytes == limit


def test_a_refusal_ends_the_op_that_asked(ledger: CpuLedger) -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    loss = (weight @ weight).tanh().sum()
    with ledger.counting(ledger.scope.live_bytes + 8 * KIB, refuse):
        with pytest.raises(MemoryError) as caught:
            torch.randn(64, 64) @ torch.randn(64, 64)
        assert caught.value.args == (16 * KIB, 8 * KIB)
        with pytest.raises(MemoryError):  # through the engine of autograd
            loss.backward()
    assert weight.grad is None
    (weight @ weight).sum().backward()
    assert weight.grad is not None


def test_what_makes_room_may_use_tensors(ledger: CpuLedger) -> None:
    seen = []

    def work(requested_bytes: int, missing_bytes: int) -> bool:
        with torch.enable_grad():
            leaf = torch.ones(1000, requires_grad=True)
            (leaf * 2).sum().backward()
        seen.append((float(leaf.grad.sum()), torch.is_grad_enabled()))  # type: ignore[union-attr]
        return False

    with ledger.counting(ledger.scope.live_bytes, work), torch.no_grad():
        assert torch.ones(10).add(1).sum() == 20
    assert seen and set(seen) == {(2000.0, False)}


def test_threads_that_are_in_no_step_are_held_to_it_as_well(ledger: CpuLedger) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            make(100 * KIB)
        except MemoryError as error:
            raised.append(error)

    with ledger.counting(ledger.scope.live_bytes + 50 * KIB, refuse):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(raised) == 1
    make(100 * KIB)


def test_many_threads(ledger: CpuLedger) -> None:
    live = ledger.scope.live_bytes
    kept: list[list[torch.Tensor]] = [[] for _ in range(4)]

    def run(own: list[torch.Tensor]) -> None:
        for index in range(3000):
            own.append(make(64 + index % 1000))
            if len(own) > 20:
                del own[:10]

    threads = [threading.Thread(target=run, args=(each,)) for each in kept]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    held = sum(tensor.nbytes for own in kept for tensor in own)
    assert ledger.scope.live_bytes - live == held
    kept.clear()
    assert ledger.scope.live_bytes == live


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_others_allocate(ledger: CpuLedger) -> None:
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            make(1000)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for each in threads:
        each.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                tensor = make(KIB)
                del tensor
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for each in threads:
            each.join()


SCRIPT = """
import torch
import elbowroom
from elbowroom.hooks.cpu_ledger import CpuLedger
from elbowroom.hooks.loaded_memory import find_loaded
ledger = CpuLedger()
ledger.scope.limit_bytes = 1
ledger.counting(1, lambda requested, missing: False).__enter__()  # and is never left
kept = [torch.zeros(1000) for _ in range(10)]
class Late:
    def __del__(self): torch.zeros(1000)
late = Late()
print("end")
"""


def test_the_interpreter_ends_while_it_counts() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_changes_are_recorded_in_order(ledger: CpuLedger) -> None:
    scope: Any = ledger.scope
    with ledger.counting(NO_LIMIT, never):
        scope.set_recording(True)
        live = scope.live_bytes
        first = make(KIB)
        second = make(2 * KIB)
        del first
        times, lives = (np.frombuffer(each, dtype=np.int64) for each in scope.take_changes())
        scope.set_recording(False)
    assert (lives - live).tolist() == [0, KIB, 3 * KIB, 2 * KIB]
    assert (np.diff(times) >= 0).all()
    del second


JOBS = """
import ctypes, gc, sys
import torch
import elbowroom
from elbowroom.ir.hardware import HardwareProfile
from tests.cpu.test_room import make_job

library, profile, is_first = sys.argv[1], elbowroom.load(HardwareProfile, sys.argv[2]), sys.argv[3] == "first"
meter = ctypes.CDLL(library)
meter.reset_peak.restype = meter.read_peak.restype = ctypes.c_int64
if not is_first:
    elbowroom.fit(torch.nn.Linear(1, 1), [], "1GiB", profile=profile).detach()
meter.register_meter()


def train(kind, budget=None, **options):
    gc.collect()
    base = meter.reset_peak()
    model, optimizers, step = make_job(kind)
    room = elbowroom.fit(model, optimizers, budget, profile=profile, min_offload_bytes=1, **options) if budget else None
    peaks = []
    for _ in range(5):
        meter.reset_peak()
        if room is None:
            step()
        else:
            with room.step():
                step()
        peaks.append(meter.read_peak() - base)
    moved = room is not None and sum(each.offloaded_bytes + each.recomputed for each in room.journal().steps)
    if room is not None:
        assert [each.peak_bytes for each in room.journal().steps][2:] == peaks[2:], (room.journal().steps, peaks)
        room.detach()
    return peaks, [each.tolist() for each in model.parameters()], moved


for kind in ("mlp", "conv", "transformer"):
    plain, expected, _ = train(kind)
    # A convolution is refused in dynamic mode for what is estimated that it takes inside itself.
    for options in ({}, {"mode": "dynamic", "policy": "dtr"}) if kind != "conv" else ({},):
        # What a convolution allocates inside itself depends on the processor: at 0.9 of its peak there may be no plan.
        budget = int((0.95 if kind == "conv" else 0.9) * max(plain))
        peaks, found, moved = train(kind, budget, **options)
        assert max(peaks) <= budget and moved and found == expected, (kind, options, peaks, budget, moved)
"""


@pytest.mark.parametrize("order", ["first", "last"])
def test_no_step_goes_over_its_budget_by_a_meter_that_is_not_ours(
    order: str, tmp_path: pathlib.Path, profile: HardwareProfile
) -> None:
    """Below the ledger, which leaves all blocks to it then, and before it, where large ones lie in the arena."""
    check_program(JOBS, order, tmp_path, profile)


def test_what_two_rooms_use_counts_for_both() -> None:
    one, other = CpuLedger(), CpuLedger()
    with one.counting(NO_LIMIT, never):
        tensor = make(KIB)
    for _ in range(2):
        other.adopt([tensor])
        assert (one.scope.live_bytes, other.scope.live_bytes) == (KIB, KIB)
    one.close()
    third = CpuLedger()
    third.adopt([tensor])  # of a room that is there no more
    assert third.scope.live_bytes == KIB
    del tensor
    for each in (other, third):
        each.scope.reset_peak()
        assert each.scope.live_bytes == 0
        each.close()


def test_threads_do_not_get_the_same_room(ledger: CpuLedger) -> None:
    """What is asked for is counted before it is allocated."""
    limit = ledger.scope.live_bytes + 100 * KIB
    refused: list[int] = []

    def run() -> None:
        for _ in range(300):
            try:
                make(60 * KIB)
            except MemoryError:
                refused.append(1)

    with ledger.counting(limit, refuse):
        ledger.scope.reset_peak()
        threads = [threading.Thread(target=run) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert ledger.scope.peak_bytes <= limit
        make(60 * KIB)
    assert ledger.scope.live_bytes + 100 * KIB == limit


def test_a_request_that_fails_is_not_counted(ledger: CpuLedger) -> None:
    live = ledger.scope.live_bytes
    with ledger.counting(NO_LIMIT, lambda *_: False), pytest.raises(RuntimeError, match="allocate"):
        make(1 << 50)
    assert ledger.scope.live_bytes == live


def test_short_steps_share_a_reading_of_the_resident_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    now, resets, readings = 0.0, [], []
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now)
    monkeypatch.setattr(meter, "reset_resident_peak", lambda: resets.append(now))
    monkeypatch.setattr(meter, "read_resident_peak", lambda: readings.append(now) or len(readings))
    peak, found = meter._ResidentPeak(), []
    for seconds in (0.01, 0.01, 0.5, 0.5, 0.01):
        peak.begin_step()
        now += seconds
        found.append(peak.read())
    assert found == [1, 1, 2, 3, 3]
    assert resets == pytest.approx([0.0, 0.52, 1.02]) and len(readings) == 3


def test_where_the_system_has_no_more_room_is_made(ledger: CpuLedger) -> None:
    held = [make(16 * MIB) for _ in range(8)]
    asked = []

    def give_up_one(requested_bytes: int, missing_bytes: int) -> bool:
        if not is_full:
            return False
        asked.append((requested_bytes, missing_bytes))
        held.pop()
        return True

    gc.collect()
    with ledger.counting(ledger.live_bytes + 4096 * MIB, give_up_one), limited_data(32 * MIB):
        is_full = False
        filled = fill_memory(64 * MIB)  # pages that malloc and the arena still have
        is_full = True
        more = make(64 * MIB)
    assert more.nbytes == 64 * MIB
    del filled
    assert asked and set(asked) == {(64 * MIB, 64 * MIB)} and held


def test_where_the_system_has_no_more_and_nothing_may_leave_the_error_has_the_numbers(ledger: CpuLedger) -> None:
    def refuse_to_move(requested_bytes: int, missing_bytes: int) -> bool:
        raise Infeasible(needed_bytes=2, budget_bytes=1, op="an op", is_whole_step=False)

    limit_bytes = ledger.live_bytes + 4096 * MIB
    with ledger.counting(limit_bytes, refuse_to_move), limited_data(32 * MIB):
        filled = fill_memory(256 * MIB)
        held = ledger.live_bytes
        with pytest.raises(MemoryRefused) as caught:
            make(256 * MIB)
        assert ledger.live_bytes == held
    del filled
    error = caught.value
    numbers = error.requested_bytes, error.held_bytes, error.budget_bytes
    assert numbers == (256 * MIB, held, limit_bytes)
    assert all(str(each) in str(error) for each in numbers) and "RLIMIT_DATA" in str(error)
    assert error.__cause__ is None and error.__context__ is None, "it would hold what the step had"


def count_beyond(live_bytes: int) -> int:
    """Mapped bytes beyond so many and the slack that the arena keeps."""
    mapped: int = library.load().get_arena().statistics()["mapped_bytes"]
    return mapped - live_bytes - max(live_bytes // 64, MIB)


def test_pages_are_given_back_when_a_step_begins_and_when_its_room_ends() -> None:
    one, other = CpuLedger(), CpuLedger()
    live: int = library.load().get_arena().statistics()["live_bytes"]
    make(256 * MIB)  # outside of any step
    assert count_beyond(live) > 128 * MIB
    with one.counting(one.live_bytes + 64 * MIB, never):
        assert -MIB <= count_beyond(live + 64 * MIB) <= 0
        make(64 * MIB)
        with other.counting(other.live_bytes + 32 * MIB, never):
            kept = make(32 * MIB)
        other.close()
        assert count_beyond(live + 48 * MIB) > 0, "the step that runs may need them again"
    assert kept.nbytes == 32 * MIB
    one.close()
    assert count_beyond(live + 32 * MIB) <= 0


def test_a_room_gives_back_what_measuring_took_and_when_it_ends_what_its_steps_took(
    monkeypatch: pytest.MonkeyPatch, profile: HardwareProfile
) -> None:
    def probe(*_: object, **__: object) -> HardwareProfile:
        make(64 * MIB)
        return profile

    monkeypatch.setattr("elbowroom.hardware.profile_store.probe", probe)
    live: int = library.load().get_arena().statistics()["live_bytes"]
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    room = elbowroom.fit(model, optimizer, "64MiB", mode="dynamic")
    assert count_beyond(live) <= MIB
    with room.step():
        model(torch.randn(16384, 64)).sum().backward()
    assert count_beyond(live) > 16 * MIB
    room.detach()
    assert count_beyond(live) <= MIB


def test_the_workspace_of_an_op_leaves_out_what_moved_during_it(ledger: CpuLedger) -> None:
    """State that the op brought back, and what left to make room for it, are none of its own."""
    meter = CpuMeter(ledger)
    with ledger.counting(1 << 40, never):
        leaving = make(5 * MIB)
        meter.start()
        begun = meter.begin_op()
        ledger.note_move(3 * MIB)
        arrived = make(3 * MIB)
        result = make(MIB)
        del leaving
        ledger.note_move(-5 * MIB)
        workspace = make(2 * MIB)
        del workspace
        meter.end_op(begun)
        meter.stop()
        del arrived, result
    assert meter.workspace_bytes([MIB]) == (2 * MIB,)

"""Forecasts, by hand and by property. No torch."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.errors import TraceError
from elbowroom.ir.costs import Costs
from elbowroom.ir.events import StorageFreed
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.hardware import Link
from elbowroom.ir.plan import Choice, Decision, Plan, Segment
from elbowroom.ir.trace import Need, Role, Save, Storage, Trace
from elbowroom.planner.problem import plan
from elbowroom.simulator.clock import Lanes
from elbowroom.simulator.planned import list_events
from elbowroom.simulator.simulate import simulate
from tests.generators import Program, jobs, keep_everything, make_chain, make_costs, make_link
from tests.oracles import count_live_bytes

pytestmark = pytest.mark.usefixtures("small_hosts")


def make_step() -> Trace:
    """Two storages saved, other work, and both needed again, the second first.

    tick   0      1     2      3     4     5     6       7      8     9       10     11
           big  save  small  save  work  work  need    use    end  need     use    end
    """
    program = Program()
    big = program.op("big", [], 1000)
    first = program.save(big)
    small = program.op("small", [big], 100)
    program.release(storage=big)
    second = program.save(small)
    program.release(storage=small)
    for _ in range(2):
        work = program.op("work", [], 10, role=Role.TEMPORARY)
        program.release(storage=work)
    for save in (second, first):
        need = program.need(save)
        used = program.op("use", [save], 1, role=Role.TEMPORARY)
        program.release(need=need, save=save, storage=used)
        end = program.op("end", [], 1, role=Role.TEMPORARY)
        program.release(storage=end)
    return program.finish("by hand")


TRACE = make_step()
COSTS = make_costs(TRACE, op_seconds=1.0, link=make_link(per_second=500.0, latency_seconds=0.5))
BIG, SMALL = 0, 1


def offload(storage: int, leave: int, release: int, back: int) -> Decision:
    return Decision(storage=storage, gap=0, choice=Choice.OFFLOAD, leave=leave, release=release, back=back, segment=-1)


def drop(storage: int, leave: int, segment: int = 0) -> Decision:
    return Decision(
        storage=storage, gap=0, choice=Choice.RECOMPUTE, leave=leave, release=leave, back=leave, segment=segment
    )


def forecast(*decisions: Decision, segments: tuple[Segment, ...] = (), costs: Costs = COSTS) -> Forecast:
    made = Plan(trace_digest=costs.trace_digest, strategy="", budget_bytes=0, decisions=decisions, segments=segments)
    return simulate(TRACE, costs, made)


def test_the_plain_step() -> None:
    found = forecast()
    assert found.live_bytes == (1000, 1000, 1100, 1100, 1110, 1110, 1100, 1101, 1001, 1000, 1001, 1)
    assert (found.peak_bytes, found.peak_tick) == (1110, 4)
    assert found.step_seconds == found.compute_seconds == 8
    assert (found.stall_seconds, found.recompute_seconds) == (0, 0)
    assert (found.offloaded_bytes, found.reloaded_bytes, found.lower_tier_bytes) == (0, 0, 0)


def test_hooks_overheads_workspaces_and_rounding() -> None:
    costs = dataclasses.replace(COSTS, hook_seconds=0.25, overhead_seconds=0.125, alignment_bytes=512)
    costs = dataclasses.replace(costs, workspace_bytes=(0, 0, 0, 0, 7, 0, 0, 0))
    found = forecast(costs=costs)
    assert found.step_seconds == 8 + 4 * 0.25 + 0.125
    # 1000 counts as 1024, 100 and 10 and 1 as 512.
    assert found.live_bytes == (1024, 1024, 1536, 1536, 2048, 2048, 1536, 2048 + 7, 1536, 1024, 1536, 512)
    assert found.peak_tick == 7


def test_an_offload_takes_its_bytes_away_between_release_and_reload() -> None:
    # Out at second 1 for 2.5 seconds: 3.5; given up at tick 6 (second 4), back at tick 6 for 2.5 seconds, 6.5.
    found = forecast(offload(BIG, 1, 3, 6))
    # At tick 3 (second 2) the copy has 1.5 seconds to go: the program waits.
    assert found.stall_seconds == pytest.approx(1.5 + 0.5)
    assert found.step_seconds == pytest.approx(8 + 2.0)
    assert found.live_bytes == (1000, 1000, 1100, 1100, 110, 110, 1100, 1101, 1001, 1000, 1001, 1)
    assert (found.offloaded_bytes, found.reloaded_bytes, found.lower_tier_bytes) == (1000, 1000, 1000)


def test_a_reload_on_demand_is_waited_for_in_full() -> None:
    found = forecast(offload(BIG, 1, 6, 9))
    assert found.live_bytes[7:9] == (101, 1)
    assert found.stall_seconds == pytest.approx(2.5)  # the copy out ended at 3.5, before tick 6
    assert found.step_seconds == pytest.approx(10.5)


def test_one_lane_each_way_and_one_for_both() -> None:
    link = make_link(per_second=100.0, latency_seconds=1.0)
    lanes = Lanes(link)
    assert lanes.send(100, 0.0) == 2.0
    assert lanes.send(200, 0.5) == 5.0  # after the first
    assert lanes.fetch(100, 0.5) == 2.5  # beside them
    assert lanes.fetch(100, 9.0) == 11.0
    shared = Lanes(dataclasses.replace(link, half_duplex=True))
    assert shared.send(100, 0.0) == 2.0
    assert shared.fetch(100, 0.5) == 4.0
    assert shared.send(0, 0.0) == 5.0


def test_directions_have_their_own_speeds() -> None:
    link = Link(
        upper="a", lower="b", out_latency_seconds=1.0, out_bytes_per_second=10.0, back_latency_seconds=2.0,
        back_bytes_per_second=20.0, half_duplex=False, drag_seconds_per_byte=0.0, source=""
    )  # fmt: skip
    assert Lanes(link).send(100, 0.0) == 11.0
    assert Lanes(link).fetch(100, 0.0) == 7.0


def write_piece_by_piece(link: Link, disk: Link, piece_bytes: int, nbytes: int) -> float:
    """As the runtime does: two halves, the disk writes one while the link fills the other."""
    sizes = [min(piece_bytes, nbytes - begin) for begin in range(0, nbytes, piece_bytes)]
    copied = written = 0.0
    for index, size in enumerate(sizes):
        arrived = max(copied, written) + link.out_latency_seconds + size / link.out_bytes_per_second
        if index > 0:  # the piece before is written once it has arrived
            written = max(written, copied) + disk.out_latency_seconds + sizes[index - 1] / disk.out_bytes_per_second
        copied = arrived
    return max(written, copied) + disk.out_latency_seconds + sizes[-1] / disk.out_bytes_per_second


speeds = some.builds(make_link, per_second=some.floats(1.0, 1000.0), latency_seconds=some.floats(0.0, 2.0))


@given(link=speeds, disk=speeds, piece_bytes=some.integers(1, 300), nbytes=some.integers(1, 1000))
def test_what_goes_to_the_disk_takes_as_long_as_piece_by_piece(
    link: Link, disk: Link, piece_bytes: int, nbytes: int
) -> None:
    found = Lanes(link).send_through(disk, piece_bytes, nbytes, 0.0)
    exact = write_piece_by_piece(link, disk, piece_bytes, nbytes)
    copy_seconds, write_seconds = Lanes(link).send(piece_bytes, 0.0), Lanes(disk).send(piece_bytes, 0.0)
    if copy_seconds <= write_seconds:
        assert found == pytest.approx(exact, rel=1e-9)
    assert found <= exact + 1e-9 <= found + write_seconds + 2e-9


def test_through_the_host_to_the_disk_and_back_by_hand() -> None:
    link, disk = make_link(per_second=100.0, latency_seconds=1.0), make_link(per_second=50.0, latency_seconds=2.0)
    lanes = Lanes(link)
    # Three pieces: the first arrives after 1 + 1; the disk takes 2 + 2, 2 + 2 and 2 + 1 for them.
    assert lanes.send_through(disk, 100, 250, 10.0) == 10 + 2 + 11
    assert lanes.send(100, 20.0) == 25.0  # the lane is free again with the last byte
    # Read within 11 seconds; the last piece arrives 1.5 after that.
    assert lanes.fetch_through(disk, 100, 250, 30.0) == (41.0, 42.5)
    assert lanes.fetch(100, 41.0) == 44.5
    # Where the lane is busy, arriving waits, and reading does not.
    late = Lanes(link)
    late.fetch(10000, 0.0)
    assert late.fetch_through(disk, 100, 250, 0.0) == (11.0, 101 + 3 * 1 + 2.5)
    half = Lanes(dataclasses.replace(link, half_duplex=True))
    half.fetch(10000, 0.0)
    assert half.send_through(disk, 100, 250, 0.0) == 101 + 13


def test_a_copy_that_the_host_has_no_room_for_goes_to_the_disk_and_the_program_waits() -> None:
    disk = make_link(per_second=100.0, latency_seconds=0.0)
    costs = dataclasses.replace(COSTS, link=make_link(per_second=1e9, latency_seconds=0.0), further_links=(disk,))
    made = Plan(
        trace_digest=costs.trace_digest, strategy="", budget_bytes=0, segments=(),
        decisions=(offload(BIG, 1, 5, 8), offload(SMALL, 3, 5, 6)),
    )  # fmt: skip
    free = simulate(TRACE, costs, made)
    assert (free.lower_tier_bytes, free.disk_bytes) == (1100, 0)
    assert free == simulate(TRACE, costs, made, host_bytes=10**9)
    # A quarter of the host is what bytes for the disk pass through: 1200 hold 900, which is too little for the first.
    tight = simulate(TRACE, costs, made, host_bytes=1200)
    assert (tight.lower_tier_bytes, tight.disk_bytes) == (100, 1000)
    assert tight.live_bytes == free.live_bytes
    assert tight.step_seconds == pytest.approx(8 + 2 * 10, rel=1e-5)
    assert tight.stall_seconds == pytest.approx(2 * 10, rel=1e-5)
    # First come, first served: with room for the first there is none for the second.
    first = simulate(TRACE, costs, made, host_bytes=1400)
    assert (first.lower_tier_bytes, first.disk_bytes) == (1000, 100)
    assert first.step_seconds == pytest.approx(8 + 2 * 1, rel=1e-5)
    # Without a disk the host is no place where anything changes; whether it is too small is for others to say.
    plain = dataclasses.replace(costs, further_links=())
    assert simulate(TRACE, plain, made, host_bytes=1200).step_seconds == free.step_seconds


def test_room_below_is_given_back_when_a_claim_ends() -> None:
    program = Program()
    spans = []
    for name in ("first", "second"):  # one after the other: the second finds the room of the first
        made = program.op(name, [], 1000)
        save = program.save(made)
        program.release(storage=made)
        program.op("work", [], 1)
        need = program.need(save)
        spans.append((made, save))
        program.release(need=need, save=save)
        program.op("work", [], 1)
    trace = program.finish("in turn")
    costs = make_costs(trace, disk=make_link())
    ticks = [trace.saves[save].tick for _, save in spans]
    decisions = tuple(offload(made, tick, tick, tick + 2) for (made, _), tick in zip(spans, ticks, strict=True))
    made_plan = Plan(trace_digest=costs.trace_digest, strategy="", budget_bytes=0, decisions=decisions, segments=())
    found = simulate(trace, costs, made_plan, host_bytes=1400)
    assert (found.offloaded_bytes, found.lower_tier_bytes, found.disk_bytes) == (2000, 1000, 0)


@pytest.mark.parametrize("broken", [0.0, float("inf"), float("nan"), -1.0])
def test_links_that_move_nothing_are_refused(broken: float) -> None:
    for field in ("out_bytes_per_second", "back_bytes_per_second"):
        link = dataclasses.replace(COSTS.link, **{field: broken})
        with pytest.raises(TraceError, match="from device to below"):
            simulate(TRACE, dataclasses.replace(COSTS, link=link), keep_everything(COSTS))
        with pytest.raises(TraceError, match="from device to below"):
            simulate(TRACE, dataclasses.replace(COSTS, further_links=(link,)), keep_everything(COSTS))


def test_a_half_duplex_link_makes_a_reload_wait_for_an_offload() -> None:
    slow = make_link(per_second=100.0, latency_seconds=0.0)
    decisions = (offload(SMALL, 3, 4, 6), offload(BIG, 5, 8, 9))
    apart = forecast(*decisions, costs=dataclasses.replace(COSTS, link=slow))
    both = forecast(*decisions, costs=dataclasses.replace(COSTS, link=dataclasses.replace(slow, half_duplex=True)))
    assert apart.live_bytes == both.live_bytes
    assert both.step_seconds > apart.step_seconds


def test_moving_drags_on_the_program() -> None:
    link = dataclasses.replace(make_link(per_second=1e12, latency_seconds=0.0), drag_seconds_per_byte=0.001)
    found = forecast(offload(BIG, 1, 3, 6), costs=dataclasses.replace(COSTS, link=link))
    assert found.step_seconds == pytest.approx(8 + 2 * 1000 * 0.001)


def test_a_replay_costs_its_ops_and_its_intermediates() -> None:
    # `small` is made of `big`, which is there again only as an intermediate of the replay at tick 6.
    both = Segment(ops=(0, 2), outputs=(SMALL,), leaves=())
    found = forecast(drop(SMALL, 3), segments=(both,))
    assert found.recompute_seconds == 2
    assert found.step_seconds == 10
    assert found.live_bytes[3:6] == (1100, 1010, 1010)
    assert found.live_bytes[6] == 1000 + 100 + 1000  # claimed, made again, and the intermediate
    both_outputs = Segment(ops=(0, 2), outputs=(BIG, SMALL), leaves=())
    found = forecast(drop(SMALL, 3), drop(BIG, 3), segments=(both_outputs,))
    assert found.live_bytes == (1000, 1000, 1100, 1100, 10, 10, 1100, 1101, 1001, 1000, 1001, 1)
    assert found.step_seconds == 10


def test_a_replay_takes_workspace_and_frees_each_intermediate_after_its_last_use() -> None:
    costs = dataclasses.replace(COSTS, workspace_bytes=(0, 5000, 0, 0, 0, 0, 0, 0))
    found = forecast(drop(SMALL, 3), segments=(Segment(ops=(0, 2), outputs=(SMALL,), leaves=()),), costs=costs)
    assert found.live_bytes[6] == 1000 + (1000 + 100 + 5000)
    program = Program()
    ends = [program.op("link0", [], 100)]
    for index in range(1, 5):
        ends.append(program.op(f"link{index}", [ends[-1]], 100))
        program.release(storage=ends[-2])
    save = program.save(ends[-1])
    program.release(storage=ends[-1])
    program.op("work", [], 1)
    program.need(save)
    trace = program.finish("a row")
    row = make_costs(trace)
    dropping = Plan(
        trace_digest=row.trace_digest, strategy="", budget_bytes=0, decisions=(drop(ends[-1], save + 5),),
        segments=(Segment(ops=tuple(range(5)), outputs=(ends[-1],), leaves=()),)
    )  # fmt: skip
    assert simulate(trace, row, dropping).live_bytes[7] == 1 + 100 + 100  # one result and one intermediate at a time


def test_what_comes_back_while_the_program_holds_it_counts_twice() -> None:
    program = Program()
    made = program.op("make", [], 1000)
    save = program.save(made)
    program.op("work", [], 10)
    program.need(save)
    program.op("work", [], 10)
    trace = program.finish("held throughout")
    costs = make_costs(trace)
    moved = Plan(
        trace_digest=costs.trace_digest, strategy="", budget_bytes=0, decisions=(offload(made, 1, 1, 3),), segments=()
    )
    assert simulate(trace, costs, keep_everything(costs)).live_bytes == (1000, 1000, 1010, 1010, 1020)
    assert simulate(trace, costs, moved).live_bytes == (1000, 1000, 1010, 2010, 2020)


def test_costs_and_plans_of_other_traces_are_refused() -> None:
    other = make_chain([1024, 1024])
    with pytest.raises(TraceError, match="plan"):
        simulate(TRACE, COSTS, keep_everything(make_costs(other)))
    with pytest.raises(TraceError, match="costs"):
        simulate(other, COSTS, keep_everything(COSTS))


@given(jobs())
def test_a_step_that_keeps_all_holds_what_an_oracle_counts(job: tuple[Trace, Costs]) -> None:
    trace, costs = job
    found = simulate(trace, costs, keep_everything(costs))
    assert list(found.live_bytes) == count_live_bytes(trace, costs)
    assert found.peak_bytes == max(found.live_bytes)
    assert found.live_bytes[found.peak_tick] == found.peak_bytes
    hooks = (len(trace.saves) + len(trace.needs)) * costs.hook_seconds
    assert found.step_seconds == pytest.approx(sum(costs.op_seconds) + hooks)


@given(job=jobs(), strategy=some.sampled_from(["offload_all", "recompute_all"]))
def test_the_seconds_of_a_step_are_accounted_for(job: tuple[Trace, Costs], strategy: str) -> None:
    trace, costs = job
    made = plan(trace, costs, 10**9, strategy=strategy, min_offload_bytes=1)
    found = simulate(trace, costs, made)
    hooks = (len(trace.saves) + len(trace.needs)) * costs.hook_seconds
    drag = (found.offloaded_bytes + found.reloaded_bytes) * costs.link.drag_seconds_per_byte
    parts = found.compute_seconds + found.recompute_seconds + found.stall_seconds + hooks + drag
    assert found.step_seconds == pytest.approx(parts + costs.overhead_seconds)
    assert found == simulate(trace, costs, made)


@given(jobs())
def test_how_fast_anything_is_changes_no_byte(job: tuple[Trace, Costs]) -> None:
    trace, costs = job
    made = plan(trace, costs, 10**9, strategy="offload_all", min_offload_bytes=1)
    slower = dataclasses.replace(costs, link=make_link(per_second=1.0))
    assert simulate(trace, slower, made).live_bytes == simulate(trace, costs, made).live_bytes


def test_a_storage_may_be_claimed_more_than_once() -> None:
    """Autograd lets go of it before it saves it anew: what is between the two is no gap."""
    saves = tuple(Save(tick=tick, storage=0, released=released) for tick, released in ((0, 2), (1, 4), (4, 8)))
    needs = tuple(Need(tick=tick, save=save, released=tick + 1) for tick, save in ((2, 1), (3, 1), (6, 2)))
    home = Storage(id=0, nbytes=64, role=Role.ACTIVATION, created=-1, released=1, label="")
    trace = Trace(name="", device="cpu", ops=(), storages=(home,), saves=saves, needs=needs, end=8)
    assert trace.claims == {0: ((0, 4), (4, 8))}
    assert [(gap.opens, gap.closes) for gap in trace.gaps[0]] == [(0, 2), (2, 3), (4, 6)]
    freed = [event.tick for event in list_events(trace) if isinstance(event, StorageFreed)]
    assert freed == [4, 8]

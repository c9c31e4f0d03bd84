"""Parts of a room that are made once: its profile, its pager, and the plan of a step given to `fit`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from elbowroom.agreed_plans import AgreedPlans
from elbowroom.captured_steps import CapturedSteps
from elbowroom.errors import Infeasible, TraceError
from elbowroom.hardware.profile_store import load_or_probe
from elbowroom.hooks.grouped_step import find_groupable
from elbowroom.hooks.ledger import Ledger
from elbowroom.hooks.unsharded_weights import note_gathered_weights
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.job import Job
from elbowroom.native import library
from elbowroom.plan_cache import PlanCache
from elbowroom.ranks.ranks import Ranks, find_members, join_ranks
from elbowroom.runtime.state_pager import StatePager
from elbowroom.runtime.step_storages import load_native
from elbowroom.runtime.transfers import Transfers
from elbowroom.runtime.update_groups import grouping
from elbowroom.tracing.fake import capture_fake

logger = logging.getLogger("elbowroom.room")


def join_job(job: Job, ledger: Ledger, budget_bytes: int, *, is_alone: bool) -> Ranks | None:
    """Meet the other ranks that train the model; None if one process trains it alone, or is to plan alone.

    Raises:
        UsageError, RanksDiffer, RankLost: as for `join_ranks`.
    """
    note_gathered_weights(job.model)
    members = () if is_alone else find_members(job.model)
    if not members:
        return None
    return join_ranks(job.model, job.config, budget_bytes, members, ledger)


def probe_within(job: Job, ledger: Ledger, budget_bytes: int) -> HardwareProfile:
    """Return the profile of this machine, measured using only memory that the budget leaves beside the model."""
    most_bytes = max(0, budget_bytes - library.load().count_storage_bytes(job.list_residents()))
    config = job.config
    profile = load_or_probe(
        str(job.device), spill_folder=config.spill_folder, most_bytes=most_bytes, is_enabled=config.profile_store
    )
    ledger.trim()
    return profile


def change_budget(
    cache: PlanCache, agreed: AgreedPlans | None, job: Job, held_bytes: int, away_bytes: int, budget_bytes: int
) -> None:
    """Plan for another budget.

    Args:
        held_bytes: what the job holds between steps.
        away_bytes: model state that is not on the device.

    Raises:
        Infeasible: the job holds more, or no plan fits.
    """
    refusal = None
    if held_bytes > budget_bytes:
        refusal = Infeasible(
            needed_bytes=held_bytes, budget_bytes=budget_bytes, op="the next step", is_whole_step=False,
            in_the_way=(("held between steps", held_bytes),),
        )  # fmt: skip
    if agreed is not None:
        agreed.set_budget(budget_bytes, refusal)
    elif refusal is not None:
        raise refusal
    else:
        can_group = len(find_groupable(job.optimizers)) == len(job.optimizers)
        cache.set_budget(budget_bytes, held_bytes + away_bytes, regroups=job.moves_state and can_group)


def make_pager(job: Job, transfers: Transfers, ledger: Ledger) -> StatePager:
    """Return the pager of a job's state."""
    load_native()  # the extension asks what it does not know of an op, also between steps
    list_state, optimizers = (job.list_movable, job.optimizers) if job.moves_state else (list, ())
    return StatePager(
        job.device,
        list_state,
        optimizers,
        transfers,
        ledger,
        job.config.min_offload_bytes,
        moves_results=job.moves_state,
    )


def plan_ahead(
    job: Job, pager: StatePager, captured: CapturedSteps, budget_bytes: int, step: Callable[[], Any]
) -> None:
    """Plan a step that has not run. If it cannot be captured, warn.

    Raises:
        Infeasible: it cannot run within the budget.
    """
    if find_members(job.model):
        logger.warning("ranks of a distributed job capture their first real steps: step= is not used")
        return
    try:
        is_grouped = job.moves_state and pager.is_needed(budget_bytes)
        with grouping(job.optimizers, budget_bytes) if is_grouped else contextlib.nullcontext():
            trace = capture_fake(step, job.model, job.optimizers, name=job.name, device=job.device)
    except TraceError as error:
        logger.warning("%s", error)
        return
    if not trace.needs:  # and so nothing to recognize the step by
        logger.warning(
            "step= never calls backward, so there is nothing to plan ahead: the first real steps are captured"
        )
        return
    if why := captured.plan(trace, None):
        logger.warning("%s", why)

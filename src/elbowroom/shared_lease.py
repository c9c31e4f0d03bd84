"""Shared lease: keeps a room within the lease that the broker of a shared device grants it."""

from __future__ import annotations

import enum
import functools
import logging
import uuid
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from elbowroom.config import Config, read_config
from elbowroom.errors import Infeasible, UsageError
from elbowroom.hardware.cards import find_card
from elbowroom.hooks.ledger import Ledger
from elbowroom.ir.journal import Mode
from elbowroom.job_front import MARGIN, JobFront
from elbowroom.lent_bytes import LentBytes
from elbowroom.runtime.state_pager import StatePager
from elbowroom.sharing.messages import LeaseGrant
from elbowroom.sharing.transport.address import find_address
from elbowroom.sharing.transport.client import BrokerClient
from elbowroom.tracing.residents import list_resident_tensors
from elbowroom.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from elbowroom.planned_step import PlannedStep

logger = logging.getLogger(__name__)

LEAST_FLOOR_BYTES = 32 << 20

LONGEST_PAUSE_SECONDS = 5.0
"""Time within which the broker answers a job that rests."""

LITTLE_BYTES = 1 << 20
"""A job that has ended leaves the broker once it holds no more."""

_ENDED: dict[BrokerClient, tuple[str, list[tuple[StorageWeakRef, int]]]] = {}
"""Jobs that have ended: their ids, and storages that are still there, with their bytes."""

Holder = TypeVar("Holder", bound="LeaseHolder")


class LeaseHolder(Protocol):
    """A room, as its lease sees it."""

    @property
    def budget_bytes(self) -> int:
        """Budget in force."""

    @property
    def planned(self) -> PlannedStep | None:
        """The step that is expected next."""

    def set_budget(self, memory_budget: int | float | str) -> None:
        """Change the budget from the next step on."""

    def move_state_out(self) -> int:
        """Move all state that can leave out of memory, and return the bytes that stay."""

    def metrics(self) -> dict[str, int | float | str]:
        """Return the figures of the last step."""


class LeaseUse(enum.Enum):
    """Use of a lease."""

    FREE = enum.auto()
    """No room has it yet."""
    BY_ROOM = enum.auto()
    ENDED = enum.auto()
    """It was given back."""


class SharedLease:
    """Joins the broker of a device, and takes up its leases between steps.

    Args:
        device: "cpu", "cuda:N" or the UUID of a card.
        name: of the job, shown to others.
        held_bytes: on the device before the first lease: the model and its state.
        config: options of the room.
        floor_bytes: the least bytes for the first steps; 0 to guess from `held_bytes`.
        job: id of a job of this process that has ended, and whose bytes this one holds; None for a new one.

    Raises:
        UsageError: there is no broker, or others can open its socket.
    """

    def __init__(
        self, device: str, name: str, held_bytes: int, config: Config, floor_bytes: int = 0,
        job: str | None = None,
    ) -> None:  # fmt: skip
        self._config = config
        self._needs_broker = config.without_broker == "stop"
        self._is_refused = self._rests = self._is_changing = False
        self._use = LeaseUse.FREE
        self._job = job or uuid.uuid4().hex
        self._fronts = JobFront(config)
        self._floor_bytes = floor_bytes or config.least_bytes or held_bytes + max(held_bytes, LEAST_FLOOR_BYTES)
        self._is_guess = not (floor_bytes or config.least_bytes)
        address = find_address(device, card=find_card(device))
        self._client = BrokerClient(
            address, name=name, floor_bytes=self._floor_bytes, held_bytes=held_bytes, weight=config.weight,
            priority=config.priority, job=self._job,
        )  # fmt: skip
        self._client.on_beat = functools.partial(_leave_without, weakref.ref(self), self._client)
        self._lent = LentBytes(self._client, self._floor_bytes)

    def check_change(self) -> None:
        """Check that a change of the room's budget is one of the lease.

        Raises:
            UsageError: it is the program's.
        """
        if not self._is_changing:
            raise UsageError(
                "the budget of this room is its lease of a shared device, which the broker changes: for another one, "
                "detach the room, and pass a number as memory_budget"
            )

    def check_free(self, config: Config) -> None:
        """Check that a room can have this lease.

        Raises:
            UsageError: it has ended, another room has it, or the options differ from what the broker was told.
        """
        if self._use is LeaseUse.ENDED:
            raise UsageError("this lease has ended: call elbowroom.wait_for_lease again")
        if self._use is LeaseUse.BY_ROOM:
            raise UsageError("this lease has a room already: detach that, and call elbowroom.wait_for_lease again")
        default, named = Config(), ("weight", "priority", "without_broker", "least_bytes")
        given = [
            each for each in named if getattr(config, each) not in (getattr(default, each), getattr(self._config, each))
        ]
        if given:
            raise UsageError(
                f"this lease was agreed on before: pass {' and '.join(given)} to elbowroom.wait_for_lease, not to fit"
            )

    def attach(self, config: Config, ledger: Ledger, pager: StatePager) -> SharedLease:
        """Use the options of a room, what it counts, and its state. Return this lease."""
        self._config = config
        self._fronts = JobFront(config)
        self._lent.attach(ledger, pager)
        return self

    def start(self, floor_bytes: int = 0) -> int:
        """Return the bytes of the lease in force; wait for one if there is none, or if it is too small.

        Args:
            floor_bytes: tell the broker that the job needs as much; 0 to leave it at what it said.

        Raises:
            UsageError: the broker refuses the job.
            BrokerLost: as for `renew`.
        """
        if floor_bytes:
            self._is_guess = False
            self._client.report(floor_bytes, ())
        while True:
            latest, applied = self._client.grant, self._lent.applied
            if applied is not None and latest in (None, applied) and applied.nbytes >= floor_bytes:
                return applied.nbytes
            grant = self._wait(applied)
            if self._client.take(grant):
                self._lent.applied = grant
                self._client.confirm(grant, grant.nbytes)

    def renew(self, room: LeaseHolder) -> None:
        """Take up the latest lease, between two steps. Waits while the job has none.

        Raises:
            BrokerLost: there is no broker, and the job was told to stop then.
            UsageError: the broker refuses the job.
        """
        client = self._client
        if client.refusal and not self._is_refused:
            self._is_refused = True
            logger.warning("the broker refuses this job: %s. It goes on within its last lease", client.refusal)
        if self._needs_broker:
            client.check_broker()
        if self._rests:
            self._rests = False
            client.rest(False)
            self._wait(self._lent.applied)
        has_lent = self._lent.end_idle(room.budget_bytes)
        while (grant := client.grant) is not None and grant is not self._lent.applied:
            if client.take(grant):
                self._take_up(room, grant, has_lent=has_lent)
        if has_lent and (applied := self._lent.applied) is not None and applied.nbytes != room.budget_bytes:
            self._take_up(room, applied, has_lent=True)

    def rest(self, room: LeaseHolder) -> None:
        """Give the bytes back until the next step of `room`, which waits for a lease again.

        All of the model's state moves out that can; using it meanwhile brings it back uncounted. For a notebook, or a
        job that waits for data. If the broker is gone or does not answer, the job keeps its lease.
        """
        if (grant := self._pause()) is not None:
            self._rests = True
            self._client.confirm(grant, room.move_state_out())

    def note_step(self, room: LeaseHolder) -> None:
        """Report a step that has ended, and the front of the next one if that has changed."""
        figures = room.metrics()
        self._client.note_step(float(figures.get("step_seconds", 0.0)), int(figures.get("peak_bytes", 0)))
        planned = room.planned
        if planned is None and figures.get("mode") == Mode.DYNAMIC:
            self._fronts.note_unplanned(room.budget_bytes)
        if planned is not None and self._fronts.expect(planned, room.budget_bytes):
            self._lent.front = self._fronts.combine()
            self._client.report(*self._lent.front)

    def take_room(self, room: LeaseHolder) -> None:
        """Note which room has this lease. No step of it runs yet."""
        self._use = LeaseUse.BY_ROOM
        self.begin_idle(room)

    def begin_idle(self, room: LeaseHolder) -> None:
        """Note that no step runs: what the job takes then counts, and what it does not use is lent after a while."""
        self._lent.begin_idle(float(room.metrics().get("step_seconds", 0.0)))

    def close(self, residents: Sequence[torch.Tensor] = ()) -> None:
        """Give back the lease. `residents` on a CPU count as taken until they are gone, or their process is."""
        self._use = LeaseUse.ENDED
        held = {
            each._cdata: (StorageWeakRef(each), each.nbytes())
            for tensor in residents
            if tensor.device.type == "cpu" and tensor.layout is torch.strided
            for each in [tensor.untyped_storage()]
        }
        client = self._client
        held_bytes = sum(nbytes for _, nbytes in held.values())
        stays = held_bytes > LITTLE_BYTES and client.is_connected and not client.refusal
        grant = self._pause() if stays else None
        if grant is None:
            client.close()
            return
        client.confirm(grant, held_bytes)
        client.note_use(held_bytes)
        _ENDED[client] = self._job, [*held.values()]
        client.on_beat = functools.partial(_leave_when_gone, client)

    def _pause(self) -> LeaseGrant | None:
        """Have the broker pause this job. Return the lease of 0 bytes, to be confirmed; None if it does not answer."""
        self._lent.end_idle()
        self._client.rest(True)
        grant = self._client.wait_for(lambda each: not each.nbytes, LONGEST_PAUSE_SECONDS)
        if grant is None or not self._client.take(grant):
            self._client.rest(False)
            return None
        self._lent.applied = grant
        return grant

    def _wait(self, before: LeaseGrant | None) -> LeaseGrant:
        try:
            return self._client.wait(before, logger.warning, needs_broker=self._needs_broker)
        except UsageError as error:
            if not self._is_guess:
                raise
            raise UsageError(
                f"{error}. What it needs is a guess from the size of the model: pass least_bytes=, or step="
            ) from None

    def _take_up(self, room: LeaseHolder, grant: LeaseGrant, *, has_lent: bool) -> None:
        """Take up a lease. `has_lent`: whether the one in force may be less than the budget of the room."""
        before, self._lent.applied = self._lent.applied, grant
        if not grant.nbytes:
            self._client.confirm(grant, room.move_state_out())
            self._wait(grant)
            return
        self._is_changing = True
        try:
            if grant.nbytes != room.budget_bytes:
                room.set_budget(grant.nbytes)
        except Infeasible as error:
            if not has_lent and before is not None and before.nbytes:
                kept_bytes = max(grant.nbytes, room.budget_bytes)
                self._lent.front = max(self._lent.front[0], kept_bytes), self._lent.front[1]
                self._fronts.raise_floor(kept_bytes)
                self._client.confirm(grant, kept_bytes)  # the lease before it stays
                return
            self._client.confirm(grant, grant.nbytes)
            floor_bytes = max(grant.nbytes + 1, error.needed_bytes)
            points = tuple(each for each in self._lent.front[1] if each[0] >= floor_bytes)
            self._lent.front = floor_bytes, points
            self._client.report(floor_bytes, points)
            self._fronts.raise_floor(floor_bytes)
            if not points:
                self._fronts.forget()  # the next step reports its front
            self._wait(grant)
            return
        finally:
            self._is_changing = False
        self._client.confirm(grant, grant.nbytes)
        logger.info("the lease is %s now", format_bytes(grant.nbytes))


def _leave_without(lease: weakref.ref[SharedLease], client: BrokerClient) -> None:
    """Leave the broker if nobody has the lease any more, and nobody has closed it."""
    if lease() is None:
        client.close()


def _leave_when_gone(client: BrokerClient) -> None:
    """Leave the broker if little of a job is left that has ended."""
    if _count_left(client) <= LITTLE_BYTES and _ENDED.pop(client, None) is not None:
        client.close()


def _count_left(client: BrokerClient, others: Collection[int] = ()) -> int:
    """Return the bytes that are left of a job that has ended, without the storages `others`."""
    _, storages = _ENDED.get(client, ("", []))
    left = [nbytes for weak, nbytes in storages if not weak.expired() and weak.cdata not in others]
    return sum(left)


def wait_for_lease(least: int | str, *, device: str = "cpu", name: str = "job", **options: Any) -> SharedLease:
    """Join the broker of a shared device, and wait for a lease before the model takes any memory.

        lease = elbowroom.wait_for_lease("2GiB", device="cuda:0", name="resnet")
        model = ...
        room = elbowroom.fit(model, optimizer, memory_budget=lease)

    Args:
        least: the least bytes for the model and its first steps, such as "2GiB".
        device: "cpu", "cuda", "cuda:N" or the UUID of a card (`nvidia-smi -L`).
        name: shown to others.
        **options: weight, priority and without_broker, as for `fit`.

    Raises:
        UsageError: there is no broker, or it refuses the job; the amount is malformed.
    """
    try:
        least_bytes = parse_bytes(least)
    except ValueError as error:
        raise UsageError(f"least: {error}") from error
    lease = SharedLease(device, name, 0, read_config(**options), least_bytes)
    try:
        lease.start()
    except BaseException:
        lease.close()
        raise
    return lease


def run_within_lease(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: Config,
    device: torch.device,
    make: Callable[[int, SharedLease], Holder],
    lease: SharedLease | None = None,
) -> Holder:
    """Return what `make` builds within a lease that is large enough.

    Args:
        lease: obtained before the model was built; None to join the broker of the device now.

    Raises:
        Infeasible: no lease is large enough.
        UsageError: there is no broker, or it refuses the job.
    """
    storages = (each.untyped_storage() for each in list_resident_tensors(model, optimizers))
    held = {each._cdata: each.nbytes() for each in storages}
    if lease is not None:
        lease.check_free(config)
    job = None
    for client in list(_ENDED):
        if _count_left(client, held) > LITTLE_BYTES or (former := _ENDED.pop(client, None)) is None:
            continue  # more is left of it, or its own thread has just left the broker
        client.close(leaves=lease is not None or job is not None)
        job = job or former[0]  # its bytes count as taken until this job joins by its id
    if lease is None:
        held_bytes = sum(held.values())
        lease = SharedLease(str(device), type(model).__name__, held_bytes, config, job=job)
    try:
        nbytes = lease.start()
        while True:
            try:
                room = make(nbytes, lease)
                lease.take_room(room)
                return room
            except Infeasible as error:
                if error.needed_bytes <= nbytes:
                    raise
                needed_bytes = error.needed_bytes + error.needed_bytes // MARGIN
                logger.warning("the step needs %s, more than its first lease", format_bytes(needed_bytes))
            nbytes = lease.start(needed_bytes)
    except BaseException:
        lease.close()
        raise

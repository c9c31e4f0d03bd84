"""Protocol of what counts the bytes that a room's steps hold on their device, in all threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

NO_LIMIT = 1 << 60
"""Bytes: more than any machine has."""

MakeRoom = Callable[[int, int], bool]
"""Called with the requested and the missing bytes. Returns True after freeing memory, returns False to let the request
pass, or raises."""


class Ledger(Protocol):
    """Counts the bytes of one room.

    Attributes:
        refusals: messages of the errors that the program got in the running or last step, as there was no memory.
    """

    refusals: list[str]

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were there before, without making room. Each storage is counted once."""
        ...

    def adopt_input(self, storage: torch.UntypedStorage) -> object:
        """Count a storage that was there before until the step ends: a program may hold all its batches at once.

        Room is made for it first, as for a request.
        """
        ...

    def adopt_inputs(self, tensors: list[torch.Tensor]) -> bool:
        """Adopt the storages of plain tensors as inputs. Return whether one was not counted yet."""
        ...

    @property
    def scope(self) -> Any:
        """The extension's scope on a CPU, else None."""
        ...

    @property
    def live_bytes(self) -> int:
        """Bytes that the room holds now."""
        ...

    def take_recent_peak(self) -> int:
        """Return the peak of bytes held since the last call."""
        ...

    def set_limit(self, nbytes: int, *, follows_plan: bool = False) -> None:
        """Change the limit while `counting`.

        Args:
            follows_plan: whether the step's bytes are known, so that the limit is not expected to be reached.
        """
        ...

    def raise_limit(self) -> bool:
        """Leave out of the limit what the allocator cannot use of what it holds. Return whether the limit was raised.

        Called after a request was refused.
        """
        ...

    def lift_limit(self) -> None:
        """Refuse no request until `restore_limit`, unless the device is full."""
        ...

    def restore_limit(self) -> None:
        """Limit requests again."""
        ...

    def make_room(self, nbytes: int = 1) -> bool:
        """Have room made after a request of so many bytes was refused. Return whether to try again.

        Raises what the function does that `counting` was given.
        """
        ...

    def require(self, nbytes: int, limit_bytes: int) -> None:
        """Have room made for a request that comes later. Raises what `make_room` raises."""
        ...

    def counting(self, limit_bytes: int, make_room: MakeRoom) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this thread's allocations count for the room, within a limit.

        Args:
            limit_bytes: limit on all bytes that the room holds.
            make_room: called before a request that would exceed the limit.
        """
        ...

    def limit_between_steps(self, limit_bytes: int | None, make_room: MakeRoom | None = None) -> None:
        """Limit the bytes that the room holds until its next step begins; None for no limit. On a CPU only.

        Args:
            make_room: as for `counting`.
        """
        ...

    def has_room(self, nbytes: int, limit_bytes: int) -> bool:
        """Tell whether `nbytes` fit beside the live bytes; True if nothing is counted."""
        ...

    def note_move(self, nbytes: int) -> None:
        """Note bytes that are about to come back, or (negative) have left, during an op that they are not part of."""
        ...

    def trim(self) -> None:
        """Return free pages to the system, except those that running steps may need."""
        ...

    def close(self) -> None:
        """Stop counting."""
        ...

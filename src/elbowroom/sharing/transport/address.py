"""Address of a device's broker: a socket, a lock and a list of leases in a folder that only this user can open."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import pathlib
import re
import shlex
import stat

from elbowroom._folders import find_temporary
from elbowroom.errors import UsageError

FOLDER_VARIABLE = "ELBOWROOM_SHARE_FOLDER"
"""Environment variable that names another folder."""

CARD = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""UUID of a card as `nvidia-smi -L` lists it."""

LONGEST_PATH = 100
"""Limit of Linux on the path of a Unix socket, with some room."""


@dataclasses.dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Paths of the broker of one device.

    Attributes:
        device: what this process calls it.
        card: its UUID, by which the paths are named, since processes may number cards differently; "" on a CPU and
            where it is not known.
    """

    device: str
    folder: pathlib.Path
    card: str = ""

    @property
    def socket(self) -> pathlib.Path:
        """The socket on which the broker listens."""
        return self.folder / f"{self._stem}.sock"

    @property
    def lock(self) -> pathlib.Path:
        """A file that the broker locks while it lives; holds its process id."""
        return self.folder / f"{self._stem}.lock"

    @property
    def leases(self) -> pathlib.Path:
        """The leases at present, for a broker that is started after this one was killed."""
        return self.folder / f"{self._stem}.leases.json"

    def departure(self, job: str) -> pathlib.Path:
        """A file that says that a job has left while there was no broker; the next one deletes it."""
        return self.folder / f"{self._stem}.left-{job}"

    def list_departures(self) -> list[pathlib.Path]:
        """Return the files of jobs that have left."""
        return sorted(self.folder.glob(f"{self._stem}.left-*"))

    @property
    def _stem(self) -> str:
        return re.sub(r"[^A-Za-z0-9]", "-", self.card or self.device)

    def prepare(self) -> None:
        """Create the folder, if it does not exist.

        Raises:
            UsageError: it cannot be created, or others can open it.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self.folder} cannot be created: {error.strerror or error}") from error
        _check_own(self.folder, "a folder", stat.S_ISDIR)
        if len(os.fsencode(self.socket)) > LONGEST_PATH:
            raise UsageError(f"{self.socket} is too long for a socket: set {FOLDER_VARIABLE} to a shorter path")

    def check(self) -> None:
        """Check that the socket exists, and that it and its folder belong to this user alone.

        Raises:
            UsageError: they do not.
        """
        if not self.socket.exists():
            raise self.explain(ConnectionRefusedError())
        _check_own(self.folder, "a folder", stat.S_ISDIR)
        _check_own(self.socket, "a socket", stat.S_ISSOCK)

    def explain(self, error: Exception) -> UsageError:
        """Return the error for a broker that cannot be reached. A broker that was killed leaves its socket."""
        if isinstance(error, ConnectionRefusedError):
            name = f"{self.device} ({self.card})" if self.card not in ("", self.device) else self.device
            return UsageError(
                f"no broker serves {name}: start one with "
                f"`elbowroom share --device {self.card or self.device} --memory ...`"
            )
        return UsageError(f"the broker of {self.device} does not answer: {error}")

    def take_lock(self) -> int:
        """Lock the device for this process. Return the file descriptor, which keeps the lock while it is open.

        Raises:
            UsageError: another broker has the lock.
        """
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise UsageError(f"process {pid} already is the broker of {self.device} (`elbowroom jobs`)") from error
        if not self.is_locked_by(descriptor):  # deleted between the two calls
            os.close(descriptor)
            return self.take_lock()
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        return descriptor

    def is_locked_by(self, descriptor: int) -> bool:
        """Tell whether the lock file is still the one that is open as `descriptor`."""
        try:
            return os.path.samestat(os.fstat(descriptor), self.lock.stat())
        except FileNotFoundError:
            return False


def find_address(device: str, folder: str | None = None, *, card: str = "") -> BrokerAddress:
    """Return the address of a device's broker. "cuda" is the first card.

    Args:
        device: "cpu", "cuda", "cuda:N" or the UUID of a card.
        folder: by default $ELBOWROOM_SHARE_FOLDER, then a folder in $XDG_RUNTIME_DIR or the temporary folder.
        card: the UUID of the device, if it is known.
    """
    name = "cuda:0" if device == "cuda" else device
    if CARD.fullmatch(name):
        card = name
    elif not re.fullmatch(r"cpu|cuda:[0-9]+", name):
        raise UsageError(f"{device!r} is no device: write cpu, cuda, cuda:N, or the UUID of a card (nvidia-smi -L)")
    chosen = folder or os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return BrokerAddress(name, pathlib.Path(chosen), card)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return BrokerAddress(name, pathlib.Path(runtime) / "elbowroom", card)
    return BrokerAddress(name, pathlib.Path(find_temporary()) / f"elbowroom-share-{os.geteuid()}", card)


def list_addresses() -> list[BrokerAddress]:
    """Return the addresses at which there is a socket. Cards are called by their UUIDs."""
    folder = find_address("cpu").folder
    names = sorted(path.stem for path in folder.glob("*.sock")) if folder.is_dir() else []
    return [find_address(name if CARD.fullmatch(name) else re.sub(r"-(?=[0-9]+$)", ":", name)) for name in names]


def _check_own(path: pathlib.Path, kind: str, is_kind: object) -> None:
    try:
        found = path.lstat()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    if not callable(is_kind) or not is_kind(found.st_mode):
        raise UsageError(f"{path} is not {kind}")
    if found.st_uid != os.geteuid():
        raise UsageError(f"{path} belongs to user {found.st_uid}, not to user {os.geteuid()}: a broker serves one user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise UsageError(
            f"others can open {path} (mode {stat.S_IMODE(found.st_mode):o}): take that permission away "
            f"(chmod go= {shlex.quote(os.fspath(path))}), or set {FOLDER_VARIABLE} to another folder"
        )

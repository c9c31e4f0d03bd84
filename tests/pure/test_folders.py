"""Where caches and temporary files are: also for who has no home, and only where nobody else can write. No torch."""

from __future__ import annotations

import os
import pathlib
import pwd
import stat
import subprocess
import sys
import tempfile

import pytest

from elbowroom import _folders
from elbowroom.errors import UsageError


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """Neither HOME nor an entry in the system's list of users. Returns the folder for temporary files."""

    def find_user(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", find_user)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_cache_is_where_it_is_said_to_be(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert _folders.find_cache() == tmp_path / "home" / ".cache" / "elbowroom"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "named"))
    assert _folders.find_cache() == tmp_path / "named" / "elbowroom"


def test_without_a_home_there_is_a_private_folder(homeless: pathlib.Path) -> None:
    folder = _folders.find_cache()
    assert folder == homeless / f"elbowroom-{os.geteuid()}" == _folders.find_cache()
    _folders.make_cache(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)  # somebody else was there before
    with pytest.raises(UsageError, match="others can write"):
        _folders.make_cache(folder)


def test_a_home_that_is_no_folder_is_none(
    homeless: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert _folders.find_cache().parent == homeless


def test_without_a_folder_for_temporary_files_either_a_cache_cannot_be_made(
    homeless: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    assert _folders.find_cache().name == f"elbowroom-{os.geteuid()}"
    with pytest.raises(UsageError, match="TMPDIR"), _folders.hold_temporary("elbowroom-"):
        pass


def test_temporary_folders_go(homeless: pathlib.Path) -> None:
    with _folders.hold_temporary("elbowroom-") as folder:
        (folder / "file").touch()
        assert folder.parent == homeless
    assert os.listdir(homeless) == []
    os.rmdir(homeless)
    with pytest.raises(UsageError, match=f"cannot write to {homeless}"), _folders.hold_temporary("elbowroom-"):
        pass


MACHINE_CODE = """
import os, pwd
os.environ.pop("HOME", None)
os.environ.pop("XDG_CACHE_HOME", None)
def find_user(number):
    raise KeyError(number)
pwd.getpwuid = find_user
os.access = lambda path, mode: os.environ["TMPDIR"] in str(path)  # the source lies where nobody can write
from elbowroom import _numba_loops
print(_numba_loops._find_cache())
"""


def test_machine_code_is_kept_without_a_home(tmp_path: pathlib.Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", MACHINE_CODE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    folder = tmp_path / f"elbowroom-{os.geteuid()}"
    assert pathlib.Path(done.stdout.strip()).parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "others can write" in done.stderr


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: pathlib.Path, error: BaseException) -> None:
    path = tmp_path / "page.html"
    with _folders.replacing(path) as part:
        part.write_text("whole")

    def write_half() -> None:
        with _folders.replacing(path) as part:
            part.write_text("ha")
            raise error

    if isinstance(error, OSError):
        with pytest.raises(UsageError, match=r"cannot write .*page\.html: No space left"):
            write_half()
    else:
        with pytest.raises(KeyboardInterrupt):
            write_half()
    assert path.read_text() == "whole" and list(tmp_path.iterdir()) == [path]

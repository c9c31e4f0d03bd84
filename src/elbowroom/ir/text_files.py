"""Reads text files piece by piece, within a limit on their length, so that a file cannot exhaust memory.

A reader holds a few pieces of text and the values parsed so far, never the whole text: at most ten times the length of
the text, plus a few MiB.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import os
import pathlib
import stat
import typing
import zlib
from collections.abc import Generator, Iterator
from typing import IO

from elbowroom.errors import TraceError, UsageError
from elbowroom.units import format_bytes

LARGEST_FILE_BYTES = 1 << 28
"""Limit on the uncompressed text of one file. A trace takes about 300 bytes an op, 29 MB for 100,000, so this is
some 900,000 ops. Reading that much takes up to 2.5 GiB of memory."""

LONGEST_LINE_CHARS = 1 << 18
"""Limit on a line of a log or table, and on a string or number in JSON, which are read in one piece."""

PIECE_BYTES = 1 << 16

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_text(path: pathlib.Path, most_bytes: int | None = None) -> Generator[str, None, None]:
    """Yield the text of a file in pieces, decompressed if the name ends in .gz.

    Args:
        most_bytes: limit on the length of the text; None for LARGEST_FILE_BYTES.

    Raises:
        UsageError: there is no such file, it cannot be read, or it is not a regular file: a pipe or device may never
            end, and cannot be read twice.
        TraceError: it is not UTF-8, not a gzip file, truncated, or larger than `most_bytes`.
    """
    limit = LARGEST_FILE_BYTES if most_bytes is None else most_bytes
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    total = 0
    try:
        with _open_regular(path) as raw, _unpack(path, raw) as file:
            size = os.fstat(raw.fileno()).st_size
            if size > limit:
                raise _too_large(path, f"has {size} bytes ({format_bytes(size)})", limit)
            while piece := file.read(PIECE_BYTES):
                total += len(piece)
                if total > limit:  # a compressed file does not tell beforehand
                    raise _too_large(path, f"has {size} bytes, which unpack to more than {limit}", limit)
                yield decoder.decode(piece)
            yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not a text file, or is cut off: it is not UTF-8 ({error.reason})") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"{path} is not a gzip file, or is cut off: {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def read_lines(path: pathlib.Path, most_bytes: int | None = None) -> Iterator[str]:
    """Yield the lines of a text file, without line endings.

    Raises:
        UsageError, TraceError: as `read_text`; also for a line of more than LONGEST_LINE_CHARS.
    """
    begun = ""
    number = 0
    for text in read_text(path, most_bytes):
        ended = text.split("\n")
        ended[0] = begun + ended[0]
        begun = ended.pop()
        number += len(ended)
        for line in ended:
            yield line.removesuffix("\r")
        if len(begun) > LONGEST_LINE_CHARS:
            raise TraceError(
                f"{path}, line {number + 1} has more than {LONGEST_LINE_CHARS} characters, the most that is read"
            )
    if begun:
        yield begun


def _open_regular(path: pathlib.Path) -> IO[bytes]:
    try:
        # Without O_NONBLOCK, opening a pipe without a writer would block.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL in the name
        raise UsageError(f"cannot read {str(path)!r}: {error}") from error
    mode = os.fstat(number).st_mode
    if kind := _KINDS.get(stat.S_IFMT(mode)):
        os.close(number)
        raise UsageError(f"cannot read {path}: it is {kind}, not a file; write its output to a file first")
    try:
        return os.fdopen(number, "rb")
    except OSError:  # a folder
        os.close(number)
        raise


def _unpack(path: pathlib.Path, raw: IO[bytes]) -> contextlib.AbstractContextManager[IO[bytes]]:
    return typing.cast(IO[bytes], gzip.open(raw)) if path.suffix == ".gz" else contextlib.nullcontext(raw)


def _too_large(path: pathlib.Path, found: str, limit: int) -> TraceError:
    return TraceError(
        f"{path} {found}; at most {limit} bytes ({format_bytes(limit)}) of text are read. Put less into one file: "
        "a shorter step, or fewer of them."
    )

"""Recordings on disk, a file at a time: none is ever read half-written.

A file is written as ``NAME.jsonl.partial`` and renamed to ``NAME.jsonl`` once it is
whole and synced; ``NAME`` begins with the time of its first line, UTC, so names are in
order. What a kill left behind as ``.partial`` is made whole by the next start: all
lines but a torn last one are kept.

Each line is a recording's (``t``, ``channel``, ``line``), with ``time_ms`` beside it.
USER_IP, which holds addresses and access tokens, is never written.
"""

from __future__ import annotations

import datetime
import fcntl
import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

import attrs

from synapse_replication.durable import rename_durably
from synapse_replication.errors import ReplicationError
from synapse_replication.streams.rows import encode_json
from synapse_replication.wire.commands.standard import UserIpCommand

__all__ = ["RecordingFiles", "RecordingWriteError"]

_PARTIAL: Final = ".partial"
_REPAIRED: Final = ".repaired"
_USER_IP: Final = UserIpCommand.NAME.encode()
_BUFFER_BYTES: Final = 256 * 1024
_COPIED_AT_ONCE: Final = 1024 * 1024


class RecordingWriteError(ReplicationError):
    """A recording cannot be written; the text says why and what to do."""


@attrs.define
class _Open:
    """The file that is being written.

    :ivar file: where lines go; ``raw`` itself, or what compresses into it.
    :ivar size: bytes of its lines, before compression.
    :ivar started: monotonic s.
    """

    path: Path
    raw: BinaryIO
    file: Any
    started: float
    size: int = 0
    unsynced: bool = True


class RecordingFiles:
    """Writes lines into files of a folder, of which this is the only writer.

    Memory is bounded: a buffer. Not thread-safe. Every method but ``see`` and
    ``roll`` may take as long as the disk does.

    :param folder: made if it is missing.
    :param roll_bytes: a file with as many bytes of lines is closed.
    :param roll_seconds: a file is closed so long after its first line.
    :param compressed: with gzip.
    :param now: monotonic s.
    :param wall: s since the epoch.
    :raises RecordingWriteError: if the folder cannot be used, or another process
        records into it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        roll_bytes: int,
        roll_seconds: float,
        compressed: bool,
        now: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._roll_bytes = roll_bytes
        self._roll_seconds = roll_seconds
        self._compressed = compressed
        self._now = now
        self._wall = wall
        self._current: _Open | None = None
        self._lock: IO[bytes] | None = None
        self._count = 0
        with _explaining_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / ".lock").open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                raise RecordingWriteError(
                    f"another process records into {folder}: give each its own folder"
                ) from None
            self._lock = lock
            for path in sorted(folder.glob(f"*{_PARTIAL}")):
                _make_whole(path)

    def see(self, channel: str, line: bytes) -> None:
        """Write a line, unless it is personal.

        :raises RecordingWriteError: if it cannot be written; what was written before is
            kept.
        """
        if line.lstrip().startswith(_USER_IP) or channel.endswith("/USER_IP"):
            return
        entry = {
            "t": self._now(),
            "time_ms": int(self._wall() * 1000),
            "channel": channel,
            "line": line.decode("utf-8", "replace"),
        }
        with _explaining_os_errors(self._folder):
            current = self._current
            if current is None:
                current = self._current = self._open()
            current.size += current.file.write(encode_json(entry) + b"\n")
            current.unsynced = True
            if current.size >= self._roll_bytes:
                self.roll()

    def tick(self) -> None:
        """Bring to disk what was seen; close the file if it is old.

        To be called once a second: so much is lost with the machine at most.

        :raises RecordingWriteError: if it cannot be written.
        """
        current = self._current
        if current is None:
            return
        if self._now() - current.started >= self._roll_seconds:
            self.roll()
        elif current.unsynced:
            with _explaining_os_errors(self._folder):
                current.file.flush()
                current.raw.flush()
                os.fsync(current.raw.fileno())
            current.unsynced = False

    def roll(self) -> None:
        """Close the file, if there is one; the next line begins another.

        :raises RecordingWriteError: if it cannot be written.
        """
        current, self._current = self._current, None
        if current is None:
            return
        with _explaining_os_errors(self._folder):
            try:
                if current.file is not current.raw:
                    current.file.close()
                current.raw.flush()
                os.fsync(current.raw.fileno())
            finally:
                current.raw.close()
            rename_durably(current.path, current.path.with_suffix(""))

    def close(self) -> None:
        """Close the file, and let others record into the folder.

        :raises RecordingWriteError: if it cannot be written.
        """
        try:
            self.roll()
        finally:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def _open(self) -> _Open:
        self._count += 1
        begun = datetime.datetime.fromtimestamp(self._wall(), datetime.timezone.utc)
        name = (
            f"{begun:%Y%m%dT%H%M%S}.{begun.microsecond // 1000:03d}Z-"
            f"{os.getpid()}-{self._count:06d}.jsonl{'.gz' if self._compressed else ''}"
        )
        path = self._folder / f"{name}{_PARTIAL}"
        raw = path.open("xb", buffering=_BUFFER_BYTES)
        file: Any = raw
        if self._compressed:
            file = gzip.GzipFile("", "wb", fileobj=raw, mtime=0)
        return _Open(path, raw, file, self._now())


class _explaining_os_errors:  # noqa: N801 -- a context, used like a function
    """Says what to do when the disk does not take what it is given."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, OSError):
            raise RecordingWriteError(
                f"cannot record into {self._folder}: {error.strerror}; correct that "
                "and start again: what was recorded before is kept"
            ) from error


def _make_whole(partial: Path) -> None:
    """Keep the whole lines of a file that a kill cut off."""
    name = partial.with_suffix("")
    repaired = partial.with_suffix(_REPAIRED)
    if name.exists():
        # Cut off in the middle of this.
        partial.unlink()
        return
    compressed = name.suffix == ".gz"
    lines = 0
    with partial.open("rb") as read, repaired.open("wb") as raw:
        if compressed:
            with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
                for line in _whole_lines(gzip.GzipFile(fileobj=read)):
                    packed.write(line)
                    lines += 1
        else:
            for line in _whole_lines(read):
                raw.write(line)
                lines += 1
        raw.flush()
        os.fsync(raw.fileno())
    if lines:
        rename_durably(repaired, name)
    else:
        repaired.unlink()
    partial.unlink()


def _whole_lines(file: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    while True:
        try:
            line = file.readline()
        except (EOFError, zlib.error, gzip.BadGzipFile):
            # Its last block was not written to the end.
            return
        if not line.endswith(b"\n"):
            return
        yield line

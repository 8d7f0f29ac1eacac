"""Writing of recordings to a folder, one file at a time.

A file is written as ``NAME.jsonl.partial``, and renamed to ``NAME.jsonl`` once it is
complete and synced, so that readers never find an incomplete ``NAME.jsonl``. A
compressed file has ``.jsonl.gz`` instead of ``.jsonl``. ``NAME`` begins with the time
of the file's first line in UTC, so names sort by time. If the process is killed, the
next start recovers the complete lines of its ``.partial`` file. If this file is damaged
and not only cut off, it is kept as ``NAME.jsonl.damaged``, because only the lines
before the damage are recovered.

Each line has the keys of a recording (``t``, ``channel``, ``line``), ``time_ms`` and
``crc`` (see :mod:`synapse_replication.checksums`). USER_IP, which contains addresses
and access tokens, is never written.
"""

from __future__ import annotations

import datetime
import fcntl
import gzip
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, Literal

import attrs
from twisted.logger import Logger

from synapse_replication.checksums import add_checksum, strip_checksum
from synapse_replication.durable import open_private, rename_durably
from synapse_replication.errors import ReplicationError
from synapse_replication.streams.rows import encode_json
from synapse_replication.wire.commands import UserIpCommand

_PARTIAL: Final = ".partial"
_REPAIRED: Final = ".repaired"
_DAMAGED: Final = ".damaged"
_USER_IP: Final = UserIpCommand.NAME.encode()
_BUFFER_BYTES: Final = 256 * 1024
_log = Logger()


class RecordingWriteError(ReplicationError):
    """A recording cannot be written; the message says why and what to do."""


@attrs.define
class _Open:
    """A file that is being written.

    :ivar path: its path, which ends in ``.partial`` or ``.repaired``.
    :ivar raw: the file on disk.
    :ivar file: the file to which lines are written: ``raw``, or a compressor that
        writes to it.
    :ivar started: the monotonic time at which it was created, in s.
    :ivar size: the size of its lines in bytes, before compression.
    :ivar unsynced: whether lines were written since the last sync.
    """

    path: Path
    raw: BinaryIO
    file: Any
    started: float
    size: int = 0
    unsynced: bool = True

    def write(self, line: bytes) -> None:
        self.size += self.file.write(line)
        self.unsynced = True

    def sync(self) -> None:
        self.file.flush()
        self.raw.flush()
        os.fsync(self.raw.fileno())
        self.unsynced = False

    def close(self) -> None:
        with self.raw:
            if self.file is not self.raw:
                self.file.close()
            self.raw.flush()
            os.fsync(self.raw.fileno())


def _open(path: Path, mode: Literal["wb", "xb"], started: float = 0.0) -> _Open:
    """Create a file, which is compressed if the suffix before the last is ``.gz``."""
    raw = open(  # noqa: SIM115 -- Path.open() has no opener
        path, mode, buffering=_BUFFER_BYTES, opener=open_private
    )
    file: Any = raw
    if path.with_suffix("").suffix == ".gz":
        file = gzip.GzipFile("", "wb", fileobj=raw, mtime=0)
    return _Open(path, raw, file, started)


@attrs.define(eq=False)
class RecordingFiles:
    """Writes lines to files in a folder that no other process records into.

    Memory use is bounded by a buffer. Not thread-safe. The methods block on the disk.

    :param folder: the folder; created if it is missing.
    :param roll_bytes: the size in bytes, before compression, at which a file is closed.
    :param roll_seconds: the age in s at which a file is closed.
    :param compressed: whether to compress the files with gzip.
    :param now: returns a monotonic time in s.
    :param wall: returns the time in s since the Unix epoch.
    :raises RecordingWriteError: if the folder cannot be used, or another process
        records into it.
    """

    _folder: Path
    _roll_bytes: int
    _roll_seconds: float
    _compressed: bool
    _now: Callable[[], float]
    _wall: Callable[[], float]
    _current: _Open | None = attrs.field(default=None, init=False)
    _lock: IO[bytes] = attrs.field(init=False)
    _count: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        folder = self._folder
        with _explaining_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / ".lock").open("ab")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                raise RecordingWriteError(
                    f"another process records into {folder}; use a folder for each "
                    "process"
                ) from None
            for path in sorted(folder.glob(f"*{_PARTIAL}")):
                _complete_partial(path)

    def write(self, channel: str, line: bytes) -> None:
        """Write a line; skip USER_IP commands and lines of the channel of USER_IP.

        :raises RecordingWriteError: if the line cannot be written; lines that were
            synced remain.
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
                current = self._current = _open(self._next_path(), "xb", self._now())
            current.write(add_checksum(encode_json(entry)))
            if current.size >= self._roll_bytes:
                self.roll()

    def tick(self) -> None:
        """Sync the file to disk; close the file when it is ``roll_seconds`` old.

        Call this method once a second, so that a crash of the machine loses at most the
        lines of about one second.

        :raises RecordingWriteError: if the file cannot be written.
        """
        current = self._current
        if current is None:
            return
        if self._now() - current.started >= self._roll_seconds:
            self.roll()
        elif current.unsynced:
            with _explaining_os_errors(self._folder):
                current.sync()

    def roll(self) -> None:
        """Close the file, if there is one; the next line begins a new file.

        :raises RecordingWriteError: if the file cannot be written.
        """
        current, self._current = self._current, None
        if current is None:
            return
        with _explaining_os_errors(self._folder):
            current.close()
            rename_durably(current.path, current.path.with_suffix(""))

    def close(self) -> None:
        """Close the file, and release the folder's lock.

        :raises RecordingWriteError: if the file cannot be written.
        """
        try:
            self.roll()
        finally:
            self._lock.close()

    def _next_path(self) -> Path:
        self._count += 1
        begun = datetime.datetime.fromtimestamp(self._wall(), datetime.timezone.utc)
        name = (
            f"{begun:%Y%m%dT%H%M%S}.{begun.microsecond // 1000:03d}Z-"
            f"{os.getpid()}-{self._count:06d}.jsonl{'.gz' if self._compressed else ''}"
        )
        return self._folder / f"{name}{_PARTIAL}"


@contextmanager
def _explaining_os_errors(folder: Path) -> Iterator[None]:
    """Convert an ``OSError`` to a :exc:`RecordingWriteError` within the context."""
    try:
        yield
    except OSError as error:
        raise RecordingWriteError(
            f"cannot record into {folder}: {error.strerror}; correct this and restart; "
            "earlier recordings remain"
        ) from error


def _complete_partial(partial: Path) -> None:
    """Recover the complete lines of the file of a killed process.

    If no line is complete, no file remains, unless this one is damaged.
    """
    name = partial.with_suffix("")
    with partial.open("rb") as read:
        file: Any = gzip.GzipFile(fileobj=read) if name.suffix == ".gz" else read
        lines = _CompleteLines(file)
        if name.exists():
            # An earlier recovery was interrupted after the rename.
            count = sum(1 for _ in lines)
        else:
            count = _recover(lines, partial.with_suffix(_REPAIRED), name)
    if lines.damage:
        damaged = partial.with_suffix(_DAMAGED)
        rename_durably(partial, damaged)
        _log.error(
            "{partial} is damaged ({why}): {count} line(s) before the damage were "
            "recovered; the rest is in {damaged}, which is not read any more",
            partial=partial,
            why=lines.damage,
            count=count,
            damaged=damaged.name,
        )
        return
    partial.unlink()
    _log.info(
        "{partial} was left by a recorder that was killed: {count} line(s) were "
        "recovered",
        partial=partial,
        count=count,
    )


def _recover(lines: Iterable[bytes], path: Path, name: Path) -> int:
    """Write lines to a file, by way of another; return their number."""
    count = 0
    with closing(_open(path, "wb")) as repaired:
        for line in lines:
            repaired.write(line)
            count += 1
    if count:
        rename_durably(path, name)
    else:
        path.unlink()
    return count


@attrs.define(eq=False)
class _CompleteLines:
    """The lines of a file up to its end, or to the first that is incomplete.

    :ivar damage: why the file cannot be read to its end; empty if it can, or was only
        cut off.
    """

    _file: IO[bytes]
    damage: str = attrs.field(default="", init=False)
    _is_wrong: bool = attrs.field(default=False, init=False)

    def __iter__(self) -> Iterator[bytes]:
        while True:
            try:
                line = self._file.readline()
            except EOFError:
                # The last compressed block is incomplete. Damage can look like that.
                if self._is_wrong:
                    self.damage = "a line has a wrong checksum"
                return
            except (zlib.error, gzip.BadGzipFile) as error:
                self.damage = str(error)
                return
            if not line.endswith(b"\n"):
                return
            try:
                strip_checksum(line)
            except ValueError:
                self._is_wrong = True
            yield line

"""Reads recordings.

Recordings are the output of ``follow --json``, and the files that ``record`` writes.

The driver lists files, and tasks read them, each file in one task. The driver and all
executors must see each file under the same path. Lines that are appended to a plain
(uncompressed) file after it was listed are ignored. An invalid record (an incomplete
line, a damaged file) becomes a row without a command and with an empty ``line``. The
content of USER_IP never leaves the task that reads it.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Final

import attrs

from synapse_replication.errors import PipelineError, RemoteProtocolError
from synapse_replication.pipeline.scan import Batches, Scan, grouped, to_batch
from synapse_replication.pipeline.schemas import WIRE_SCHEMA
from synapse_replication.recordings.reader import (
    Record,
    RecordingError,
    decompressed,
    is_compressed,
    read_records,
)
from synapse_replication.wire import commands

_logger = logging.getLogger(__name__)

#: The suffixes of recordings in a folder.
SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".jsonl.xz")

#: The maximum number of lines in an Arrow batch.
_BATCH_LINES: Final = 8192

#: The typical size of a line in bytes, and the typical ratio of compression.
_LINE_BYTES: Final = 150
_COMPRESSION: Final = 15


@attrs.frozen
class _File:
    """A recording.

    :ivar recording: its name.
    :ivar size: the size in bytes when it was listed.
    """

    path: Path
    recording: str
    size: int
    is_compressed: bool


def scan_recordings(paths: Iterable[str | os.PathLike[str]]) -> Scan:
    """Plan a read of recordings, with WIRE_SCHEMA.

    ``recording`` is the name of the file, with as many parts of its path as are needed
    to make it unique. Files that a recorder has not completed are named in the log, and
    not read.

    :param paths: files or folders. In a folder, all files at any depth whose names end
        with one of :data:`SUFFIXES` are read.
    :raises PipelineError: if a path does not exist, a file cannot be read, or a folder
        contains no recording.
    """
    given = [Path(path) for path in paths]
    for partial in (each for path in given for each in sorted(path.rglob("*.partial"))):
        _logger.warning(
            "%s is not read: its recorder still runs, or was killed; start the "
            "recorder again to complete the file, or pass its name",
            partial.absolute(),
        )
    found = find_recordings(given)
    files = [
        _inspect(path, name) for path, name in zip(found, _names(found), strict=True)
    ]
    size = sum(
        file.size * (_COMPRESSION if file.is_compressed else 1) for file in files
    )
    return Scan(
        WIRE_SCHEMA,
        grouped(files, lambda file: file.size),
        _read_files,
        size // _LINE_BYTES,
    )


# -- on the driver -----------------------------------------------------------------


def find_recordings(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the files of recordings, including those in folders.

    :raises PipelineError: if a path does not exist, or a folder contains no recording.
    """
    files: dict[Path, None] = {}
    for given in paths:
        path = Path(given).absolute()
        found = recordings_in(path)
        if not found:
            raise PipelineError(
                f"{path} contains no recording; the names of recordings end with "
                f"{' or '.join(SUFFIXES)}"
            )
        files |= dict.fromkeys(found)
    return list(files)


def recordings_in(path: Path) -> list[Path]:
    """Return the recordings at any depth in a folder, or the given file.

    :raises PipelineError: if the path does not exist.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise PipelineError(f"the recording {path} does not exist")
    found = (each for each in path.rglob("*") if each.name.endswith(SUFFIXES))
    return sorted(each for each in found if each.is_file())


def _names(files: Sequence[Path]) -> list[str]:
    """Return a unique name for each file: the shortest unique end of its path."""
    ends = [
        ["/".join(path.parts[-number:]) for number in range(1, len(path.parts) + 1)]
        for path in files
    ]
    counts = Counter(chain.from_iterable(ends))
    return [next(end for end in of_file if counts[end] == 1) for of_file in ends]


def _inspect(path: Path, recording: str) -> _File:
    try:
        with path.open("rb") as file:
            compressed = is_compressed(file)
            return _File(path, recording, file.seek(0, os.SEEK_END), compressed)
    except OSError as error:
        raise PipelineError(f"cannot read the recording {path}: {error}") from error


# -- in tasks ----------------------------------------------------------------------


def _read_files(files: Iterable[_File]) -> Batches:
    for each in files:
        rows = ((each.recording, *_to_row(record)) for record in _records_of(each))
        while some := list(islice(rows, _BATCH_LINES)):
            yield to_batch(some, WIRE_SCHEMA)


class _ListedLines:
    """The lines that begin within the size of a file when it was listed."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._size = size
        self._within_line = False

    def readline(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes of a line; no bytes after the last line."""
        if not self._within_line and self._file.tell() >= self._size:
            return b""
        text = self._file.readline(size)
        self._within_line = bool(text) and not text.endswith(b"\n")
        return text


def _records_of(part: _File) -> Iterator[Record | RecordingError]:
    with part.path.open("rb") as file:
        lines = (
            decompressed(file) if part.is_compressed else _ListedLines(file, part.size)
        )
        yield from read_records(lines.readline)


def _to_row(record: Record | RecordingError) -> tuple[Any, ...]:
    if isinstance(record, RecordingError):
        return (record.number, 0.0, None, "", *(None,) * 6, "")
    text = record.line.decode()
    received_us = None if record.time_ms is None else record.time_ms * 1000
    command: commands.Command | None
    try:
        command = commands.parse_command_from_line(text)
    except RemoteProtocolError:
        command = None
    stream = writer = token = prev_token = row = None
    if isinstance(command, commands.RdataCommand | commands.PositionCommand):
        stream, writer = command.stream_name, command.instance_name
    if isinstance(command, commands.RdataCommand):
        token, row = command.token, text.split(" ", 4)[4]
    elif isinstance(command, commands.PositionCommand):
        token, prev_token = command.new_token, command.prev_token
    elif commands.UserIpCommand.NAME in text or record.channel.endswith(
        f"/{commands.UserIpCommand.NAME}"
    ):
        text = commands.UserIpCommand.NAME
    name = None if command is None else command.NAME
    head = record.number, record.seconds, received_us, record.channel
    return (*head, name, stream, writer, token, prev_token, row, text)

"""Recordings of traffic: JSON lines of ``{"t": ..., "channel": ..., "line": ...}``.

``t`` is the time of arrival in s, from any beginning; ``channel`` the Redis channel;
``line`` the command. Files may be compressed with gzip.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import IO

import attrs
import msgspec

from synapse_replication.errors import ReplicationError

__all__ = ["Record", "RecordingError", "read_recording", "shipped_recording"]

_GZIP_MAGIC = b"\x1f\x8b"

#: Bytes in a line of a recording at most. A command has at most 16 KiB, and one
#: byte of it at most six as JSON.
_MAX_LINE = 128 * 1024


class RecordingError(ReplicationError):
    """A line of a recording is not one of a recording.

    :ivar number: the line, from 1.
    """

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"line {number}: {reason}")
        self.number = number
        self.reason = reason


class _Line(msgspec.Struct):
    line: str
    channel: str = ""
    t: float = 0.0


@attrs.frozen
class Record:
    """One command of a recording.

    :ivar number: of its line in the file, from 1.
    :ivar seconds: when it arrived.
    :ivar line: the command, without its end.
    """

    number: int
    seconds: float
    channel: str
    line: bytes


_decode = msgspec.json.Decoder(_Line).decode


def shipped_recording() -> Path:
    """Find the recording that comes with the package.

    A real Synapse of five processes, from an empty database, driven over the client
    API: 21,168 commands, 10,159 of them rows. Its users and tokens were made up.
    """
    return Path(str(files("synapse_replication.recordings") / "startup_drive.jsonl.gz"))


def read_recording(path: Path) -> Iterator[Record | RecordingError]:
    """Read a recording, a line at a time.

    What is no record is given in its place, as an error; blank lines are passed
    over. A file that is cut off gives an error as its last.

    :raises OSError: the file cannot be opened or read.
    """
    with path.open("rb") as file:
        compressed = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        if compressed:
            with gzip.open(file) as unpacked:
                yield from _read(unpacked)
        else:
            yield from _read(file)


def _read(file: IO[bytes] | gzip.GzipFile) -> Iterator[Record | RecordingError]:
    number = 0
    while True:
        number += 1
        try:
            text = file.readline(_MAX_LINE)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            yield RecordingError(number, f"the compressed file is damaged: {error}")
            return
        if not text:
            return
        if len(text) == _MAX_LINE and not text.endswith(b"\n"):
            yield RecordingError(number, f"longer than {_MAX_LINE} bytes")
            while text and not text.endswith(b"\n"):
                text = file.readline(_MAX_LINE)
        elif not text.isspace():
            yield _parse(number, text)


def _parse(number: int, text: bytes) -> Record | RecordingError:
    try:
        record = _decode(text)
        line = record.line.encode()
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return RecordingError(
            number, f'not {{"t": ..., "channel": ..., "line": ...}}: {error}'
        )
    return Record(number, record.t, record.channel, line)

"""Recordings of traffic: JSON lines of ``{"t": ..., "channel": ..., "line": ...}``.

``t`` is the time of arrival in s, from any beginning; ``channel`` the Redis channel;
``line`` the command; ``time_ms``, which may be missing, the time of arrival in ms
since the epoch of 1970. What else is in the object is skipped.

Where the bytes come from is the caller's business.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator
from typing import IO, Annotated, Final, Protocol, cast

import attrs
import msgspec

from synapse_replication.errors import ReplicationError

__all__ = [
    "MAX_LINE_BYTES",
    "LineSource",
    "Record",
    "RecordingError",
    "is_compressed",
    "read_records",
    "unpacked",
]

#: What compressed files begin with.
_GZIP_MAGIC: Final = b"\x1f\x8b"
_XZ_MAGIC: Final = b"\xfd7zXZ\x00"

#: Bytes in a line of a recording at most. What goes over Redis has no limit of its
#: own; nothing that is replicated comes near.
MAX_LINE_BYTES: Final = 2**20


class RecordingError(ReplicationError):
    """A line of a recording is not one of a recording.

    :ivar number: the line, from 1.
    """

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"line {number}: {reason}")
        self.number = number
        self.reason = reason


#: The end of the year 9999.
_LAST_MS: Final = 253_402_300_799_999


class _Line(msgspec.Struct):
    line: str
    channel: str = ""
    t: float = 0.0
    time_ms: Annotated[int, msgspec.Meta(ge=0, le=_LAST_MS)] | None = None


@attrs.frozen
class Record:
    """One command of a recording.

    :ivar number: of its line in the file, from 1.
    :ivar seconds: when it arrived.
    :ivar line: the command, without its end.
    :ivar time_ms: when it arrived, ms since the epoch of 1970, if that is known.
    """

    number: int
    seconds: float
    channel: str
    line: bytes
    time_ms: int | None = None


class LineSource(Protocol):
    """A binary file, as far as it is needed here."""

    def readline(self, size: int, /) -> bytes:
        """Return a line with its end, or as much of it as was asked for."""


_decode = msgspec.json.Decoder(_Line).decode


def is_compressed(file: IO[bytes]) -> bool:
    """Return whether a file is compressed, with gzip or xz; leaves it at its start."""
    start = file.read(len(_XZ_MAGIC))
    file.seek(0)
    return start.startswith((_GZIP_MAGIC, _XZ_MAGIC))


def unpacked(file: IO[bytes]) -> IO[bytes]:
    """Return what a file holds, decompressed if it is compressed.

    :param file: at its start. The caller closes it.
    """
    start = file.read(len(_XZ_MAGIC))
    file.seek(0)
    if start.startswith(_GZIP_MAGIC):
        return cast("IO[bytes]", gzip.open(file))
    if start == _XZ_MAGIC:
        return cast("IO[bytes]", lzma.open(file))
    return file


def read_records(
    file: LineSource, first_number: int = 1
) -> Iterator[Record | RecordingError]:
    """Read records, a line at a time, to the end.

    What is no record is given in its place, as an error; blank lines are passed
    over. A compressed file that is cut off gives an error as its last.

    :param file: uncompressed, or what :func:`unpacked` returns.
    :param first_number: of the first line.
    :raises OSError: if the file cannot be read.
    """
    number = first_number - 1
    while True:
        number += 1
        try:
            text = file.readline(MAX_LINE_BYTES)
        except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
            yield RecordingError(number, f"the compressed file is damaged: {error}")
            return
        if not text:
            return
        if len(text) == MAX_LINE_BYTES and not text.endswith(b"\n"):
            yield RecordingError(number, f"longer than {MAX_LINE_BYTES} bytes")
            while text and not text.endswith(b"\n"):
                text = file.readline(MAX_LINE_BYTES)
        elif not text.isspace():
            yield parse_record(number, text)


def parse_record(number: int, text: bytes) -> Record | RecordingError:
    """Read one line.

    :param number: of the line.
    """
    try:
        record = _decode(text)
        line = record.line.encode()
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return RecordingError(
            number, f'not {{"t": ..., "channel": ..., "line": ...}}: {error}'
        )
    return Record(number, record.t, record.channel, line, record.time_ms)

"""Reading of recordings of traffic.

A recording has JSON lines of ``{"t": ..., "channel": ..., "line": ...}``. ``t`` is the
time of arrival in s, from an arbitrary origin; ``channel`` is the Redis channel or, for
direct TCP, the server's name; ``line`` is the command; the optional ``time_ms`` is the
time of arrival in ms since the Unix epoch. Other keys are ignored. If a line ends in a
checksum (see :mod:`synapse_replication.checksums`), it is verified.

Files may be compressed with gzip or xz.
"""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import IO, Annotated, Any, Final, cast

import attrs
import msgspec
from typing_extensions import override

from synapse_replication.checksums import strip_checksum
from synapse_replication.errors import ReplicationError

#: The first bytes of compressed files.
_GZIP_MAGIC: Final = b"\x1f\x8b"
_XZ_MAGIC: Final = b"\xfd7zXZ\x00"

#: The maximum length of a line of a recording, in bytes. Redis accepts longer messages,
#: but replicated rows are far shorter.
MAX_LINE_BYTES: Final = 2**20

#: The most memory that the decompression of an xz file may take, in bytes. ``xz -9``
#: declares 65 MiB.
MAX_XZ_MEMORY: Final = 72 * 2**20
#: The bytes of a compressed file to read at a time.
_CHUNK: Final = 64 * 1024


class RecordingError(ReplicationError):
    """A line that does not have the format of a recording, or cannot be decompressed.

    :ivar number: the line number, from 1.
    :ivar reason: what is wrong with the line.
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

    :ivar number: its line number in the file, from 1.
    :ivar seconds: the time of its arrival in s, from an arbitrary origin.
    :ivar channel: the Redis channel; for direct TCP, the server's name.
    :ivar line: the command, without its line end.
    :ivar time_ms: the time of its arrival in ms since the Unix epoch, if known.
    """

    number: int
    seconds: float
    channel: str
    line: bytes
    time_ms: int | None = None


_decode = msgspec.json.Decoder(_Line).decode


def is_compressed(file: IO[bytes]) -> bool:
    """Return whether a file is compressed with gzip or xz, and rewind the file."""
    return decompressed(file) is not file


def decompressed(file: IO[bytes]) -> IO[bytes]:
    """Return a file that reads the decompressed content of ``file``.

    :param file: a file at its start, compressed or not. The caller closes it.
    """
    start = file.read(len(_XZ_MAGIC))
    file.seek(0)
    if start.startswith(_GZIP_MAGIC):
        return cast("IO[bytes]", gzip.open(file))
    if start == _XZ_MAGIC:
        return io.BufferedReader(_XzReader(file))
    return file


class _XzReader(io.RawIOBase):
    """The decompressed content of an xz file, with bounded memory.

    The header of an xz file declares how much memory its decompression takes, up to
    4 GiB. ``lzma.open`` believes it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decompressor = lzma.LZMADecompressor(memlimit=MAX_XZ_MEMORY)

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int:
        while True:
            data = b""
            if self._decompressor.eof:
                # Another stream may follow, after padding.
                data = self._decompressor.unused_data.lstrip(b"\0")
                data = data or self._file.read(_CHUNK).lstrip(b"\0")
                if not data:
                    return 0
                self._decompressor = lzma.LZMADecompressor(memlimit=MAX_XZ_MEMORY)
            elif self._decompressor.needs_input:
                data = self._file.read(_CHUNK)
                if not data:
                    raise EOFError("its end is missing")
            try:
                found = self._decompressor.decompress(data, len(buffer))
            except lzma.LZMAError as error:
                if "limit" not in str(error):
                    raise
                raise lzma.LZMAError(
                    "to decompress it takes more than "
                    f"{MAX_XZ_MEMORY // 2**20} MiB of memory; compress it with xz -6"
                ) from error
            if found:
                buffer[: len(found)] = found
                return len(found)


def read_records(readline: Callable[[int], bytes]) -> Iterator[Record | RecordingError]:
    """Yield the records of a file, a line at a time.

    An error is yielded in place of a line that is not a record. Where a compressed file
    is damaged or truncated, an error is yielded as the last item. Blank lines are
    skipped.

    :param readline: returns a line with its line end, or its first bytes, of an
        uncompressed file, or of the result of :func:`decompressed`.
    :raises OSError: if the file cannot be read.
    """
    number = 1
    try:
        while text := readline(MAX_LINE_BYTES):
            if len(text) == MAX_LINE_BYTES and not text.endswith(b"\n"):
                yield RecordingError(number, f"longer than {MAX_LINE_BYTES} bytes")
                while text and not text.endswith(b"\n"):
                    text = readline(MAX_LINE_BYTES)
            elif not text.isspace():
                yield parse_record(number, text)
            number += 1
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        yield RecordingError(number, f"the compressed file is damaged: {error}")


def parse_record(number: int, text: bytes) -> Record | RecordingError:
    """Parse one line.

    :param number: the line number.
    """
    try:
        text = strip_checksum(text)
    except ValueError as error:
        return RecordingError(number, str(error))
    try:
        record = _decode(text)
        line = record.line.encode()
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return RecordingError(
            number, f'not {{"t": ..., "channel": ..., "line": ...}}: {error}'
        )
    return Record(number, record.t, record.channel, line, record.time_ms)


def shipped_recording() -> Path:
    """Return the path of the recording that ships with the package.

    It contains the first traffic of a real Synapse of five processes, started with an
    empty database and driven over the client API: 9,000 commands, 4,676 of them
    rows. Its users and tokens are fictitious.
    """
    return Path(
        str(files("synapse_replication.recordings") / "data" / "startup.jsonl.xz")
    )


def read_recording(path: Path) -> Iterator[Record | RecordingError]:
    """Yield the records of a recording, a line at a time.

    An error is yielded in place of a line that is not a record. Where a compressed file
    is damaged or truncated, an error is yielded as the last item. Blank lines are
    skipped.

    :raises OSError: if the file cannot be opened or read.
    """
    with path.open("rb") as file:
        yield from read_records(decompressed(file).readline)

"""The script of writes, derived from a recording of real traffic.

Every writing process derives the same script from the same recording, and performs its
own part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import msgspec

from synapse_replication.errors import RemoteProtocolError
from synapse_replication.recordings.reader import RecordingError, read_recording
from synapse_replication.wire.commands import RdataCommand, parse_command_from_line


@attrs.frozen
class DemoStream:
    """A stream of the demonstration.

    :ivar name: its name on the wire, as in the recording.
    :ivar columns: the types of its columns, as in a ``TableStream``; empty for a stream
        that is held in memory.
    :ivar writers: maps each writer in the recording to a writer of the demonstration.
    """

    name: str
    columns: Mapping[str, str]
    writers: Mapping[str, str]

    @property
    def in_memory(self) -> bool:
        """Whether its rows are held in memory."""
        return not self.columns

    @property
    def table(self) -> str:
        """The table of its rows."""
        return f"demo_{self.name}"

    @property
    def sequence(self) -> str:
        """The sequence of its ids."""
        return f"demo_{self.name}_seq"


#: The streams, by name.
STREAMS: Mapping[str, DemoStream] = MappingProxyType(
    {
        stream.name: stream
        for stream in msgspec.json.decode(
            Path(__file__).with_name("streams.json").read_bytes(),
            type=list[DemoStream],
        )
    }
)


@attrs.frozen
class Write:
    """Rows to write under one token.

    :ivar row_number: the number of rows, of all writers, that precede these rows in the
        script.
    """

    stream_name: str
    instance_name: str
    rows: list[Any]
    row_number: int


def read_script(path: Path, rows: int) -> Iterator[Write]:
    """Return the script of a recording; see :func:`make_script`.

    :raises RecordingError: if a line of the file is not a line of a recording.
    """
    return make_script(_lines(path), rows)


def _lines(path: Path) -> Iterator[str]:
    for record in read_recording(path):
        if isinstance(record, RecordingError):
            raise record
        yield record.line.decode()


def make_script(lines: Iterable[str], rows: int) -> Iterator[Write]:
    """Yield the writes of a script.

    The recording is repeated until there are enough rows.

    :param lines: the commands of the recording.
    :param rows: the minimum number of rows; the last batch is not split.
    :raises ValueError: if the recording has no rows of the demonstration's streams, or
        has a row that cannot be parsed.
    """
    writes = list(_writes(lines))
    if not writes:
        raise ValueError("the recording has no rows of the demonstration's streams")
    row_number = 0
    for write in itertools.cycle(writes):
        if row_number >= rows:
            return
        yield attrs.evolve(write, row_number=row_number)
        row_number += len(write.rows)


def _writes(lines: Iterable[str]) -> Iterator[Write]:
    batches: dict[tuple[str, str], list[Any]] = {}
    for line in lines:
        if not line.startswith("RDATA "):
            continue
        try:
            command = parse_command_from_line(line)
        except RemoteProtocolError as error:
            raise ValueError(f"the recording cannot be read: {error}") from error
        assert isinstance(command, RdataCommand)
        stream = STREAMS.get(command.stream_name)
        instance = stream.writers.get(command.instance_name) if stream else None
        if instance is None:
            continue
        key = (command.stream_name, instance)
        batches.setdefault(key, []).append(command.row)
        if command.token is not None:
            yield Write(*key, batches.pop(key), 0)

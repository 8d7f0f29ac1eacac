"""A row sink that appends received rows to a file, and resumes from that file.

Each line is a JSON object: the rows of one token, with their stream, writer and
token::

    {"stream":"events","writer":"persister1","token":7,"rows":[["ev",...]],"crc":"..."}

A position that advances without rows is recorded as a line without rows. For a stream
held in memory, a line with an ``epoch`` begins an epoch of the writer; the writer's
following rows belong to that epoch (see
:class:`~synapse_replication.handlers.interfaces.EpochSink`)::

    {"stream":"typing","writer":"master","token":0,"rows":[],"epoch":"Vn3x","crc":"..."}

``crc`` is the CRC-32 of the line without it, as eight hexadecimal digits. A line
without one, as version 0.1.0 wrote it, is accepted.

Rows are passed to the operating system before the position advances, so no row at or
below a recorded position is lost if the process is killed. If the process is killed
during a write, the incomplete last line is removed at the next start, and its rows are
fetched again. Other lines that are damaged are skipped; if a writer's last line is
damaged, its rows are fetched again. Until the damaged lines are removed from the file,
each start logs their numbers, and the status page is red.

Each process needs a journal of its own: the file is locked as long as it is open.
Configure it in the worker's configuration file::

    synapse_replication:
      row_sink:
        module: synapse_replication.app.journal.make_journal
        config: {path: /var/lib/my_reader.jsonl}
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from twisted.logger import Logger

from synapse_replication.checksums import add_checksum, strip_checksum
from synapse_replication.durable import open_private
from synapse_replication.errors import StorageError, StreamConfigurationError
from synapse_replication.streams.rows import decode_json, encode_json
from synapse_replication.streams.tokens import MAX_TOKEN, MIN_TOKEN

#: The most numbers of damaged lines that are logged.
_MAX_SHOWN = 20
_log = Logger()


class JournalSink:
    """Appends received rows to a file.

    It is a :class:`~synapse_replication.handlers.interfaces.RowSink`.

    :ivar damage: the damaged lines of the file, for the status; empty if there are
        none.

    :param path: the file; created if it is missing.
    :param to_json: ``(stream_name, row) -> value``; returns the JSON value of a typed
        row.
    :raises OSError: if the file cannot be opened.
    :raises StorageError: if the first line of the file is not a line of a journal, or
        another process has opened it as its journal.
    """

    def __init__(self, path: str | Path, to_json: Callable[[str, Any], Any]) -> None:
        path = Path(path)
        self._to_json = to_json
        self._positions: dict[tuple[str, str], int] = {}
        self._epochs: dict[tuple[str, str], str] = {}
        self.damage = ""
        # Unbuffered: write() passes the data to the operating system.
        with ExitStack() as opened:
            self._file = opened.enter_context(
                open(path, "ab", buffering=0, opener=open_private)
            )
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StorageError(
                    f"{path} is in use as the journal of another process; name "
                    "another file for this one, or stop the other process"
                ) from None
            with path.open("rb") as lines:
                self._size = self._resume(path, lines)
            self._file.truncate(self._size)
            opened.pop_all()

    def _resume(self, path: Path, lines: Iterable[bytes]) -> int:
        good_end, damaged = 0, []
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            try:
                self._restore(decode_json(strip_checksum(line)))
            except (ValueError, KeyError, TypeError) as error:
                if number == 1:
                    raise StorageError(
                        f"{path}:1 is not a line of a journal ({error}); name another "
                        "file, or move this one away to start with an empty journal"
                    ) from error
                damaged.append(number)
            good_end += len(line)
        if damaged:
            numbers = ", ".join(map(str, damaged[:_MAX_SHOWN]))
            self.damage = (
                f"{path} has {len(damaged)} damaged line(s), which are skipped: "
                f"{numbers}; stop the process and remove them from the file"
            )
            _log.error("{damage}", damage=self.damage)
        return good_end

    def _restore(self, entry: Any) -> None:
        key, token = (entry["stream"], entry["writer"]), entry["token"]
        texts = (*key, entry.get("epoch", ""))
        if type(token) is not int or any(type(text) is not str for text in texts):
            raise TypeError("a field has the wrong type")
        if not MIN_TOKEN <= token <= MAX_TOKEN:
            raise ValueError(f"the token {token} does not fit into 64 bits")
        self._positions[key] = token
        if "epoch" in entry:
            self._epochs[key] = entry["epoch"]

    def saved_positions(self) -> Mapping[tuple[str, str], int]:
        """Return the last position of each ``(stream, writer)`` in the file."""
        return dict(self._positions)

    def saved_epochs(self) -> Mapping[tuple[str, str], str]:
        """Return the last epoch of each ``(stream, writer)`` that has one."""
        return dict(self._epochs)

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        """Write the rows of one token.

        :raises OSError: if the file cannot be written, for instance because the disk
            is full. In that case, the incomplete line is removed.
        """
        self._append(
            stream_name,
            instance_name,
            token,
            [self._to_json(stream_name, row) for row in rows],
        )

    def on_position(self, stream_name: str, instance_name: str, token: int) -> None:
        """Record a writer's position if it changed."""
        if self._positions.get((stream_name, instance_name)) != token:
            self._append(stream_name, instance_name, token, [])

    def on_epoch(self, stream_name: str, instance_name: str, epoch: str) -> None:
        """Record a new epoch of a writer; the writer's next rows belong to it."""
        self._append(stream_name, instance_name, 0, [], epoch=epoch)
        self._epochs[stream_name, instance_name] = epoch

    def _append(
        self, stream: str, writer: str, token: int, rows: list[Any], **more: str
    ) -> None:
        entry = {"stream": stream, "writer": writer, "token": token, "rows": rows}
        line = add_checksum(encode_json({**entry, **more}))
        written = 0
        try:
            # One write usually suffices; on a full disk, a write may be partial.
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += len(line)
        self._positions[stream, writer] = token

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def make_journal(host: Any, config: Mapping[str, Any]) -> JournalSink:
    """Return the journal that ``row_sink`` configures.

    :param config: the section's ``config``, whose key ``path`` names the file.
    :raises StreamConfigurationError: if the key is missing or not a string, or the
        file cannot be opened.
    :raises StorageError: if the first line of the file is not a line of a journal, or
        another process has opened it as its journal.
    """
    path = config.get("path")
    if not isinstance(path, str):
        raise StreamConfigurationError(
            "synapse_replication.row_sink.config: path is missing or not a string; "
            "write the name of the journal's file"
        )
    try:
        return JournalSink(Path(path), host.row_to_json)
    except OSError as error:
        raise StreamConfigurationError(
            f"synapse_replication.row_sink.config.path: {path} cannot be opened: "
            f"{error.strerror}; name a file that this user may write"
        ) from error

"""The service with which each writing process performs its part of the demo's script.

The script is derived from a recording; see :mod:`~synapse_replication.demo.script`. The
service is configured with the key ``modules``, like a user's own module. It performs
several writes to the host's streams at a time, and logs them to a file.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import attrs
from twisted.application.service import Service
from twisted.internet.defer import Deferred, FirstError, gatherResults, maybeDeferred
from typing_extensions import override

from synapse_replication.demo.check import JournalEntry
from synapse_replication.demo.script import Write, read_script
from synapse_replication.streams.rows import encode_json

#: The number of concurrent writes of one process; they may finish in any order.
CONCURRENCY = 8
#: The interval at which the begin file is checked, in s.
BEGIN_INTERVAL = 0.05

#: The longest sleep before a write that is due later, in s.
MAX_SLEEP = 0.5


@attrs.define(eq=False, repr=False)
class ScriptWriter(Service):
    """Performs the writes of one process at a given rate.

    :param host: the process's host.
    :param writes: the writes of this process.
    :param rate: the rate of all writers together, in rows per second.
    :param begin_file: the writes begin when this file exists.
    :param log_file: the file to which a journal line is appended for each write, and a
        line with the outcome after the last one.
    """

    _host: Any
    _writes: Iterator[Write]
    _rate: float
    _begin_file: Path
    _log_file: Path
    _running: Awaitable[Any] | None = attrs.field(default=None, init=False)

    @override
    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self._running = self._host.run_as_background_process("demo-writer", self._run)

    @override
    def stopService(self) -> Awaitable[Any] | None:
        super().stopService()  # type: ignore[no-untyped-call]
        return self._running

    async def _run(self) -> None:
        clock = self._host.clock
        while not self._begin_file.exists():
            if not self.running:
                return
            await clock.sleep(BEGIN_INTERVAL)
        # Append, because a restarted process continues its log.
        with self._log_file.open("a", buffering=1) as log:
            try:
                await self._write_all(log)
            except Exception as error:
                # Log the failure, so that the launcher does not wait for more rows.
                log.write(json.dumps({"failed": str(error)}) + "\n")
                raise
            log.write(json.dumps({"finished": bool(self.running)}) + "\n")

    async def _write_all(self, log: TextIO) -> None:
        begun = self._host.clock.seconds()
        writing = [
            Deferred.fromCoroutine(self._write_in_turn(log, begun))
            for _ in range(CONCURRENCY)
        ]
        try:
            await gatherResults(writing, consumeErrors=True)
        except FirstError as error:
            error.subFailure.raiseException()

    async def _write_in_turn(self, log: TextIO, begun: float) -> None:
        clock = self._host.clock
        for write in self._writes:
            due = begun + write.row_number / self._rate
            # Sleep in short steps, so that a stop need not wait for a later write.
            while self.can_continue() and (delay := due - clock.seconds()) > 0:
                await clock.sleep(min(delay, MAX_SLEEP))
            if not self.can_continue():
                return
            await self.write(write, log)

    def can_continue(self) -> bool:
        """Return whether to perform further writes."""
        return bool(self.running)

    async def write(self, write: Write, log: TextIO) -> None:
        """Write the rows of one token, and log the write."""
        stream = self._host.streams.get_streams()[write.stream_name]
        rows = [stream.description.codec.from_json(row) for row in write.rows]
        token = await maybeDeferred(stream.write, rows)
        entry = JournalEntry(write.stream_name, write.instance_name, token, write.rows)
        log.write(encode_json(entry).decode() + "\n")


def make_writer(host: Any, config: Mapping[str, Any]) -> ScriptWriter:
    """Return the writer for an entry of ``modules``.

    :param config: ``recording``, ``rows``, ``rate``, ``begin_file``, ``log_file``.
    """
    name = host.identity.instance_name
    script = read_script(Path(config["recording"]), config["rows"])
    return ScriptWriter(
        host,
        (write for write in script if write.instance_name == name),
        config["rate"],
        Path(config["begin_file"]),
        Path(config["log_file"]),
    )

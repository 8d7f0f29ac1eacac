"""The code that runs inside each process that writes: its part of the script.

It is plugged in by the key ``modules``, as any code of a user's is. It writes to
the streams of its host, several writes at a time, and notes down what it wrote.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from twisted.application.service import Service
from twisted.internet.defer import Deferred, FirstError, gatherResults, maybeDeferred
from typing_extensions import override

from synapse_replication.demo.script import Write, read_script

__all__ = ["ScriptWriter", "make_writer"]

#: Writes of one process that are under way at a time: ids finish in any order.
CONCURRENCY = 8

#: s between two looks at whether to begin.
POLL = 0.05

#: The longest sleep before a write that is due later, in s.
MAX_SLEEP = 0.5


class ScriptWriter(Service):
    """Writes, once it is told to begin, one thing after the other.

    :param host: the process's host.
    :param writes: the writes of this process.
    :param rate: rows a second, of all writers together.
    :param begin_file: it begins when this file exists.
    :param log_file: gets a line for each write, as a journal has them.
    """

    def __init__(
        self,
        host: Any,
        writes: Iterator[Write],
        rate: float,
        begin_file: Path,
        log_file: Path,
    ) -> None:
        self._host = host
        self._writes = writes
        self._rate = rate
        self._begin_file = begin_file
        self._log_file = log_file
        self._running: Awaitable[Any] | None = None

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
            await clock.sleep(POLL)
        # Added to: a process that is started again goes on with its notes.
        with self._log_file.open("a", buffering=1) as log:
            try:
                await self._write_all(log)
            except Exception as error:
                # The launcher need not wait for what will not come.
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
            # In short steps: a stop does not wait for a write that is due much later.
            while self.goes_on() and (delay := due - clock.seconds()) > 0:
                await clock.sleep(min(delay, MAX_SLEEP))
            if not self.goes_on():
                return
            await self.write(write, log)

    def goes_on(self) -> bool:
        """Return whether more is to be written."""
        return bool(self.running)

    async def write(self, write: Write, log: TextIO) -> None:
        """Write the rows of one token, and note it down."""
        stream = self._host.streams.get_streams()[write.stream_name]
        rows = [stream.description.codec.from_json(row) for row in write.rows]
        token = await maybeDeferred(stream.write, rows)
        entry = {
            "stream": write.stream_name,
            "writer": write.instance_name,
            "token": token,
            "rows": write.rows,
        }
        log.write(json.dumps(entry) + "\n")


def make_writer(host: Any, config: Mapping[str, Any]) -> ScriptWriter:
    """Make the writer that ``modules`` asks for.

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

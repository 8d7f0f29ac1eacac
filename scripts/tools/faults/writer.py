"""The service inside each writing process: a steady load until a file exists.

Unlike the service of the demonstration, it skips a write that the database rejects, and
a restarted process continues to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import attrs
import psycopg2
from twisted.internet import reactor  # noqa: TID251 -- the one of the process
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.web.client import HTTPConnectionPool
from twisted.web.http import HTTPChannel
from typing_extensions import override

from synapse_replication.demo.script import STREAMS, DemoStream, Write, read_script
from synapse_replication.demo.writer import ScriptWriter
from synapse_replication.errors import ReplicationError

#: More rows than any run writes.
ENDLESS = 10**9
#: The beginning of the log line about a rejected write.
REFUSED = "a write was refused"
#: The delay in s after a rejected write.
REFUSED_PAUSE = 0.2
#: The interval at which a writer counts its delayed calls, in s.
COUNT_INTERVAL = 5.0

_log = Logger()


def delayed_calls_file(folder: Path, name: str) -> Path:
    """Return the file in which a writer says how many delayed calls it has.

    The timers of HTTP connections are not among them.
    """
    return folder / f"{name}.delayed_calls"


class SteadyWriter(ScriptWriter):
    """Writes until a file exists.

    :ivar end_file: the file.
    """

    end_file = Path()

    def count_delayed_calls(self) -> None:
        """Write the number of the reactor's delayed calls to a file."""
        name = self._host.identity.instance_name
        path = delayed_calls_file(self.end_file.parent, name)
        path.write_text(str(sum(map(is_counted, reactor.getDelayedCalls()))))

    @override
    def startService(self) -> None:
        super().startService()
        LoopingCall(self.count_delayed_calls).start(COUNT_INTERVAL)

    @override
    def can_continue(self) -> bool:
        return super().can_continue() and not self.end_file.exists()

    @override
    async def write(self, write: Write, log: TextIO) -> None:
        try:
            await super().write(write, log)
        except (psycopg2.Error, ReplicationError) as error:
            # The rows may have been committed nevertheless; if so, they are counted.
            _log.info(REFUSED + ": {error}", error=str(error).strip())
            await self._host.clock.sleep(REFUSED_PAUSE)


def is_counted(call: IDelayedCall) -> bool:
    """Return whether a call is not the timer of an HTTP connection."""
    owner = getattr(getattr(call, "func", None), "__self__", None)
    return not isinstance(owner, HTTPConnectionPool | HTTPChannel)


def writers_of(
    stream: DemoStream, writer: str, moved: Mapping[str, Sequence[str]]
) -> Sequence[str]:
    """Return the instances that currently write the rows of a writer of the script."""
    return (writer,) if stream.in_memory else moved.get(writer, (writer,))


def own_writes(
    script: Iterable[Write],
    name: str,
    moved: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Write]:
    """Return a process's part of a script, which begins with row number 0.

    :param moved: by writer of the script: the instances to which its tables were moved,
        and which write them in turn.
    """
    moved = moved or {}
    if not any(
        name in writers_of(stream, writer, moved)
        for stream in STREAMS.values()
        for writer in stream.writers.values()
    ):
        # The script has no end: do not search it for writes of this process.
        return
    skipped = None
    for number, write in enumerate(script):
        if skipped is None:
            skipped = write.row_number
        stream = STREAMS[write.stream_name]
        writers = writers_of(stream, write.instance_name, moved)
        if writers[number % len(writers)] == name:
            yield attrs.evolve(
                write, instance_name=name, row_number=write.row_number - skipped
            )


def make_writer(host: Any, config: Mapping[str, Any]) -> SteadyWriter:
    """Return the writer for an entry of ``modules``.

    :param config: ``recording``, ``rate``, ``begin_file``, ``end_file``,
        ``log_file``; ``skip``: the number of writes of the script to skip; ``moved``:
        see :func:`own_writes`.
    """
    name = host.identity.instance_name
    script = read_script(Path(config["recording"]), ENDLESS)
    writer = SteadyWriter(
        host,
        own_writes(islice(script, config["skip"], None), name, config.get("moved")),
        config["rate"],
        Path(config["begin_file"]),
        Path(config["log_file"]),
    )
    writer.end_file = Path(config["end_file"])
    return writer

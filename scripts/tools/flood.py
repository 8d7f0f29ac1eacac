"""Measures how a flood of rows of one stream affects another stream.

``python -m scripts.tools.flood --rows 1000000`` starts a private Redis, a writer
process, and a reader in this process. The writer commits all rows of one stream in one
step, or at a given rate. Until all of them are sent, the reader's sink delays each row.
A second stream continues at a constant rate: the latency of its rows is measured before
and during the flood, as is the memory of this process. At the end, each row of the
flood must have been delivered once and in order.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import click
from twisted.internet import error
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import LoopingCall, react
from twisted.python.failure import Failure

from synapse_replication.handlers.command_handler import ReplicationCommandHandler
from synapse_replication.handlers.events import AnnouncedBy, LinkDown, OperationFailed
from synapse_replication.handlers.host_parts import (
    BackgroundProcesses,
    ReactorClock,
    WriteNotifier,
)
from synapse_replication.handlers.interfaces import Identity, ReplicationHost
from synapse_replication.handlers.observer import ReplicationObserver, handles
from synapse_replication.handlers.sending.streamer import ReplicationStreamer
from synapse_replication.redis.link import RedisReplicationLink
from synapse_replication.redis.options import RedisOptions
from synapse_replication.streams.rows import AttrsRowCodec
from synapse_replication.streams.stream import (
    JsonValue,
    Stream,
    StreamDescription,
    StreamUpdateResult,
)
from synapse_replication.testing.doubles import RecordingCommands
from synapse_replication.testing.servers import PrivateRedis

SERVER_NAME: Final = "hs.example"
WRITER: Final = "writer"
#: The flooded stream, and the steady one.
FLOODED, STEADY = "events", "receipts"
#: The text of each row of the flood, about the size of a row of ``events``.
_TEXT: Final = "x" * 200
_PAGE_ROWS: Final = 500
#: The interval between two rows of the steady stream, in s.
_STEADY_INTERVAL: Final = 0.01
#: The time for which the steady stream is measured alone, in s.
_QUIET: Final = 2.0
#: The delay of the sink for each row during the flood, in s.
_SLOWNESS: Final = 0.005


@attrs.frozen
class Report:
    """The measurements.

    Times are in ms, unless the name ends with ``_in_s``; memory is in MiB.

    :ivar delivered_when_sent: the number of rows of the flood that were delivered when
        the last row arrived.
    :ivar longest_queue: the greatest number of waiting rows.
    :ivar links_lost: the number of times that Redis disconnected the slow reader.
    :ivar caught_up_in_s: the time from the start of the flood to the delivery of its
        last row, in s.
    :ivar in_order: whether each row was delivered once and in order.
    :ivar steady_before: the median and 99th percentile of the steady stream's latency
        before the flood.
    :ivar steady_during: the median and 99th percentile during the flood.
    :ivar memory_before: the resident memory before the flood.
    :ivar memory_peak: the peak of the resident memory.
    """

    rows: int
    sent_in_s: float
    delivered_when_sent: int
    longest_queue: int
    links_lost: int
    caught_up_in_s: float
    in_order: bool
    steady_before: tuple[float, float]
    steady_during: tuple[float, float]
    memory_before: float
    memory_peak: float


@attrs.frozen
class Row:
    """A row with a number and a text."""

    number: int
    text: str


class GeneratedStream:
    """A stream that generates its rows on request, one per token."""

    def __init__(self, name: str) -> None:
        self.description = StreamDescription(name, AttrsRowCodec(name, Row))
        self.position = 0
        self.local_token = 0
        #: The number in the row of token 0; it grows by ``step`` with each token.
        self.base = 0
        self.step = 1

    def current_token(self, instance_name: str) -> int:
        return self.position

    def minimal_local_current_token(self) -> int:
        return self.local_token

    def has_local_updates(self, from_token: int, upto_token: int) -> bool:
        return self.local_token > from_token

    async def get_updates_since(
        self, instance_name: str, from_token: int, upto_token: int
    ) -> StreamUpdateResult:
        end = min(upto_token, from_token + _PAGE_ROWS)
        updates: list[tuple[int, JsonValue]] = [
            (token, [self.base + token * self.step, _TEXT])
            for token in range(from_token + 1, end + 1)
        ]
        return StreamUpdateResult(updates, end, end < upto_token)


class SlowSink:
    """A row sink that delays each row of the flood, while it is slow.

    A row of the steady stream contains the time at which it was due. The reader itself
    generates the rows that it fetches, so the first received row determines their
    times.

    :ivar out_of_order: the number of rows that did not follow their predecessor.
    :ivar steady: the latency in s of each row of the steady stream.
    """

    def __init__(
        self, streams: Mapping[str, GeneratedStream], clock: ReactorClock
    ) -> None:
        self._streams = streams
        self._clock = clock
        self.is_slow = True
        self.handled = self.out_of_order = 0
        self.steady: list[float] = []

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> Awaitable[None] | None:
        stream = self._streams[stream_name]
        if stream_name == STEADY:
            if not stream.base:
                stream.base = rows[0].number - token * stream.step
            self.steady.append(time.monotonic() - rows[0].number / 1e9)
        else:
            self.out_of_order += token != stream.position + 1 or len(rows) != 1
            self.handled += 1
            if self.is_slow:
                return self._deliver_later(stream, token)
        stream.position = token
        return None

    async def _deliver_later(self, stream: GeneratedStream, token: int) -> None:
        await self._clock.sleep(_SLOWNESS)
        stream.position = token

    def on_position(self, stream_name: str, instance_name: str, token: int) -> None:
        self._streams[stream_name].position = token


class QueueObserver(ReplicationObserver):
    """Records the length of the flooded stream's queue, and failures."""

    def __init__(self) -> None:
        self.longest_queue = 0
        self.newest = self.links_lost = 0
        self.failures: list[tuple[str, BaseException]] = []

    def queue_changed(self, stream_name: str, length: int) -> None:
        if stream_name == FLOODED:
            self.longest_queue = max(self.longest_queue, length)

    def position_announced(
        self,
        stream_name: str,
        instance_name: str,
        token: int,
        connection: str,
        by: AnnouncedBy,
    ) -> None:
        if stream_name == FLOODED:
            self.newest = max(self.newest, token)

    @handles(LinkDown)
    def _link_down(self, event: LinkDown) -> None:
        self.links_lost += 1

    @handles(OperationFailed)
    def _operation_failed(self, event: OperationFailed) -> None:
        self.failures.append((event.what, event.error))


@attrs.frozen
class _Streams:
    streams: Mapping[str, GeneratedStream]
    is_writer: bool

    def get_streams(self) -> Mapping[str, Stream]:
        return self.streams

    def get_streams_to_replicate(self) -> Sequence[Stream]:
        return list(self.streams.values()) if self.is_writer else []


class FloodHost:
    """The host of the writer or of the reader."""

    def __init__(self, reactor: Any, name: str) -> None:
        self.observer = QueueObserver()
        self.identity = Identity(SERVER_NAME, name, f"{name}-id")
        self.clock = ReactorClock(reactor)
        by_name = {name: GeneratedStream(name) for name in (FLOODED, STEADY)}
        self.flooded, self.steady = by_name[FLOODED], by_name[STEADY]
        self.steady.step = round(_STEADY_INTERVAL * 1e9)
        self.streams = _Streams(by_name, name == WRITER)
        self.rows = SlowSink(by_name, self.clock)
        self.commands = RecordingCommands()
        self.notifier = WriteNotifier()
        self.run_as_background_process = BackgroundProcesses(self.observer)
        self.stores_user_ips = False


def _connect(
    reactor: Any, host: ReplicationHost, observer: ReplicationObserver, port: int
) -> tuple[ReplicationCommandHandler, RedisReplicationLink]:
    handler = ReplicationCommandHandler(host, observer)
    link = RedisReplicationLink(
        reactor,
        RedisOptions(port=port),
        SERVER_NAME,
        handler,
        observer,
        lambda lost: handler.sender.announce_positions(),
    )
    link.start()
    return handler, link


# -- the reader --------------------------------------------------------------------


# More than 50 lines: the steps of one measurement, in order, with shared state.
async def run_flood(
    reactor: Any, rows: int, rate: int = 0, patience: float = 600.0
) -> Report:
    """Flood a reader in this process.

    :param rows: the number of rows of the flood.
    :param rate: rows per second; 0 for no limit.
    :param patience: the time in s within which the reader must catch up.
    :raises TimeoutError: if the reader does not catch up in time.
    """
    redis = PrivateRedis().start()
    host = FloodHost(reactor, "reader")
    clock, sink, observer = host.clock, host.rows, host.observer
    _, link = _connect(reactor, host, observer, redis.port)
    writer = _WriterProcess()
    deadline = time.monotonic() + patience

    async def wait_for(what: str, condition: Any) -> None:
        while not condition():
            if writer.ended is not None:
                raise RuntimeError(f"the writer ended: {writer.ended}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {patience:g} s")
            await clock.sleep(0.02)

    memory: list[float] = []
    sampling = LoopingCall(lambda: memory.append(_resident()))
    try:
        _settle()
        reactor.spawnProcess(
            writer,
            sys.executable,
            [
                sys.executable,
                "-m",
                "scripts.tools.flood",
                "--writer",
                f"{redis.port}:{rows}:{rate}",
            ],
            env=os.environ,
        )
        await wait_for("steady rows", lambda: len(sink.steady) > 10)
        del sink.steady[:]
        await clock.sleep(_QUIET)
        memory_before = _resident()
        sampling.start(0.01)
        started = time.monotonic()
        before, sink.steady = sink.steady, []
        writer.send("flood")
        await wait_for("the last row", lambda: observer.newest >= rows)
        sent = time.monotonic()
        during = list(sink.steady)
        # Leave the sink slow for a while, to measure the queue of the flood.
        await clock.sleep(_QUIET / 2)
        handled = sink.handled
        links_lost = observer.links_lost
        sink.is_slow = False
        await wait_for("all rows", lambda: host.flooded.position >= rows)
        caught_up = time.monotonic()
    finally:
        if sampling.running:
            sampling.stop()
        await writer.stop()
        await link.stop()
        redis.stop()
    if observer.failures:
        raise observer.failures[0][1]
    return Report(
        rows,
        round(sent - started, 1),
        handled,
        observer.longest_queue,
        links_lost,
        round(caught_up - started, 1),
        sink.handled == rows and not sink.out_of_order,
        _percentiles(before),
        _percentiles(during),
        round(memory_before, 1),
        round(max(memory), 1),
    )


def _settle() -> None:
    """Tune the interpreter as ``app/service_runner.py`` does."""
    gc.collect()
    gc.freeze()


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    cuts = statistics.quantiles([each * 1000 for each in seconds], n=100)
    return round(cuts[49], 2), round(cuts[98], 2)


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


class _WriterProcess(ProcessProtocol):
    """The writer process, controlled by the reader.

    :ivar ended: why the process ended; ``None`` while it runs.
    """

    def __init__(self) -> None:
        self.ended: str | None = None
        self._exited: Deferred[None] = Deferred()
        self._errors = b""

    def send(self, line: str) -> None:
        """Write a line to the standard input of the process."""
        assert self.transport is not None
        self.transport.write(f"{line}\n".encode())

    async def stop(self) -> None:
        """Kill the process, and wait until it has ended."""
        if self.transport is not None and self.ended is None:
            with contextlib.suppress(error.ProcessExitedAlready):
                self.transport.signalProcess("KILL")
            await self._exited

    def errReceived(self, data: bytes) -> None:
        self._errors = (self._errors + data)[-2000:]

    def processEnded(self, reason: Failure) -> None:
        self.ended = (
            f"{reason.getErrorMessage()} {self._errors.decode('utf-8', 'replace')}"
        )
        self._exited.callback(None)


# -- the writer ---------------------------------------------------------------------


async def _write(reactor: Any, port: int, rows: int, rate: int) -> None:
    host = FloodHost(reactor, WRITER)
    handler, _ = _connect(reactor, host, host.observer, port)
    streamer = ReplicationStreamer(host, handler.sender, host.observer)
    streamer.start()

    steady, flooded = host.steady, host.flooded
    _settle()
    steady.base = time.monotonic_ns()

    def write_steady() -> None:
        # Write every row that is due; its time does not depend on when it is written.
        steady.local_token = (time.monotonic_ns() - steady.base) // steady.step
        host.notifier.notify()

    LoopingCall(write_steady).start(_STEADY_INTERVAL)
    await _read_line(reactor)
    begun = time.monotonic()

    def flood() -> None:
        due = round((time.monotonic() - begun) * rate) if rate else rows
        flooded.local_token = min(rows, due)
        host.notifier.notify()

    LoopingCall(flood).start(_STEADY_INTERVAL)
    await Deferred()


async def _read_line(reactor: Any) -> None:
    """Wait for a line on standard input."""
    done: Deferred[None] = Deferred()
    reactor.callInThread(
        lambda: (sys.stdin.readline(), reactor.callFromThread(done.callback, None))
    )
    await done


@click.command()
@click.option("--rows", default=1_000_000, show_default=True, help="Rows of the flood.")
@click.option("--rate", default=0, help="Rows per second; by default unlimited.")
@click.option("--writer", hidden=True, help="Run as the writer: PORT:ROWS:RATE.")
def main(rows: int, rate: int, writer: str | None) -> None:
    """Flood a slow reader with rows; print the measurements as JSON."""

    async def run(reactor: Any) -> None:
        if writer is not None:
            await _write(reactor, *map(int, writer.split(":")))
        report = await run_flood(reactor, rows, rate)
        click.echo(json.dumps(attrs.asdict(report), indent=2))

    react(lambda reactor: Deferred.fromCoroutine(run(reactor)))


if __name__ == "__main__":
    main()

"""A process of a real Synapse for the benchmarks.

It drives public classes of an installed Synapse. Mocks replace the attributes of the
homeserver object that the measures do not use. The path of a row begins and ends at the
same points as on this package's side.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

from side import Counting
from synapse.metrics.background_process_metrics import run_as_background_process
from synapse.replication.tcp.handler import ReplicationCommandHandler
from synapse.util.clock import Clock
from traffic import SERVER_NAME, STREAM, WRITER, timed_row
from twisted.internet.task import LoopingCall, deferLater


class CountingDataHandler:
    """A data handler that counts rows and records positions."""

    def __init__(self, counting: Counting) -> None:
        self._counting = counting
        self.positions: dict[tuple[str, str], int] = {}

    async def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        """Count rows of a stream, and record their token."""
        self.positions[stream_name, instance_name] = token
        self._counting.count(rows)

    async def on_position(
        self, stream_name: str, instance_name: str, token: int
    ) -> None:
        """Record a writer's position."""
        self.positions[stream_name, instance_name] = token
        self._counting.position()


def homeserver(
    reactor: Any, instance_name: str, data_handler: Any, redis_port: int | None = None
) -> Any:
    """Return the homeserver object of a process."""
    hs = MagicMock()
    hs.hostname = SERVER_NAME
    hs.get_instance_name.return_value = instance_name
    hs.get_instance_id.return_value = instance_name
    hs.get_reactor.return_value = reactor
    hs.get_clock.return_value = Clock(reactor, server_name=SERVER_NAME)
    hs.get_replication_data_handler.return_value = data_handler
    presence = hs.get_presence_handler.return_value
    presence.get_currently_syncing_users_for_replication.return_value = []
    hs.config.server.server_name = SERVER_NAME
    hs.config.redis.redis_enabled = redis_port is not None
    hs.config.redis.redis_host = "127.0.0.1"
    hs.config.redis.redis_port = redis_port
    hs.config.redis.redis_path = None
    hs.config.redis.redis_dbid = None
    hs.config.redis.redis_username = None
    hs.config.redis.redis_password = None
    hs.config.redis.redis_use_tls = False
    hs.config.worker.run_background_tasks = False
    hs.config.worker.writers.events = [WRITER]
    hs.config.server.replication_torture_level = None

    def run_in_background(
        description: str, func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        return run_as_background_process(
            description, SERVER_NAME, func, *args, **kwargs
        )

    hs.run_as_background_process = run_in_background
    return hs


class Process:
    """A reader or writer."""

    def __init__(
        self,
        reactor: Any,
        instance_name: str,
        data_handler: Any,
        redis_port: int | None = None,
    ) -> None:
        self._reactor = reactor
        self.hs = homeserver(reactor, instance_name, data_handler, redis_port)
        self.handler = ReplicationCommandHandler(self.hs)
        self.hs.get_replication_command_handler.return_value = self.handler
        self.rows: list[Any] = []
        positions = data_handler.positions
        is_writer = instance_name == WRITER
        for name, stream in self.handler.get_streams().items():

            def current_token(writer: str, name: str = name) -> int:
                if is_writer and name == STREAM:
                    return len(self.rows)
                return int(positions.get((name, writer), 0))

            stream.current_token = current_token
            stream.minimal_local_current_token = lambda current=current_token: current(
                instance_name
            )
            stream.last_token = 0
        self.handler.get_streams()[STREAM].update_function = self._get_updates

    async def _get_updates(
        self, instance_name: str, from_token: int, upto_token: int, limit: int
    ) -> Any:
        if not self.rows:
            raise RuntimeError("a row was missed, which invalidates the measurement")
        end = min(upto_token, from_token + limit)
        updates = [(n + 1, self.rows[n]) for n in range(from_token, end)]
        return updates, end, end < upto_token

    def connect_redis(self, port: int) -> None:
        """Begin to connect to Redis."""
        from synapse.replication.tcp.redis import lazyConnection

        self.hs.get_outbound_redis_connection.return_value = lazyConnection(
            hs=self.hs, host="127.0.0.1", port=port, reconnect=True
        )
        self.handler.start_replication(self.hs)

    async def sleep(self, seconds: float) -> None:
        """Wait for ``seconds`` s."""
        await deferLater(self._reactor, seconds)

    async def stop(self) -> None:
        """Do nothing, because the process ends."""

    async def connected(self) -> None:
        """Wait until this process is connected."""
        while not self.handler.connected():
            await self.sleep(0.01)

    def start_streamer(self) -> None:
        """Create the streamer, which sends written rows."""
        from synapse.replication.tcp.resource import ReplicationStreamer

        self._streamer = ReplicationStreamer(self.hs)

    def write(self, rows: list[Any]) -> None:
        """Write rows, and notify the streamer once."""
        self.rows += rows
        self._streamer.on_notifier_poke()

    def write_at_rate(self, rows: int, rate: int) -> None:
        """Write rows that contain the times of their writes, ``rate`` per second."""
        started = time.monotonic()

        def write_due() -> None:
            due = min(rows, int((time.monotonic() - started) * rate))
            while len(self.rows) < due:
                self.write([timed_row(time.monotonic_ns())])
            if due == rows:
                calls.stop()

        calls = LoopingCall(write_due)
        calls.clock = self._reactor
        calls.start(1 / rate)

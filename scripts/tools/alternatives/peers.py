"""The service on LISTEN/NOTIFY, Redis Streams and JetStream."""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import select
import threading
import time
from collections.abc import Coroutine
from typing import Any, ClassVar

import nats
import nats.errors
import psycopg2
import redis
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from typing_extensions import override

from scripts.tools.alternatives.service import RETRY, Alternative, Received, Row, main

_CHANNEL = "movements"
#: How long a consumer waits for a message, in s.
_WAIT = 1.0
#: How often rows above the horizon are looked for again, in s.
_LOOK_AGAIN = 0.005
_PAGE = 1000
#: The errors of the client of NATS and of its event loop, on each version of Python.
_FAILURES = (
    nats.errors.Error,
    asyncio.TimeoutError,
    concurrent.futures.TimeoutError,
    OSError,
)


class _Listening(Alternative, abc.ABC):
    """A consumer that is woken by NOTIFY.

    NOTIFY is part of the transaction: it is sent if, and when, the row is committed.
    """

    @override
    def in_transaction(self, cursor: Any, row: Row) -> None:
        cursor.execute("SELECT pg_notify(%s, %s)", (_CHANNEL, row.encode()))

    @override
    def consume(self, received: Received) -> None:
        try:
            connection = psycopg2.connect(self.dsn)
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(f"LISTEN {_CHANNEL}")
                # Catch up: what was notified before is not repeated.
                self.notified(cursor, received, [])
                while True:
                    select.select([connection], [], [], _WAIT)
                    connection.poll()
                    payloads = [each.payload for each in connection.notifies]
                    connection.notifies.clear()
                    self.notified(cursor, received, payloads)
        except psycopg2.Error:
            return

    @abc.abstractmethod
    def notified(self, cursor: Any, received: Received, payloads: list[str]) -> None:
        """Receive the rows of notifications, or, of none, those written before."""


class Payload(_Listening):
    """The row is in the notification."""

    title = "LISTEN/NOTIFY, rows in the payload"

    @override
    def notified(self, cursor: Any, received: Received, payloads: list[str]) -> None:
        if payloads:
            received.add(map(Row.decode, payloads), None)


class ById(_Listening):
    """A notification wakes the consumer, which reads the rows after its last id."""

    title = "LISTEN/NOTIFY, rows after the last id"

    @override
    def notified(self, cursor: Any, received: Received, payloads: list[str]) -> None:
        while True:
            cursor.execute(
                "SELECT stream_id, instance_name, item FROM movements "
                "WHERE stream_id > %s ORDER BY stream_id LIMIT %s",
                (received.position or 0, _PAGE),
            )
            rows = [Row(*each) for each in cursor.fetchall()]
            if not rows:
                return
            received.add(rows, rows[-1].token)


class ByHorizon(_Listening):
    """As :class:`ById`, but in the order of transactions that have all ended.

    Every row has the id of its transaction. Rows are read up to the oldest transaction
    of the database that is still open, so no row can appear among them later.
    """

    title = "LISTEN/NOTIFY, rows below the oldest open transaction"

    @override
    def notified(self, cursor: Any, received: Received, payloads: list[str]) -> None:
        while True:
            xid, token = received.position or ("0", 0)
            cursor.execute(
                "SELECT stream_id, instance_name, item, xid FROM movements "
                "WHERE (xid, stream_id) > (%s::xid8, %s) "
                "AND xid < pg_snapshot_xmin(pg_current_snapshot()) "
                "ORDER BY xid, stream_id LIMIT %s",
                (xid, token, _PAGE),
            )
            found = cursor.fetchall()
            if found:
                position = [found[-1][3], found[-1][0]]
                received.add([Row(*each[:3]) for each in found], position)
                continue
            cursor.execute(
                "SELECT 1 FROM movements "
                "WHERE (xid, stream_id) > (%s::xid8, %s) LIMIT 1",
                (xid, token),
            )
            if not cursor.fetchone():
                return
            time.sleep(_LOOK_AGAIN)


class Streams(Alternative):
    """A row is added to a stream of Redis after its commit.

    The consumer keeps the id of its last entry with the rows, so it receives no entry
    twice and misses none.
    """

    title = "Redis Streams, XADD after the commit"

    def __init__(self, dsn: str, port: int) -> None:
        super().__init__(dsn, port)
        self._redis = redis.Redis(port=port, socket_timeout=10, decode_responses=True)

    @override
    def after_commit(self, row: Row) -> None:
        while True:
            try:
                self._redis.xadd(_CHANNEL, {"row": row.encode()})
            except redis.RedisError:
                time.sleep(RETRY)
            else:
                return

    @override
    def consume(self, received: Received) -> None:
        try:
            while True:
                found: Any = self._redis.xread(
                    {_CHANNEL: received.position or "0"}, count=_PAGE, block=1000
                )
                for _, entries in found:
                    rows = [Row.decode(each["row"]) for _, each in entries]
                    received.add(rows, entries[-1][0])
        except redis.RedisError:
            return


class JetStream(Alternative):
    """A row is published to JetStream after its commit.

    Each message has an id, so a repeated publish is discarded by the server.
    """

    title = "JetStream, publish after the commit"
    _SUBJECT: ClassVar = "movements.row"

    def __init__(self, dsn: str, port: int) -> None:
        super().__init__(dsn, port)
        self._loop = asyncio.new_event_loop()
        self._connected: Any = None
        self._lock = threading.Lock()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def _run(self, coroutine: Coroutine[Any, Any, Any], timeout: float = 10.0) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def _connect(self) -> Any:
        with self._lock:
            if self._connected is None:
                self._connected = self._run(
                    nats.connect(
                        f"nats://127.0.0.1:{self.port}",
                        max_reconnect_attempts=-1,
                        reconnect_time_wait=RETRY,
                        ping_interval=2,
                        error_cb=_ignore,
                    )
                ).jetstream()
        return self._connected

    @override
    def after_commit(self, row: Row) -> None:
        data, headers = row.encode().encode(), {"Nats-Msg-Id": str(row.token)}
        while True:
            try:
                stream = self._connect()
                self._run(stream.publish(self._SUBJECT, data, headers=headers))
            except _FAILURES:
                time.sleep(RETRY)
            else:
                return

    @override
    def consume(self, received: Received) -> None:
        self._run(self._consume(received), timeout=1e9)

    async def _consume(self, received: Received) -> None:
        try:
            client = await nats.connect(
                f"nats://127.0.0.1:{self.port}", allow_reconnect=False, ping_interval=2
            )
        except _FAILURES:
            return
        try:
            subscription = await client.jetstream().pull_subscribe(
                self._SUBJECT,
                stream=_CHANNEL,
                config=ConsumerConfig(
                    deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                    opt_start_seq=(received.position or 0) + 1,
                    ack_policy=AckPolicy.NONE,
                    inactive_threshold=60,
                ),
            )
            while client.is_connected:
                try:
                    messages = await subscription.fetch(_PAGE, timeout=_WAIT)
                except (nats.errors.TimeoutError, asyncio.TimeoutError):
                    continue
                if not messages:
                    continue
                rows = [Row.decode(each.data) for each in messages]
                received.add(rows, messages[-1].metadata.sequence.stream)
        except _FAILURES:
            return
        finally:
            await client.close()

    def create_stream(self) -> None:
        """Create the stream, on disk."""
        self._run(self._connect().add_stream(name=_CHANNEL, subjects=["movements.*"]))


async def _ignore(error: Exception) -> None:
    """Let the client reconnect."""


ALTERNATIVES: dict[str, type[Alternative]] = {
    "payload": Payload,
    "id": ById,
    "horizon": ByHorizon,
    "streams": Streams,
    "jetstream": JetStream,
}

if __name__ == "__main__":
    main(ALTERNATIVES)

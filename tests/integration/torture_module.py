"""Modules of the torture test: writers, and readers that check positions.

A writer allocates ids in concurrent blocks of ``get_next_mult``, and commits, rolls
back or cancels each block at random. A reader writes rows to a journal, and whenever
its persisted-up-to advances, counts the rows below it in the database: a row that is
committed later below that token is an error.
"""

from __future__ import annotations

import importlib
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import psycopg2
from twisted.application.internet import TimerService
from twisted.application.service import MultiService
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.logger import Logger

from synapse_replication.app.journal import JournalSink
from synapse_replication.errors import ReplicationError
from synapse_replication.storage.database import Database
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.storage.sequences import load_positions
from synapse_replication.storage.transactions import Transaction, connect
from synapse_replication.streams.id_column import IdColumn

_log = Logger()

#: Interval in s between a reader's queries.
_COUNT_SECONDS = 0.02

NOTES = IdStream(
    stream_name="notes",
    sequence="notes_seq",
    tables=(IdColumn("notes", "stream_id", "instance_name"),),
    writers=("writer1", "writer2", "writer3", "writer4"),
)


class CheckingSink(JournalSink):
    """A journal that tracks persisted-up-to and counts the rows below it.

    :param counts: a file: a line ``[from, upto, rows between]`` for each query.
    """

    def __init__(self, host: Any, config: Mapping[str, Any]) -> None:
        super().__init__(Path(config["path"]), host.row_to_json)
        self._dsn = config["dsn"]
        # Open for the lifetime of the process.
        self._counts = Path(config["counts"]).open("a", buffering=1)  # noqa: SIM115
        self._connection = connect(self._dsn)
        self._connection.autocommit = True
        with self._connection.cursor() as cursor:
            self._known = load_positions(cursor, NOTES, host.identity.instance_name)
        self._counted_upto = self._known.persisted_upto
        self._counted_at = 0.0

    def on_rdata(
        self, stream_name: str, instance_name: str, token: int, rows: list[Any]
    ) -> None:
        """Write the rows to the journal, and count."""
        super().on_rdata(stream_name, instance_name, token, rows)
        self._advance(instance_name, token)

    def on_position(self, stream_name: str, instance_name: str, token: int) -> None:
        """Write the position to the journal, and count."""
        super().on_position(stream_name, instance_name, token)
        self._advance(instance_name, token)

    def _advance(self, instance_name: str, token: int) -> None:
        self._known.advance(instance_name, token)
        if time.monotonic() - self._counted_at > _COUNT_SECONDS:
            self.count_rows()

    @property
    def persisted_upto(self) -> int:
        """The position up to which all ids count as complete."""
        return self._known.persisted_upto

    def count_rows(self) -> None:
        """Count the committed rows up to persisted-up-to."""
        upto = self._known.persisted_upto
        if upto <= self._counted_upto:
            return
        try:
            if self._connection.closed:
                self._connection = connect(self._dsn)
                self._connection.autocommit = True
            with self._connection.cursor() as cursor:
                cursor.execute(
                    "SELECT count(*) FROM notes WHERE stream_id > %s "
                    "AND stream_id <= %s",
                    (self._counted_upto, upto),
                )
                row = cursor.fetchone()
        except psycopg2.Error as error:
            # The server was killed; a later query covers the whole range.
            _log.info("cannot count: {error}", error=str(error).strip())
            return
        assert row is not None
        self._counts.write(json.dumps([self._counted_upto, upto, row[0]]) + "\n")
        self._counted_upto = upto
        self._counted_at = time.monotonic()


_sinks: list[CheckingSink] = []


def make_sink(host: Any, config: Mapping[str, Any]) -> CheckingSink:
    """Return a reader's sink, configured with ``path``, ``counts`` and ``dsn``."""
    _sinks.append(CheckingSink(host, config))
    return _sinks[-1]


def _write_status(path: Path, status: Mapping[str, object]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(status))
    new.rename(path)


def make_reader_status(host: Any, config: Mapping[str, Any]) -> TimerService:
    """
    Return a service that writes a reader's position to ``status`` and counts rows.
    """
    path = Path(config["status"])

    def update() -> None:
        for sink in _sinks:
            sink.count_rows()
            _write_status(path, {"persisted_upto": sink.persisted_upto})

    return TimerService(0.1, update)


class Writer(MultiService):
    """Allocates ids in blocks at random until a stop file exists.

    :param config: ``dsn``, ``concurrency``, ``seed``, ``stop`` and ``status``
        (files), ``allocated`` (a file: the ids that were allocated).
    """

    def __init__(self, host: Any, config: Mapping[str, Any]) -> None:
        super().__init__()
        self._stream = host.streams.get_streams()["notes"]
        # Use the generator itself: the stream's write() neither fails nor waits.
        self._ids = self._stream._ids._own
        self._name = host.identity.instance_name
        self._config = config
        self._random = random.Random(config["seed"])
        self._stop = Path(config["stop"])
        self._allocated = Path(config["allocated"]).open("a", buffering=1)  # noqa: SIM115
        self._open = 0
        self._running = 0
        timer = TimerService(0.1, self._write_status)
        timer.setServiceParent(self)

    def startService(self) -> None:
        self._reactor = cast(Any, importlib.import_module("twisted.internet.reactor"))
        self._database = Database(self._config["dsn"], self._reactor, max_connections=8)
        for _ in range(self._config["concurrency"]):
            self._running += 1
            Deferred.fromCoroutine(self._loop()).addErrback(
                lambda failure: _log.failure("a loop ended", failure)
            )
        super().startService()

    async def stopService(self) -> None:
        await super().stopService()
        await self._database.close()

    def _write_status(self) -> None:
        _write_status(
            Path(self._config["status"]),
            {
                "running": self._running,
                "open": self._open,
                "persisted_upto": self._ids.get_current_token(),
                "announced": self._ids.get_current_token_for_writer(self._name),
                "local": self._ids.get_minimal_local_current_token(),
            },
        )

    async def _loop(self) -> None:
        while not self._stop.exists():
            await self._sleep(0.3)
            block = Deferred.fromCoroutine(self._block())
            if self._random.random() < 0.2:
                self._reactor.callLater(self._random.random() * 0.3, block.cancel)
            try:
                await block
            except (
                *(CancelledError, RuntimeError, psycopg2.Error),
                # The outcome of a commit is not known yet, for instance.
                ReplicationError,
            ) as error:
                _log.debug("block: {error}", error=error)
        self._running -= 1

    def _sleep(self, most: float) -> Deferred[None]:
        return deferLater(self._reactor, self._random.random() * most)

    async def _block(self) -> None:
        kind = self._random.random()
        if kind < 0.2:
            await self._database.transact("insert", self._insert_with_new_id)
            return
        count = self._random.choice((1, 1, 1, 3))
        async with self._ids.get_next_mult(count) as ids:
            self._open += 1
            try:
                self._allocated.write("".join(f"{id_}\n" for id_ in ids))
                await self._sleep(0.3)
                if kind < 0.35:
                    raise RuntimeError("rolled back before anything was done")
                await self._database.transact(
                    "insert", lambda txn: self._insert(txn, ids, fail=kind < 0.5)
                )
            finally:
                self._open -= 1

    def _insert_with_new_id(self, txn: Transaction) -> None:
        id_ = self._ids.get_next_txn(txn)
        self._allocated.write(f"{id_}\n")
        self._insert(txn, [id_], fail=id_ % 5 == 0)

    def _insert(self, txn: Transaction, ids: list[int], fail: bool) -> None:
        for id_ in ids:
            for part in range(id_ % 3 + 1):
                txn.execute(
                    "INSERT INTO notes VALUES (%s, %s, 'note', %s)",
                    (id_, self._name, part),
                )
        if fail:
            raise RuntimeError("rolled back")


def make_writer(host: Any, config: Mapping[str, Any]) -> Writer:
    """Return the service of a writing process."""
    return Writer(host, config)

"""Doubles for the database, and fixtures for tests on a real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs
import psycopg2.extensions
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock, deferLater
from twisted.python.failure import Failure

from synapse_replication.handlers.interfaces import DelayedCall
from synapse_replication.storage import queries
from synapse_replication.storage.id_streams import IdStream
from synapse_replication.storage.lost_answers import LostAnswer
from synapse_replication.storage.transactions import connect
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.testing.servers import shared_postgres

T = TypeVar("T")


class FakeReactor(Clock):
    """A clock whose calls from threads wait for :meth:`run_thread_calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.from_threads: list[Callable[[], object]] = []

    def callFromThread(self, func: Callable[..., object], *args: object) -> None:
        self.from_threads.append(lambda: func(*args))

    def run_thread_calls(self) -> None:
        """Run the calls that other threads requested."""
        calls, self.from_threads = self.from_threads, []
        for call in calls:
            call()

    def time_msec(self) -> int:
        return int(self.seconds() * 1000)

    def call_later(
        self, delay: float, func: Callable[..., object], *args: object
    ) -> DelayedCall:
        return self.callLater(delay, func, *args)

    async def sleep(self, delay: float) -> None:
        await deferLater(self, delay)


class FakeCursor:
    """A cursor over one sequence and ``stream_positions``."""

    def __init__(self, database: SteppedDatabase) -> None:
        self._database = database
        self._rows: list[tuple[Any, ...]] = []
        self.after: list[Callable[[], object]] = []
        self.on_exception: list[Callable[[], object]] = []

    def execute(self, sql: str, parameters: Mapping[str, Any] = {}) -> None:
        if sql == queries.SQL["next_ids"]:
            self._rows = [
                (self._database.nextval(),) for _ in range(parameters["count"])
            ]
        elif sql == queries.SQL["txn_ids"]:
            self._rows = [
                (self._database.nextval(), "1") for _ in range(parameters["count"])
            ]
        elif sql == queries.SQL["skip_ids"]:
            self._database.sequence += parameters["count"]
            self._rows = [(self._database.sequence,)]
        elif "last_value" in sql:
            self._rows = [(self._database.sequence, True)]
        else:
            assert "INSERT INTO stream_positions" in sql
            self._database.persisted.append(parameters["stream_id"])

    def fetchall(self) -> list[tuple[Any, ...]]:
        return self._rows

    def fetchone(self) -> tuple[Any, ...]:
        return self._rows[0]

    def call_after(self, func: Callable[..., object], *args: object) -> None:
        self.after.append(lambda: func(*args))

    def call_on_exception(self, func: Callable[..., object], *args: object) -> None:
        self.on_exception.append(lambda: func(*args))


@attrs.define
class Step:
    """A requested transaction, which a test first runs and then answers."""

    description: str
    func: Callable[[Any], Any]
    result: Deferred[Any]
    outcome: Any = None


class SteppedDatabase:
    """Runs each transaction, and reports its outcome, only when a test requests it.

    :ivar sequence: the last value of the one sequence.
    :ivar persisted: the positions that were upserted.
    :ivar failing: the next transactions fail.
    """

    def __init__(self, sequence: int = 7) -> None:
        self.sequence = sequence
        self.persisted: list[int] = []
        self.failing = False
        self.waiting: list[Step] = []
        self.run_already: list[Step] = []
        self.descriptions: list[str] = []

    def nextval(self) -> int:
        self.sequence += 1
        return self.sequence

    def transact(
        self, description: str, func: Callable[[Any], T], *, autocommit: bool = False
    ) -> Deferred[T]:
        step = Step(description, func, Deferred())
        self.waiting.append(step)
        self.descriptions.append(description)
        return step.result

    def mark(self) -> int:
        return 0

    def settled(self, since: int = 0, *, only_lost: bool = False) -> Deferred[None]:
        """Return a Deferred that has fired: a test ends transactions itself."""
        return succeed(None)

    def lost_answers(self) -> list[LostAnswer]:
        return []

    def run(self) -> None:
        """Run the oldest transaction without reporting its outcome."""
        step = self.waiting.pop(0)
        try:
            if self.failing:
                raise psycopg2.OperationalError("the server is gone")
            step.outcome = step.func(FakeCursor(self))
        except psycopg2.Error:
            step.outcome = Failure()
        self.run_already.append(step)

    def answer(self) -> None:
        """Report the outcome of the transaction that was run first."""
        step = self.run_already.pop(0)
        step.result.callback(step.outcome)

    def settle(self) -> None:
        """Run and answer transactions until none is left."""
        while self.waiting or self.run_already:
            if self.waiting:
                self.run()
            self.answer()


#: The schema of a test's database, with the sequence as Synapse creates it.
SCHEMA = """
    CREATE TABLE stream_positions (
        stream_name text NOT NULL,
        instance_name text NOT NULL,
        stream_id bigint NOT NULL
    );
    CREATE UNIQUE INDEX stream_positions_idx
        ON stream_positions (stream_name, instance_name);
    CREATE TABLE foobar (
        stream_id bigint NOT NULL, instance_name text NOT NULL, data text
    );
    CREATE INDEX foobar_id ON foobar (stream_id);
    CREATE SEQUENCE foobar_seq;
"""


class PostgresMixin:
    """Gives a test a database of its own with one stream, ``foobar``."""

    dsn: str
    connection: psycopg2.extensions.connection

    def make_database(self) -> None:
        self.dsn = shared_postgres().new_database()
        self.connection = connect(self.dsn)
        self.connection.autocommit = True
        self.sql(SCHEMA)

    def sql(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Run a statement in a transaction of its own."""
        with self.connection.cursor() as cursor:
            cursor.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def write_rows(self, writer: str, *ids: int) -> None:
        """Insert committed rows into the table without changing the sequence."""
        for id_ in ids:
            self.sql("INSERT INTO foobar VALUES (%s, %s)", id_, writer)

    def set_sequence(self, value: int) -> None:
        self.sql("SELECT setval('foobar_seq', %s)", value)

    def store(self, **positions: int) -> None:
        for writer, position in positions.items():
            self.sql(
                "INSERT INTO stream_positions VALUES ('foobar', %s, %s)",
                writer,
                position,
            )

    def stored(self) -> dict[str, int]:
        return dict(
            self.sql(
                "SELECT instance_name, stream_id FROM stream_positions "
                "WHERE stream_name = 'foobar'"
            )
        )


FOOBAR = IdStream(
    stream_name="foobar",
    sequence="foobar_seq",
    tables=(IdColumn("foobar", "stream_id", "instance_name"),),
    writers=("first", "second"),
)


class ExplainingCursor:
    """A cursor that records the plan of each statement that reads rows.

    :param verbs: how such statements begin.
    """

    def __init__(self, cursor: Any, *verbs: str) -> None:
        self._cursor = cursor
        self._verbs = verbs or ("SELECT",)
        self.plans: list[str] = []

    def execute(self, sql: str, parameters: Mapping[str, Any] | None = None) -> None:
        if sql.lstrip().startswith(self._verbs) and "pg_" not in sql:
            self._cursor.execute("EXPLAIN " + sql, parameters)
            self.plans.append("\n".join(line for (line,) in self._cursor.fetchall()))
        self._cursor.execute(sql, parameters)

    def fetchall(self) -> list[tuple[Any, ...]]:
        return list(self._cursor.fetchall())

    def fetchone(self) -> tuple[Any, ...]:
        row: tuple[Any, ...] = self._cursor.fetchone()
        return row

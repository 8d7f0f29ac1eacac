"""Tests for the database double: sequences, visibility, retries, faults."""

from __future__ import annotations

from random import Random
from typing import Any

import psycopg2
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import CommitUnknownError
from synapse_replication.storage import queries
from synapse_replication.storage.database import OUTCOME_WAIT
from synapse_replication.storage.row_queries import insert_sql
from tests.simulation.clock import SimulatedClock
from tests.simulation.database import (
    MAX_LATE_SECONDS,
    MAX_ORPHANED_SECONDS,
    DatabaseClient,
    SimulatedDatabase,
)
from tests.simulation.network import SimulatedNetwork
from tests.simulation.reactor import ProcessReactor
from tests.simulation.topology import TABLES

_EVENTS = TABLES[0]


class SimulatedDatabaseTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = SimulatedClock()
        self.committed: list[tuple[str, str, int]] = []
        self.database = SimulatedDatabase(
            self.clock,
            Random(1),
            TABLES,
            lambda stream, writer, id_, rows: self.committed.append(
                (stream, writer, id_)
            ),
        )
        network = SimulatedNetwork(self.clock, Random(1))
        self.reactor = ProcessReactor(self.clock, network, "w")
        self.client = DatabaseClient(self.database, self.reactor)

    def query(self, statement: str, **params: object) -> list[tuple[Any, ...]]:
        def run(txn: Any) -> list[tuple[Any, ...]]:
            txn.execute(statement, params)
            return list(txn.fetchall())

        result = self.client.transact("query", run, autocommit=True)
        self.clock.run_until(self.clock.seconds() + 1)
        return self.successResultOf(result)

    def test_writers_of_rows(self) -> None:
        """Writers are found by rows above an id and by name."""
        for id_ in (5, 7):
            self.insert(id_)
        self.settle()
        (column,) = _EVENTS.id_columns
        statement = queries.for_table("writers_beyond", column)
        self.assertEqual(self.query(statement, low=5, limit=9), [("w", 7, 1)])
        self.assertEqual(self.query(statement, low=1, limit=1), [("w", 5, 1)])
        self.assertEqual(
            self.query(queries.for_table("writers_of_table", column)), [("w",)]
        )
        statement = queries.for_table("greatest_ids_of_writers", column)
        self.assertEqual(
            self.query(statement, writers=["v", "w"]), [("v", None), ("w", 7)]
        )

    def test_open_transactions(self) -> None:
        """A transaction that has inserted is open until it ends."""
        open_before_commit: list[int] = []
        self.database.point = lambda point, process: open_before_commit.append(
            len(self.database.open_transactions)
        )
        self.insert(5)
        self.settle()
        self.assertEqual(open_before_commit[0], 1)
        self.assertEqual(self.committed, [("events", "w", 5)])
        statement = queries.SQL["inserting_transactions"]
        self.assertEqual(self.query(statement, tables=['"events"']), [])
        self.database.open_transactions[7] = {"events"}
        self.assertEqual(self.query(statement, tables=['"events"']), [("7",)])
        self.assertEqual(self.query(statement, tables=['"receipts"']), [])

    def next_ids(self, count: int = 1) -> list[int]:
        def run(txn: Any) -> list[int]:
            txn.execute(
                queries.SQL["next_ids"], {"sequence": '"events_seq"', "count": count}
            )
            return [id_ for (id_,) in txn.fetchall()]

        taken = self.client.transact("get_next_ids", run, autocommit=True)
        self.clock.run_until(self.clock.seconds() + 1)
        return self.successResultOf(taken)

    def insert(self, id_: int) -> Any:
        def run(txn: Any) -> None:
            txn.execute(
                insert_sql(_EVENTS.id_columns[0], _EVENTS.column_names),
                {"id": id_, "instance_name": "w", "rows": '[{"row_id":1,"key":"k"}]'},
            )

        return self.client.transact("insert", run)

    def settle(self) -> None:
        self.clock.run_until(self.clock.seconds() + 1)

    def test_ids_are_not_rolled_back(self) -> None:
        """Ids increase even if a transaction that allocated ids fails."""
        self.assertEqual(self.next_ids(2), [2, 3])

        def run(txn: Any) -> None:
            txn.execute(
                queries.SQL["next_ids"], {"sequence": '"events_seq"', "count": 1}
            )
            raise ZeroDivisionError

        failed = self.client.transact("fail", run)
        self.settle()
        self.failureResultOf(failed, ZeroDivisionError)
        self.assertEqual(self.next_ids(), [5])

    def test_commit(self) -> None:
        """Rows are visible from the commit on, which precedes its reply."""
        done = self.insert(2)
        self.assertEqual(self.committed, [])
        self.settle()
        self.successResultOf(done)
        self.assertEqual(self.committed, [("events", "w", 2)])

    def test_id_is_used(self) -> None:
        """An id that another transaction used is rejected."""
        self.insert(2)
        self.settle()
        again = self.insert(2)
        self.settle()
        self.failureResultOf(again, psycopg2.IntegrityError)

    def test_down(self) -> None:
        """Transactions that are open when the server stops are never committed."""
        done = self.insert(2)
        self.database.point = lambda point, name: self.database.stop()
        self.settle()
        self.failureResultOf(done, psycopg2.OperationalError)
        done = self.insert(3)
        self.settle()
        self.failureResultOf(done, psycopg2.OperationalError)
        self.assertEqual(self.committed, [])

    def test_lost_answer(self) -> None:
        """A commit whose reply is lost is completed later, and only then settled."""
        self.database.lost_answer_chance = 1.0
        self.database.random = Random(1)
        early = self.insert(2)
        self.clock.run_until(OUTCOME_WAIT)
        self.successResultOf(early)
        self.database.random = Random(5)
        late = self.insert(3)
        self.clock.run_until(2 * OUTCOME_WAIT + 0.1)
        self.failureResultOf(late, CommitUnknownError)
        self.assertEqual(self.committed, [("events", "w", 2)])
        self.successResultOf(self.client.settled(self.client.mark()))
        settled = self.client.settled(only_lost=True)
        self.assertNoResult(settled)
        self.clock.run_until(2 * OUTCOME_WAIT + MAX_LATE_SECONDS)
        self.successResultOf(settled)
        self.assertEqual(len(self.committed), 2)

    def test_repeated(self) -> None:
        """
        A transaction with serialization failures is retried, and fails in the end.
        """
        self.database.retry_chance = 1.0
        done = self.insert(2)
        self.settle()
        self.failureResultOf(done, psycopg2.errors.SerializationFailure)
        self.assertEqual(self.committed, [])

    def test_behind(self) -> None:
        """A sequence falls behind, and can be moved forward."""
        self.next_ids(40)
        self.database.fall_behind(32)
        self.assertEqual(self.next_ids(), [10])
        self.database.set_sequence("events_seq", 50)
        self.assertEqual(self.next_ids(), [51])

    def test_dead(self) -> None:
        """A killed process gets no reply."""
        done = self.insert(2)
        self.reactor.kill()
        self.settle()
        self.assertNoResult(done)
        self.assertEqual(self.committed, [])

    def test_killed_during_a_commit(self) -> None:
        """The server may complete a commit after its process was killed."""
        self.database.point = lambda point, name: self.reactor.kill()
        self.database.random = Random(3)
        self.insert(2)
        self.clock.run_until(0.1)
        self.assertEqual(len(self.database.open_transactions), 1)
        self.clock.run_until(1 + MAX_ORPHANED_SECONDS)
        self.assertEqual(self.database.open_transactions, {})
        self.assertEqual(self.committed, [("events", "w", 2)])

    def test_unknown_statement(self) -> None:
        """A statement that the double does not support is an error."""
        done = self.client.transact("x", lambda txn: txn.execute("SELECT 1"))
        self.settle()
        self.failureResultOf(done, AssertionError)

"""Tests for :mod:`synapse_replication.pipeline.audit.facts`, on a real database."""

from __future__ import annotations

import contextlib
import json

import psycopg2
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.audit.facts import AuditedStream, read_facts
from synapse_replication.pipeline.audit.findings import AuditFinding
from synapse_replication.pipeline.settings import PipelineSettings
from synapse_replication.storage.schema import DELTAS
from synapse_replication.streams.table import TableStream
from synapse_replication.testing.servers import shared_postgres
from tests.pipeline.audits import Found, found

_SCHEMA = """
CREATE TABLE orders (id bigint NOT NULL PRIMARY KEY, item text);
CREATE SEQUENCE orders_seq;
SELECT setval('orders_seq', 20);
INSERT INTO orders VALUES (-3), (-9);
"""

ORDERS = TableStream(
    name="orders",
    table="orders",
    id_column="id",
    writer_column=None,
    columns=["item"],
    sequence="orders_seq",
    writers=["a"],
    negative=True,
)


def _fields(finding: AuditFinding) -> Found:
    (fields,) = found([finding])
    return fields


class FactsTests(SynchronousTestCase):
    """Tests with a database of one stream, whose table does not record the writer."""

    def setUp(self) -> None:
        self.dsn = shared_postgres().new_database()
        self.sql(*DELTAS, _SCHEMA)
        conninfo = PipelineSettings.of_dsn(self.dsn).conninfo
        self.settings = PipelineSettings(conninfo, {"orders": ("a",)}, (ORDERS,))

    def sql(self, *statements: str) -> None:
        with (
            contextlib.closing(psycopg2.connect(self.dsn)) as connection,
            connection,
            connection.cursor() as cursor,
        ):
            for statement in statements:
                cursor.execute(statement)

    def streams(self) -> dict[str, AuditedStream]:
        streams, _ = read_facts(self.settings)
        return streams

    def findings(self) -> list[AuditFinding]:
        _, findings = read_facts(self.settings)
        return findings

    def test_facts(self) -> None:
        """
        A stream has its properties; a stream without a sequence is not persisted.
        """
        self.sql("INSERT INTO stream_positions VALUES ('orders', 'a', -25)")
        streams = self.streams()
        orders = AuditedStream(
            stream="orders",
            persisted=True,
            in_memory=False,
            idempotent=False,
            tables=("orders",),
            last_allocated=20,
            nameless=True,
            reach=25,
            writers=frozenset({"a"}),
        )
        self.assertEqual(streams["orders"], orders)
        self.assertEqual([n for n, s in streams.items() if s.persisted], ["orders"])
        self.assertTrue(streams["typing"].in_memory)
        self.assertTrue(streams["caches"].idempotent)

    def test_healthy(self) -> None:
        """If positions and sequence are consistent, there is no finding."""
        self.sql("INSERT INTO stream_positions VALUES ('orders', 'a', -9)")
        self.assertEqual(self.findings(), [])

    def test_sequence_behind(self) -> None:
        """
        A sequence that would allocate ids again is reported with these ids and its
        value.
        """
        self.sql("SELECT setval('orders_seq', 5)")
        (finding,) = self.findings()
        self.assertEqual(
            _fields(finding), ("sequence_behind", "error", "orders", None, 6, 9, 4)
        )
        self.assertTrue(finding.message.startswith("orders: "), finding.message)
        self.assertEqual(json.loads(finding.evidence)["sequence_value"], 5)

    def test_position_ahead(self) -> None:
        """A position ahead of the sequence is reported with the ids between them."""
        self.sql("INSERT INTO stream_positions VALUES ('orders', 'a', -25)")
        (finding,) = self.findings()
        self.assertEqual(
            _fields(finding), ("position_ahead", "error", "orders", "a", 21, 25, 5)
        )

    def test_unknown_writer(self) -> None:
        """
        For an instance with a position that is not a writer, only the position is
        reported.
        """
        self.sql("INSERT INTO stream_positions VALUES ('orders', 'b', -7)")
        (finding,) = self.findings()
        self.assertEqual(
            _fields(finding), ("unknown_writer", "warning", "orders", "b", 7, 7, 1)
        )
        self.assertEqual(json.loads(finding.evidence)["stored"], {"b": -7})

    def test_undeclared_writers(self) -> None:
        """Stored positions of a stream that every instance may write are ignored."""
        self.sql(
            "CREATE SEQUENCE cache_invalidation_stream_seq",
            "INSERT INTO stream_positions VALUES ('caches', 'a', 25)",
        )
        self.assertEqual(self.findings(), [])
        self.assertEqual(self.streams()["caches"].writers, frozenset())

    def test_without_positions(self) -> None:
        """A missing table of positions is reported once, for no particular stream."""
        self.sql("DROP TABLE stream_positions")
        (finding,) = self.findings()
        self.assertEqual(_fields(finding)[:3], ("positions_missing", "error", None))

"""Test a row sink with the doubles of the test kit."""

from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.api import ReplicationCommandHandler, ReplicationDataHandler
from synapse_replication.testing import doubles


@attrs.frozen
class OrderRow:
    order_id: str


class CollectingSink:
    def __init__(self) -> None:
        self.order_ids: list[str] = []

    def on_rdata(self, stream: str, writer: str, token: int, rows: list[Any]) -> None:
        self.order_ids += [row.order_id for row in rows]

    def on_position(self, stream: str, writer: str, token: int) -> None:
        pass


class CollectingSinkTests(SynchronousTestCase):
    def test_rows_after_position(self) -> None:
        host: Any = doubles.MemoryHost(doubles.SourceStream("orders", OrderRow))
        sink = CollectingSink()
        streams = host.streams.get_streams()
        host.rows = ReplicationDataHandler(streams, sink, host.clock)
        handler = ReplicationCommandHandler(host, host.observer)
        connection = doubles.MemoryConnection()
        handler.new_connection(connection)

        doubles.receive_lines(
            handler,
            connection,
            "POSITION orders writer1 0 0",
            'RDATA orders writer1 batch ["o1"]',
            'RDATA orders writer1 1 ["o2"]',
        )

        self.assertEqual(sink.order_ids, ["o1", "o2"])

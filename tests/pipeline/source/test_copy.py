"""Tests for :mod:`synapse_replication.pipeline.source.copy`, with a real database."""

from __future__ import annotations

import functools

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.source import copy as copying
from synapse_replication.pipeline.source.copy import copy_batches
from synapse_replication.pipeline.source.database import PLAN_TIMEOUT, reading
from synapse_replication.testing.servers import shared_postgres


@functools.cache
def dsn() -> str:
    """Make an empty database, once for all tests."""
    return shared_postgres().new_database()


def tokens(row: str, last: int) -> list[int]:
    """Read such rows; give their tokens alone."""
    sql = (
        f"SELECT 'w', id::bigint, 0, {row}, NULL FROM generate_series(1, {last}) AS id"
    )
    with reading({"dsn": dsn()}, PLAN_TIMEOUT) as txn:
        return [
            token
            for batch in copy_batches(txn, sql, "orders")
            for token in batch.column("stream_id").to_pylist()
        ]


class CopyBatchesTests(SynchronousTestCase):
    """Tests for rows on their way from the server to Arrow."""

    def test_nothing(self) -> None:
        """A query without rows gives no batch."""
        self.assertEqual(tokens("'[]'", 0), [])

    def test_any_text(self) -> None:
        """A row has the text that the server gave, whatever stands in it."""
        odd = '[",\n\r\t\\N\\" é \U0001f600"]'
        sql = "SELECT 'w', 1::bigint, 0, %s, NULL"
        with reading({"dsn": dsn()}, PLAN_TIMEOUT) as txn:
            copied = txn.mogrify(sql, (odd,)).decode()
            (batch,) = copy_batches(txn, copied, "orders")
        self.assertEqual(batch.column("row").to_pylist(), [odd])
        self.assertEqual(batch.column("stream").to_pylist(), ["orders"])
        self.assertEqual(batch.column("written_ts").to_pylist(), [None])

    def test_many_blocks(self) -> None:
        """Rows of many blocks come in order, and each once."""
        expected = list(range(1, 40_001))
        self.assertEqual(tokens("repeat('x', 100)", 40_000), expected)

    def test_long_row(self) -> None:
        """A row longer than a block is read, and what came before it is not twice."""
        row = "CASE id WHEN 30000 THEN repeat('y', 3000000) ELSE repeat('x', 100) END"
        self.assertEqual(tokens(row, 40_000), list(range(1, 40_001)))

    def test_too_long_row(self) -> None:
        """A row longer than any block is refused, with its stream."""
        self.patch(copying, "BLOCK_BYTES", (2**20,))
        error = self.assertRaises(PipelineError, tokens, "repeat('x', 3000000)", 3)
        self.assertIn("stream orders has a row of more than 1 MiB", str(error))

    def test_failure(self) -> None:
        """An error in the middle of the rows is an error, not their end."""
        error = self.assertRaises(
            PipelineError,
            tokens,
            "(1 / (30000 - id))::text || repeat('x', 100)",
            40_000,
        )
        self.assertIn("division by zero", str(error))

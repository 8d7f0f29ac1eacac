"""Tests for :mod:`synapse_replication.pipeline.local`."""

from __future__ import annotations

import datetime

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.local import local_frame
from synapse_replication.pipeline.schemas import ROWS_SCHEMA
from tests.pipeline.shared_session import shared_session


class LocalFrameTests(SynchronousTestCase):
    """Tests for :func:`local_frame`."""

    def test_rows(self) -> None:
        """Values are read back unchanged, including nulls and times."""
        moment = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.timezone.utc)
        rows = [
            ("events", "w1", 5, 0, "[]", moment),
            ("events", "w1", 6, 0, "[]", None),
        ]

        frame = local_frame(shared_session(), ROWS_SCHEMA, rows)

        self.assertEqual(frame.schema, ROWS_SCHEMA)
        found = [tuple(row) for row in frame.collect()]
        self.assertEqual([row[:5] for row in found], [row[:5] for row in rows])
        self.assertEqual(
            [row[5] and row[5].astimezone(datetime.timezone.utc) for row in found],
            [moment, None],
        )

    def test_empty(self) -> None:
        """The optimizer sees that the frame is empty, and plans no task for it."""
        frame = local_frame(shared_session(), "name string, size long")

        joined = frame.join(shared_session().range(5), frame.size == 1)

        plan = joined._jdf.queryExecution().optimizedPlan().toString()
        self.assertIn("LocalRelation <empty>", plan)
        self.assertNotIn("Join", plan)
        self.assertEqual(joined.collect(), [])

"""Tests for :mod:`synapse_replication.pipeline.spark.session`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tests.pipeline.shared_session import shared_session


class SessionTests(SynchronousTestCase):
    """Tests for the session."""

    def test_times_are_utc(self) -> None:
        """A timestamp literal is in UTC, whatever the time zone of the machine."""
        rows = shared_session().sql(
            "SELECT TIMESTAMP '1970-01-01' = timestamp_millis(0)"
        )
        self.assertEqual([list(row) for row in rows.collect()], [[True]])

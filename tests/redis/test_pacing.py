"""Tests of the conditions under which a link is behind and ready again."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.redis.pacing import (
    HIGH_WATERMARK,
    LOW_WATERMARK,
    SHARED_HIGH_WATERMARK,
    SHARED_LOW_WATERMARK,
    SHARED_WINDOW,
    Pacing,
)


class PacingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.pacing = Pacing()

    def test_no_other_traffic(self) -> None:
        """
        A link is behind from the high watermark on, and becomes ready once, at the low
        one.
        """
        self.assertFalse(self.pacing.is_behind(HIGH_WATERMARK - 1, 0.0))
        self.assertTrue(self.pacing.is_behind(HIGH_WATERMARK, 0.0))
        self.assertFalse(self.pacing.becomes_ready(0, 0.0), "it was not behind before")
        self.pacing.observe(HIGH_WATERMARK, 0.0)
        self.pacing.observe(HIGH_WATERMARK - 1, 0.0)
        self.assertFalse(self.pacing.becomes_ready(LOW_WATERMARK + 1, 0.0))
        self.assertTrue(self.pacing.becomes_ready(LOW_WATERMARK, 0.0))
        self.assertFalse(self.pacing.becomes_ready(0, 0.0))

    def test_other_traffic(self) -> None:
        """With other traffic, the lower watermarks apply for a while."""
        self.pacing.record_other_traffic(SHARED_HIGH_WATERMARK - 1, 10.0)
        self.assertFalse(self.pacing.was_behind)
        self.pacing.record_other_traffic(SHARED_HIGH_WATERMARK, 10.0)
        self.assertTrue(self.pacing.was_behind)
        during, after = 10.0 + SHARED_WINDOW - 0.01, 10.0 + SHARED_WINDOW
        self.assertTrue(self.pacing.is_behind(SHARED_HIGH_WATERMARK, during))
        self.assertFalse(self.pacing.is_behind(SHARED_HIGH_WATERMARK, after))
        self.assertFalse(self.pacing.becomes_ready(SHARED_LOW_WATERMARK + 1, during))
        self.assertTrue(self.pacing.becomes_ready(SHARED_LOW_WATERMARK, during))
        self.pacing.pause()
        self.pacing.resume()
        self.assertTrue(self.pacing.becomes_ready(LOW_WATERMARK, after))

    def test_a_full_transport(self) -> None:
        """A link is behind while the transport is full, whatever was acknowledged."""
        self.pacing.pause()
        self.assertTrue(self.pacing.is_behind(0, 0.0))
        self.assertFalse(self.pacing.becomes_ready(0, 0.0))
        self.pacing.resume()
        self.assertFalse(self.pacing.is_behind(0, 0.0))
        self.assertTrue(self.pacing.becomes_ready(0, 0.0))

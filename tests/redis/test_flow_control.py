"""Tests of the conditions under which a link is behind and ready again."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.redis.flow_control import (
    HIGH_WATERMARK,
    LOW_WATERMARK,
    SHARED_HIGH_WATERMARK,
    SHARED_LOW_WATERMARK,
    SHARED_WINDOW,
    PublishFlowControl,
)


class PublishFlowControlTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.flow = PublishFlowControl()

    def test_no_other_traffic(self) -> None:
        """
        A link is behind from the high watermark on, and becomes ready once, at the low
        one.
        """
        self.assertFalse(self.flow.is_behind(HIGH_WATERMARK - 1, 0.0))
        self.assertTrue(self.flow.is_behind(HIGH_WATERMARK, 0.0))
        self.assertFalse(self.flow.take_ready(0, 0.0), "it was not behind before")
        self.flow.update(HIGH_WATERMARK, 0.0)
        self.flow.update(HIGH_WATERMARK - 1, 0.0)
        self.assertFalse(self.flow.take_ready(LOW_WATERMARK + 1, 0.0))
        self.assertTrue(self.flow.take_ready(LOW_WATERMARK, 0.0))
        self.assertFalse(self.flow.take_ready(0, 0.0))

    def test_other_traffic(self) -> None:
        """With other traffic, the lower watermarks apply for a while."""
        self.flow.record_other_traffic(SHARED_HIGH_WATERMARK - 1, 10.0)
        self.assertFalse(self.flow.was_behind)
        self.flow.record_other_traffic(SHARED_HIGH_WATERMARK, 10.0)
        self.assertTrue(self.flow.was_behind)
        during, after = 10.0 + SHARED_WINDOW - 0.01, 10.0 + SHARED_WINDOW
        self.assertTrue(self.flow.is_behind(SHARED_HIGH_WATERMARK, during))
        self.assertFalse(self.flow.is_behind(SHARED_HIGH_WATERMARK, after))
        self.assertFalse(self.flow.take_ready(SHARED_LOW_WATERMARK + 1, during))
        self.assertTrue(self.flow.take_ready(SHARED_LOW_WATERMARK, during))
        self.flow.pause()
        self.flow.resume()
        self.assertTrue(self.flow.take_ready(LOW_WATERMARK, after))

    def test_a_full_transport(self) -> None:
        """A link is behind while the transport is full, whatever was acknowledged."""
        self.flow.pause()
        self.assertTrue(self.flow.is_behind(0, 0.0))
        self.assertFalse(self.flow.take_ready(0, 0.0))
        self.flow.resume()
        self.assertFalse(self.flow.is_behind(0, 0.0))
        self.assertTrue(self.flow.take_ready(0, 0.0))

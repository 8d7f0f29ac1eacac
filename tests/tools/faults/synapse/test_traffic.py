"""Tests for :mod:`scripts.tools.faults.synapse.traffic`."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.synapse.expectations import Expectations
from scripts.tools.faults.synapse.traffic import Room


class RoomTests(SynchronousTestCase):
    """Tests for Room, with users who make no requests."""

    def setUp(self) -> None:
        self.expectations = Expectations()
        self.alice: Any = Mock(user_id="@a")
        self.alice.at.return_value = self.alice
        cluster: Any = Mock()
        self.room = Room(0, self.alice, Mock(), "!r", cluster, self.expectations)

    def test_a_failed_request_may_have_replaced_a_row(self) -> None:
        """
        A receipt need not be shown after the request of its replacement failed: the new
        row may have been written.
        """
        self.alice.send_message.side_effect = ["$1", "$2"]
        self.room.write("events")
        self.room.write("receipts")
        self.room.write("events")
        self.assertEqual(self.expectations.never_shown()["receipts"], 1)
        self.alice.read_up_to.side_effect = OSError
        self.assertRaises(OSError, self.room.write, "receipts")
        self.assertEqual(self.expectations.never_shown()["receipts"], 0)

    def test_a_failed_message_replaces_nothing(self) -> None:
        """Accepted messages have to be shown even if a later message fails."""
        self.alice.send_message.side_effect = ["$1", OSError]
        self.room.write("events")
        self.assertRaises(OSError, self.room.write, "events")
        self.assertEqual(self.expectations.never_shown(), {"events": 1})

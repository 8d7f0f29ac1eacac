"""Tests for :mod:`scripts.tools.faults.synapse.expectations`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.synapse.expectations import Expectations, shown_in


class ExpectationsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.expectations = Expectations()

    def test_kept(self) -> None:
        """A promise is kept once its value was shown."""
        self.expectations.promise("events", "hello")
        self.assertFalse(self.expectations.is_fulfilled())
        self.expectations.see("events", "good day")
        self.assertEqual(self.expectations.never_shown(), {"events": 1})
        self.expectations.see("events", "hello")
        self.assertTrue(self.expectations.is_fulfilled())
        self.assertEqual(self.expectations.never_shown(), {})

    def test_shown_before_the_answer(self) -> None:
        """A value may be shown before its request is answered."""
        self.expectations.see("events", "hello")
        self.expectations.promise("events", "hello")
        self.assertTrue(self.expectations.is_fulfilled())

    def test_replaced(self) -> None:
        """A later promise about the same key replaces the earlier one."""
        self.expectations.promise("receipts", "room", "$1")
        self.expectations.promise("receipts", "room", "$2")
        self.expectations.see("receipts", "room", "$2")
        self.assertTrue(self.expectations.is_fulfilled())

    def test_withdrawn(self) -> None:
        """A value that may have been replaced need not be shown."""
        self.expectations.promise("receipts", "room", "$1")
        self.expectations.withdraw("receipts", "room")
        self.assertTrue(self.expectations.is_fulfilled())
        self.assertEqual(self.expectations.never_shown(), {})

    def test_given_up(self) -> None:
        """
        A promise that was given up counts as not shown unless it is shown later, even
        if a later promise about the same key is kept.
        """
        self.expectations.promise("receipts", "room", "$1")
        self.assertEqual(self.expectations.give_up(), ["receipts room $1"])
        self.assertTrue(self.expectations.is_fulfilled())
        self.expectations.promise("receipts", "room", "$2")
        self.expectations.see("receipts", "room", "$2")
        self.assertEqual(self.expectations.never_shown(), {"receipts": 1})
        self.expectations.see("receipts", "room", "$1")
        self.assertEqual(self.expectations.never_shown(), {})

    def test_forgotten(self) -> None:
        """A value that recurs has to be shown again."""
        self.expectations.see("typing", "room", ("@a",))
        self.expectations.forget("typing", "room", ("@a",))
        self.expectations.promise("typing", "room", ("@a",))
        self.assertFalse(self.expectations.is_fulfilled())

    def test_failed_reads(self) -> None:
        """A promise whose read failed is counted separately until it is shown."""
        self.expectations.promise("receipts", "a", "$1")
        self.expectations.promise("receipts", "b", "$2")
        self.expectations.promise("events", "a")
        unseen = self.expectations.give_up(
            lambda stream, key: (stream, key) == ("receipts", "a")
        )
        self.assertEqual(len(unseen), 3)
        self.assertEqual(self.expectations.failed_reads(), {"receipts": 1})
        self.assertEqual(self.expectations.never_shown(), {"receipts": 1, "events": 1})
        self.expectations.see("receipts", "a", "$1")
        self.assertEqual(self.expectations.failed_reads(), {})


class ShownInTests(SynchronousTestCase):
    def test_each_kind(self) -> None:
        """Each part of a response is assigned to its stream."""
        room = {
            "timeline": {"events": [{"content": {"body": "hello"}}]},
            "ephemeral": {
                "events": [
                    {"type": "m.typing", "content": {"user_ids": ["@b", "@a"]}},
                    {
                        "type": "m.receipt",
                        "content": {"$1": {"m.read": {"@a": {"ts": 1}}}},
                    },
                ]
            },
        }
        answer = {
            "to_device": {"events": [{"content": {"body": "psst"}}]},
            "account_data": {"events": [{"type": "a.b", "content": {"number": 4}}]},
            "rooms": {"join": {"!r": room}},
        }
        self.assertEqual(
            list(shown_in(answer)),
            [
                ("to_device", "psst", True),
                ("account_data", "a.b", 4),
                ("events", "hello", True),
                ("typing", "!r", ("@a", "@b")),
                ("receipts", ("!r", "@a"), "$1"),
            ],
        )

    def test_an_empty_answer(self) -> None:
        """A response without news shows nothing."""
        self.assertEqual(list(shown_in({"next_batch": "s1"})), [])

"""Tests for :mod:`synapse_replication.pipeline.report.counts`."""

from __future__ import annotations

import datetime
import itertools
from types import SimpleNamespace

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.report.counts import (
    ReportData,
    hide_names,
)
from synapse_replication.pipeline.report.windows import MAX_WINDOWS, choose_window
from tests.pipeline.reports import BEGINNING

DAY = 86_400


def window_for(seconds: float) -> int:
    return choose_window(BEGINNING, BEGINNING + datetime.timedelta(seconds=seconds))


class ChooseWindowTests(SynchronousTestCase):
    """Tests for the length of windows."""

    def test_never_too_many(self) -> None:
        """
        For any duration, there are at most MAX_WINDOWS windows of at least one second.
        """
        for seconds in (0, 1, 100, 5_000, 10**6, 10**8, 10**9):
            window = choose_window(
                BEGINNING, BEGINNING + datetime.timedelta(seconds=seconds)
            )
            self.assertLessEqual(seconds / window, MAX_WINDOWS)
            self.assertGreaterEqual(window, 1)
        self.assertEqual(choose_window(None, None), 1)

    def test_shortest_that_is_enough(self) -> None:
        """The shortest window that does not result in too many windows is chosen."""
        for seconds, window in (
            (120, 1),
            (120.001, 2),
            (3600, 30),
            (3601, 60),
            (DAY, 900),
            (30 * DAY, 6 * 3600),
            (120 * DAY, DAY),
            (120 * DAY + 1, 2 * DAY),
            (365 * DAY, 7 * DAY),
        ):
            self.assertEqual(window_for(seconds), window, seconds)

    def test_longer_time_no_shorter_window(self) -> None:
        """A longer duration never results in shorter windows."""
        windows = [window_for(1.3**n) for n in range(80)]
        for shorter, longer in itertools.pairwise(windows):
            self.assertLessEqual(shorter, longer)

    def test_longest(self) -> None:
        """
        For a duration of two centuries, a window is a year, which is the longest
        length.
        """
        self.assertEqual(window_for(200 * 365 * DAY), 365 * DAY)

    def test_one_end_known(self) -> None:
        """
        If one end is unknown, the duration is zero, and the window is the shortest one.
        """
        self.assertEqual(choose_window(BEGINNING, None), 1)
        self.assertEqual(choose_window(None, BEGINNING), 1)


class HideNamesTests(SynchronousTestCase):
    """Tests for the pseudonyms of rooms and users."""

    def test_keyed(self) -> None:
        """
        A name has one pseudonym within a report, and a different one with another key.
        """
        hot = [SimpleNamespace(kind="user", name="@alice:x", rows=2)] * 2
        first, again = hide_names(hot, b"key")
        self.assertEqual(first, again)
        self.assertNotIn("alice", first.name)
        (other, _) = hide_names(hot, b"other key")
        self.assertNotEqual(first.name, other.name)

    def test_only_names(self) -> None:
        """
        Kind, rows and order are unchanged; the hash is HMAC-SHA256, as OpenSSL computes
        it.
        """
        hot = [
            SimpleNamespace(kind="room", name="!a:x", rows=7),
            SimpleNamespace(kind="user", name="@zoë:x", rows=7),
            SimpleNamespace(kind="user", name="@alice:x", rows=9),
        ]
        # printf %s '!a:x' | openssl dgst -sha256 -hmac key, and so on.
        self.assertEqual(
            hide_names(hot, b"key"),
            [
                SimpleNamespace(kind="room", name="room 8ddeed46ed", rows=7),
                SimpleNamespace(kind="user", name="user e34e1f37c9", rows=7),
                SimpleNamespace(kind="user", name="user 2d0144384b", rows=9),
            ],
        )


class ReportDataTests(SynchronousTestCase):
    """Tests for the defaults of a report."""

    def test_nothing_known(self) -> None:
        """
        By default, names are hidden, and no audit is distinguished from an audit
        without findings.
        """
        data = ReportData(made=BEGINNING, sources=[])
        self.assertFalse(data.identified)
        self.assertFalse(data.has_wire)
        self.assertIsNone(data.findings)
        other = ReportData(made=BEGINNING, sources=[])
        other.finding_count["error"] = 1
        self.assertEqual(data.finding_count, {})

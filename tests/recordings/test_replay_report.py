"""Tests for :mod:`synapse_replication.recordings.replay_report`."""

from __future__ import annotations

import json

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.events import DiscardReason
from synapse_replication.recordings.replay_report import Gap, ReplayReport, describe


class ReportTests(SynchronousTestCase):
    """Tests for the report of a replay."""

    def test_clean(self) -> None:
        """
        With repeated rows, redundant positions and unknown streams, a report is clean.
        """
        report = ReplayReport()
        for reason in (
            DiscardReason.OLD_TOKEN,
            DiscardReason.REDUNDANT_POSITION,
            DiscardReason.UNKNOWN_STREAM,
        ):
            report.discarded[reason]["events"] += 1

        self.assertTrue(report.is_clean)

    def test_not_clean(self) -> None:
        """With a lost row, an unparsable line or a failure, a report is not clean."""
        lost, unparsable, failed = ReplayReport(), ReplayReport(), ReplayReport()
        lost.discarded[DiscardReason.UNDECODABLE]["events"] += 1
        unparsable.add_unparsable(3, "no")
        failed.failures["x"] += 1

        for report in (lost, unparsable, failed):
            self.assertFalse(report.is_clean)

    def test_unparsable_lines_are_bounded(self) -> None:
        """The number of stored unparsable lines is bounded."""
        report = ReplayReport()
        for number in range(2000):
            report.add_unparsable(number, "no")

        self.assertEqual(report.unparsable_lines, 2000)
        self.assertEqual(len(report.unparsable), 1000)

    def make(self) -> ReplayReport:
        report = ReplayReport(lines=7)
        report.commands["RDATA"] = 5
        report.last_position["typing", "w"] = 3
        report.discarded[DiscardReason.UNDECODABLE]["typing"] = 2
        report.discarded[DiscardReason.OLD_TOKEN]["events"] = 1
        report.gaps.append(Gap("events", "p1", 5, 9))
        report.add_unparsable(4, "cannot parse")
        return report

    def test_for_machines(self) -> None:
        """The report is JSON, with reasons and line numbers."""
        value = json.loads(json.dumps(self.make().to_json()))

        self.assertEqual(value["last_position"], {"typing w": 3})
        self.assertEqual(
            value["discarded"],
            {"old_token": {"events": 1}, "undecodable": {"typing": 2}},
        )
        self.assertEqual(
            value["gaps"],
            [{"stream": "events", "writer": "p1", "after": 5, "up_to": 9}],
        )
        self.assertEqual(
            value["unparsable"], [{"line_number": 4, "error": "cannot parse"}]
        )

    def test_for_people(self) -> None:
        """The text contains everything, and marks unexplained discards."""
        text = "\n".join(describe(self.make()))

        self.assertIn("7 lines", text)
        self.assertRegex(text, r"undecodable typing +2  NOT EXPLAINED")
        self.assertRegex(text, r"old_token events +1  sent again")
        self.assertRegex(text, r"typing w +3")
        self.assertIn("line 4: cannot parse", text)
        self.assertIn("Failures: none", text)

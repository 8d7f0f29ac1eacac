"""Tests for :mod:`synapse_replication.recordings.replay`."""

from __future__ import annotations

import json

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.events import DiscardReason
from synapse_replication.recordings.reader import Record, RecordingError, read_recording
from synapse_replication.recordings.replay import Gap, ReplayReport, replay_records
from tests.support.recordings import FULL_RECORDING, make_report


def replay_lines(*lines: str) -> ReplayReport:
    return replay_records(
        [
            Record(number, 0.0, "a.b", line.encode())
            for number, line in enumerate(lines, 1)
        ]
    )


class ReplayTests(SynchronousTestCase):
    """Tests for the report of a recording."""

    def test_the_full_recording(self) -> None:
        """The report of a real deployment's recording has the expected counts."""
        report = replay_records(read_recording(FULL_RECORDING))
        value = report.to_json()

        self.assertTrue(report.is_clean)
        self.assertEqual(report.gaps, [])
        self.assertEqual(value["lines"], 21_168)
        self.assertEqual(
            value["commands"],
            {
                "CANCEL_TASK": 7,
                "LOCK_RELEASED": 7390,
                "NEW_ACTIVE_TASK": 34,
                "POSITION": 3360,
                "RDATA": 10159,
                "REPLICATE": 5,
                "USER_IP": 207,
                "USER_SYNC": 6,
            },
        )
        self.assertEqual(sum(value["rdata_rows"].values()), 10_159)
        self.assertEqual(value["batches"], {"events": 791, "to_device": 165})
        self.assertEqual(value["rdata_at_or_below_position"], {"caches": 139})
        self.assertEqual(value["resets"], {})
        self.assertEqual(len(value["last_position"]), 26)
        self.assertEqual(value["last_position"]["events event_persister2"], 4009)
        self.assertEqual(value["last_position"]["presence_federation master"], 0)

    def test_rows_and_positions_advance_a_writer(self) -> None:
        """The last position of a writer is that of its last row or POSITION."""
        report = replay_lines(
            "POSITION typing w 1 1",
            'RDATA typing w 3 ["!r",[]]',
            "POSITION to_device w 4 4",
            "POSITION typing v 2 2",
            "POSITION to_device w 4 6",
        )

        self.assertEqual(
            report.last_position,
            {("typing", "w"): 3, ("typing", "v"): 2, ("to_device", "w"): 6},
        )
        self.assertEqual(report.rdata_rows, {"typing": 1})
        self.assertTrue(report.is_clean)

    def test_batches_of_two_writers(self) -> None:
        """Batches that interleave are counted by writer."""
        report = replay_lines(
            "POSITION to_device a 1 1",
            "POSITION to_device b 1 1",
            'RDATA to_device a batch ["@1:x"]',
            'RDATA to_device b batch ["@2:x"]',
            'RDATA to_device b 3 ["@3:x"]',
            'RDATA to_device a 2 ["@4:x"]',
            'RDATA to_device a 4 ["@5:x"]',
            'RDATA to_device a batch ["@6:x"]',
        )

        self.assertEqual(report.batches, {"to_device": 2})
        self.assertEqual(report.rdata_rows, {"to_device": 6})
        self.assertEqual(
            report.last_position, {("to_device", "a"): 4, ("to_device", "b"): 3}
        )

    def test_a_recording_may_begin_in_the_middle(self) -> None:
        """Rows before the first POSITION of a recording are counted."""
        report = replay_lines(
            'RDATA to_device w batch ["@1:x"]',
            'RDATA to_device w 70 ["@2:x"]',
            'RDATA to_device w 70 ["@2:x"]',
            "POSITION to_device w 70 71",
        )

        self.assertEqual(report.batches, {"to_device": 1})
        self.assertEqual(report.rdata_at_or_below_position, {"to_device": 1})
        self.assertEqual(report.last_position, {("to_device", "w"): 71})
        self.assertEqual(report.gaps, [])
        self.assertTrue(report.is_clean)

    def test_a_writer_without_a_token_has_no_position(self) -> None:
        """A batch without an end gives its writer no position."""
        report = replay_lines('RDATA to_device w batch ["@1:x"]')

        self.assertEqual(report.last_position, {})
        self.assertEqual(report.batches, {})

    def test_repeated_rows(self) -> None:
        """Rows at or below a position are counted, whether delivered or not."""
        report = replay_lines(
            "POSITION caches w 5 5",
            'RDATA caches w 7 ["f",["a"],1]',
            'RDATA caches w 6 ["f",["b"],1]',
            'RDATA caches w 7 ["f",["a"],1]',
            "POSITION push_rules w 5 5",
            'RDATA push_rules w 5 ["@a:x"]',
        )

        self.assertEqual(
            report.rdata_at_or_below_position, {"caches": 2, "push_rules": 1}
        )
        self.assertEqual(report.discarded, {DiscardReason.OLD_TOKEN: {"push_rules": 1}})
        self.assertEqual(
            report.last_position, {("caches", "w"): 7, ("push_rules", "w"): 5}
        )
        self.assertTrue(report.is_clean)

    def test_repeated_commands(self) -> None:
        """A repeated USER_SYNC is explained."""
        line = "USER_SYNC one @a:b None start 5"
        report = replay_lines(line, line)
        self.assertTrue(report.is_clean)
        self.assertEqual(report.discarded, {DiscardReason.REPEATED: {"USER_SYNC": 1}})

    def test_reset_of_a_writer(self) -> None:
        """A lower POSITION is a reset of ``typing``, but not of ``events``."""
        report = replay_lines(
            "POSITION typing w 649 649",
            "POSITION typing w 0 0",
            "POSITION typing w 0 0",
            'RDATA typing w 1 ["!r",[]]',
            "POSITION events w 7 7",
            "POSITION events w 5 5",
        )

        self.assertEqual(report.resets, {"typing": 1})
        self.assertEqual(report.last_position, {("typing", "w"): 1, ("events", "w"): 7})
        self.assertEqual(
            report.discarded,
            {DiscardReason.REDUNDANT_POSITION: {"typing": 1, "events": 1}},
        )

    def test_gaps(self) -> None:
        """A POSITION that does not follow the last position is a possible gap."""
        report = replay_lines("POSITION events w 5 5", "POSITION events w 7 9")

        self.assertEqual(report.gaps, [Gap("events", "w", 5, 9)])
        self.assertEqual(report.last_position, {("events", "w"): 9})
        self.assertTrue(report.is_clean)

    def test_unparsable_lines(self) -> None:
        """
        An unparsable line is reported by number, and other lines are not affected.
        """
        records: list[Record | RecordingError] = [
            Record(1, 0.0, "", b"POSITION typing w 1 1"),
            Record(2, 0.0, "", b'RDATA typing w x ["!r",[]]'),
            RecordingError(3, "no JSON"),
            Record(5, 0.0, "", b"SOMETHING new"),
            Record(6, 0.0, "", b'RDATA typing w 2 ["!r",[]]'),
        ]
        report = replay_records(records)

        self.assertEqual([u.line_number for u in report.unparsable], [2, 3, 5])
        self.assertEqual(report.lines, 4)
        self.assertEqual(report.commands["SOMETHING"], 1)
        self.assertEqual(report.last_position, {("typing", "w"): 2})
        self.assertFalse(report.is_clean)

    def test_rows_that_are_no_json(self) -> None:
        """A row that is not valid JSON, such as NaN, is reported by its line."""
        for row in ('["!r",[]', '["!r",[NaN]]', ""):
            report = replay_lines(
                "POSITION typing w 1 1",
                'RDATA typing w batch ["!r",[]]',
                f"RDATA typing w 2 {row}",
            )
            self.assertEqual([u.line_number for u in report.unparsable], [3], row)
            self.assertIn("cannot parse RDATA line", report.unparsable[0].error)
            self.assertFalse(report.is_clean)

    def test_rows_of_several_writers_that_are_no_json(self) -> None:
        """Invalid JSON is reported by its line if the lines of writers alternate."""
        lines = [
            f'RDATA typing {writer} {token} ["!r",[]]'
            for token in (2, 3)
            for writer in ("w", "x")
        ]
        lines[2] = 'RDATA typing w 3 ["!r",[]'
        report = replay_lines("POSITION typing w 1 1", "POSITION typing x 1 1", *lines)
        self.assertEqual([u.line_number for u in report.unparsable], [5])

    def test_rows_that_do_not_fit_their_stream(self) -> None:
        """A row of the wrong form is discarded, and the recording is not clean."""
        report = replay_lines("POSITION typing w 1 1", "RDATA typing w 2 [1,2]")

        self.assertEqual(report.discarded, {DiscardReason.UNDECODABLE: {"typing": 1}})
        self.assertFalse(report.is_clean)
        self.assertEqual(report.rdata_rows, {"typing": 1})

    def test_newer_peers(self) -> None:
        """
        An unknown stream and unknown fields are counted, and the recording is clean.
        """
        report = replay_lines(
            "POSITION new_stream w 1 1",
            'RDATA new_stream w 2 ["x"]',
            "POSITION typing w 1 1",
            'RDATA typing w 2 ["!r",[],"new"]',
        )

        self.assertEqual(
            report.discarded, {DiscardReason.UNKNOWN_STREAM: {"new_stream": 2}}
        )
        self.assertEqual(report.extra_fields, {"typing": 1})
        self.assertEqual(report.rdata_rows, {"new_stream": 1, "typing": 1})
        self.assertTrue(report.is_clean)

    def test_every_command(self) -> None:
        """Commands without rows are only counted."""
        lines = (
            "REPLICATE ",
            "USER_SYNC id @a:x DEV start 5",
            "CLEAR_USER_SYNC id",
            "FEDERATION_ACK w 5",
            'USER_IP @a:x ["t","1.2.3.4","ua","D",5]',
            "REMOTE_SERVER_UP a.b",
            'LOCK_RELEASED ["w","n","k"]',
            "NEW_ACTIVE_TASK t",
            "CANCEL_TASK t",
            "REMOVE_PUSHER a k @a:x",
            'INVALIDATE_CACHE f ["k"]',
            "PING 1",
            "NAME n",
            "SERVER a.b",
            "ERROR e",
        )
        report = replay_lines(*lines)

        self.assertTrue(report.is_clean, report.to_json())
        self.assertEqual(
            report.commands, {line.split(" ", maxsplit=1)[0]: 1 for line in lines}
        )


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

    def test_for_machines(self) -> None:
        """The report is JSON, with reasons and line numbers."""
        value = json.loads(json.dumps(make_report().to_json()))

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

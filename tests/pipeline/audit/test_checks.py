"""Tests for :mod:`synapse_replication.pipeline.audit.comparison`, in Spark."""

from __future__ import annotations

import json
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.audit import comparison
from tests.pipeline.audits import (
    Case,
    Cases,
    Deployment,
    evidence,
    found,
    lines_of,
)

CASES = Cases()

EVENTS = tuple(("events", "w1", id_) for id_ in (2, 3, 5))

#: ``account_data`` does not record the writer.
BOTH: dict[str, Any] = {
    "persisted": ("events", "account_data"),
    "nameless": ("account_data",),
}


class TwoWritersTests(SynchronousTestCase):
    """Tests for ids that two writers have used."""

    used_twice = CASES.add(
        tables=[
            ("events", "w1", 2),
            ("events", "w2", 3),
            ("events", "w1", 4),
            ("events", "w2", 4),
        ],
        archive=[("events", "w1", 2), ("events", "w1", 3)],
    )

    def test_of_two_writers(self) -> None:
        """
        An id with rows of two writers is an error, in the tables or across sources.
        """
        self.assertEqual(
            found(self.used_twice.findings("id_of_two_writers")),
            [("id_of_two_writers", "error", "events", "w1", 3, 4, 2)],
        )

    healthy = CASES.add(
        tables=[
            ("events", "w1", 2),
            ("events", "w1", 2),
            ("events", "", 3),
            ("account_data", "w1", 2),
        ],
        archive=[("account_data", "w2", 2), ("events", "w2", 3)],
        lines=lines_of(["RDATA events w2 2 []", "RDATA account_data w3 2 []"]),
        **BOTH,
    )

    def test_healthy(self) -> None:
        """
        An id with several rows, with a table that does not record the writer, or with a
        row that another instance sent is not reported.
        """
        self.assertEqual(self.healthy.findings("id_of_two_writers"), [])


class GapTests(SynchronousTestCase):
    """Tests for ids without a row, and for rows that were deleted."""

    with_gaps = CASES.add(
        tables=[("events", "w1", 2), ("events", "w2", 3), ("events", "w1", 9)],
        archive=[("events", "w1", 5)],
        lines=lines_of(["RDATA events w2 6 []"]),
    )

    def test_gaps(self) -> None:
        """
        An id without a row of any writer is reported; an id of another writer is not a
        gap.
        """
        gaps = self.with_gaps.findings("id_without_row")

        self.assertEqual(
            found(gaps),
            [
                ("id_without_row", "info", "events", None, 4, 4, 1),
                ("id_without_row", "info", "events", None, 7, 8, 2),
            ],
        )
        self.assertIn(
            {
                "before": {"stream_id": 6, "writer": "w2"},
                "after": {"stream_id": 9, "writer": "w1"},
                "gaps": 1,
            },
            evidence(gaps),
        )
        self.assertEqual(
            found(self.with_gaps.findings("row_gone")),
            [
                ("row_gone", "info", "events", "w1", 5, 5, 1),
                ("row_gone", "info", "events", "w2", 6, 6, 1),
            ],
        )

    at_limits = CASES.add(
        tables=[("events", "w1", 1), ("events", "w1", 2**63 - 1)],
        lines=lines_of(
            [f"RDATA events w1 {-(2**63)} []", f"RDATA events w1 {2**63 - 1} []"]
        ),
    )

    def test_limits(self) -> None:
        """Tokens may be the least and the greatest number of 64 bits."""
        self.assertEqual(
            found(self.at_limits.findings("id_without_row")),
            [
                (
                    *("id_without_row", "info", "events", None),
                    *(1 - 2**63, 0, 2**63 - 1),
                ),
                ("id_without_row", "info", "events", None, 2, 2**63 - 2, 2**63 - 3),
            ],
        )

    at_words = CASES.add(
        tables=[("events", "w1", id_) for id_ in (*range(60, 129), 192, 320, 2**62)],
    )

    def test_edges_of_words(self) -> None:
        """
        Runs of ids may begin, end and go on at the edges of words, and be far apart.
        """
        self.assertEqual(
            found(self.at_words.findings()),
            [
                ("id_without_row", "info", "events", None, 129, 191, 63),
                ("id_without_row", "info", "events", None, 193, 319, 127),
                ("id_without_row", "info", "events", None, 321, 2**62 - 1, 2**62 - 321),
            ],
        )


class LimitTests(SynchronousTestCase):
    """Tests for the bound of the number of findings."""

    def test_many(self) -> None:
        """Beyond the maximum, gaps, and findings of a kind, are reported together."""
        ids = (3, 4, 5, 7, 9, 20, 24, 25)
        lines = [f"RDATA typing w{number} 9 []" for number in range(5)]
        lines += [f"POSITION typing w{number} {number} {number}" for number in range(5)]
        deployment = Deployment(
            tables=[("events", "w1", id_) for id_ in ids],
            lines=lines_of(lines),
            in_memory=("typing",),
        )
        self.patch(comparison, "MAX_GAPS", 2)
        self.patch(comparison, "MAX_FINDINGS", 3)

        findings = deployment.audit()

        self.assertEqual(
            found(findings),
            [
                ("id_without_row", "info", "events", None, 10, 19, 10),
                ("id_without_row", "info", "events", None, 21, 23, 3),
                ("id_without_row", "info", "events", None, 6, 8, 2),
                ("stream_reset", "info", "typing", None, 3, 9, 2),
                ("stream_reset", "info", "typing", "w0", 0, 9, 1),
                ("stream_reset", "info", "typing", "w1", 1, 9, 1),
                ("stream_reset", "info", "typing", "w2", 2, 9, 1),
            ],
        )
        self.assertIn(
            "2 rows, ids or lines of 2 further findings of this kind, which are not "
            "listed individually",
            {each.message for each in findings},
        )


class EmptyTests(SynchronousTestCase):
    """Tests for statements that can have no result, and are not even planned."""

    def computed(self, **given: Any) -> tuple[list[str], set[str]]:
        """Compare inputs; return the computed results, and the kinds of findings."""
        names: list[str] = []
        add = comparison._materialise

        def materialise(session: Any, name: str) -> Any:
            names.append(name)
            return add(session, name)

        self.patch(comparison, "_materialise", materialise)
        return names, {each.kind for each in Deployment(**given).audit()}

    def test_without_recordings(self) -> None:
        """Without recorded lines, only rows are examined."""
        names, kinds = self.computed(tables=EVENTS, lines=None)
        self.assertEqual(names, ["words", "ids", "ahead"])
        self.assertEqual(kinds, {"id_without_row"})

    def test_healthy_recording(self) -> None:
        """If all rows were sent, no line is examined for rows that it skips."""
        lines = [f"RDATA events w1 {id_} []" for _, _, id_ in EVENTS]
        names, kinds = self.computed(tables=EVENTS, lines=lines_of(lines))
        self.assertEqual(
            names, ["lines", "words", "ids", "never_sent", "late", "ahead"]
        )
        self.assertEqual(kinds, {"id_without_row"})


class AheadTests(SynchronousTestCase):
    """Tests for tokens beyond the last id that a stream's sequence has allocated."""

    ahead = CASES.add(
        archive=[("events", "w1", 11), ("events", "w2", 10)],
        lines=lines_of(
            [
                "POSITION events w1 9 9",
                "RDATA events w2 12 []",
                "POSITION events w2 12 13",
                "POSITION backfill w1 1 1",
                "POSITION typing w1 900 900",
            ]
        ),
        persisted=("events", "backfill"),
        in_memory=("typing",),
        allocated={"events": 10, "backfill": 0},
    )

    def test_ahead(self) -> None:
        """A received or archived token beyond the last allocated id is an error."""
        findings = self.ahead.findings("token_ahead")

        self.assertEqual(
            found(findings),
            [
                ("token_ahead", "error", "events", "w1", 11, 11, 1),
                ("token_ahead", "error", "events", "w2", 11, 13, 3),
            ],
        )
        line = {"line_number": 3, "line": "POSITION events w2 12 13"}
        self.assertIn(
            {"seen": {"recording": "r.jsonl", **line}, "sequence_value": 10},
            evidence(findings),
        )
        self.assertEqual(
            sorted(each.message.split(",")[0] for each in findings),
            ["r.jsonl has w2's events at 13", "the archive has w1's events at 11"],
        )

    greatest = CASES.add(
        tables=[("events", "w1", 2), ("events", "w1", 3)],
        archive=[("events", "w1", 2), ("events", "w1", 2**63 - 1)],
        lines=lines_of(["RDATA events w1 2 []", f"RDATA events w1 {2**63 - 1} []"]),
        allocated={"events": 3},
    )

    def test_greatest_token(self) -> None:
        """The greatest 64-bit number as a token is only ahead, and hides nothing."""
        self.assertEqual(
            found(self.greatest.findings()),
            [
                (
                    *("id_without_row", "info", "events", None),
                    *(4, 2**63 - 2, 2**63 - 5),
                ),
                (
                    *("row_gone", "info", "events", "w1"),
                    *(2**63 - 1, 2**63 - 1, 1),
                ),
                ("row_not_archived", "error", "events", "w1", 3, 3, 1),
                ("row_not_seen", "info", "events", "w1", 3, 3, 1),
                *[("token_ahead", "error", "events", "w1", 4, 2**63 - 1, 2**63 - 4)]
                * 2,
            ],
        )


class ArchiveTests(SynchronousTestCase):
    """Tests for archives with repeated or missing rows."""

    rows_twice = CASES.add(
        archive=[
            *(("events", "w1", id_, index) for id_ in (2, 3) for index in (0, 1)),
            *[("events", "w1", 4, 0)] * 2,
            *[("events", "w1", 5, 0), ("events", "w1", 5, 1)] * 3,
            ("events", "w2", 2, 0),
        ]
    )

    of_nobody = CASES.add(archive=[("events", "", 4, 0)] * 2)

    def test_unknown_writer(self) -> None:
        """A repeated row may have no writer."""
        (twice,) = self.of_nobody.findings("row_twice_in_archive")
        self.assertIsNone(twice.instance_name)
        self.assertIn("rows of an unknown writer's events", twice.message)

    def test_rows_twice(self) -> None:
        """
        A row that is archived twice is an error; two rows of the same token are not.
        """
        findings = self.rows_twice.findings("row_twice_in_archive")
        self.assertEqual(
            found(findings),
            [("row_twice_in_archive", "error", "events", "w1", 4, 5, 3)],
        )
        (rows,) = (each["rows"] for each in evidence(findings))
        self.assertEqual(
            rows,
            [
                {"stream_id": 4, "row_index": 0, "times": 2},
                {"stream_id": 5, "row_index": 0, "times": 3},
                {"stream_id": 5, "row_index": 1, "times": 3},
            ],
        )

    once = ("RDATA events w1 5 []", "RDATA events w1 6 []", "PING 2")
    commands_twice = CASES.add(
        lines=[
            *lines_of(once),
            *lines_of(once),
            *lines_of(["RDATA events w1 5 []"], "other"),
        ]
    )

    def test_commands_twice(self) -> None:
        """
        A recorded line that is archived twice is an error, and is audited as one line.
        """
        findings = self.commands_twice.findings()
        self.assertEqual(
            [each for each in found(findings) if each[0] != "row_gone"],
            [("command_twice_in_archive", "error", None, None, None, None, 3)],
        )
        self.assertIn(
            {"recording": "r.jsonl", "first_line_number": 1, "last_line_number": 3},
            evidence(findings),
        )

    missing = CASES.add(
        tables=[
            # These rows are before the first archived id and after the last one.
            *(("events", "w1", id_) for id_ in (2, 5, 6, 7, 9)),
            # This row's writer has no archived rows.
            ("events", "w2", 8),
            ("account_data", "", 6),
            *(("receipts", "w1", id_) for id_ in (5, 6, 7)),
        ],
        archive=[
            ("events", "w1", 5),
            ("events", "w1", 7),
            ("account_data", "", 5),
            ("account_data", "", 8),
            ("receipts", "w1", 5),
            ("receipts", "w1", 7),
        ],
        purged=[("receipts", 4, 6)],
        persisted=("events", "account_data", "receipts"),
        nameless=("account_data",),
    )

    def test_not_archived(self) -> None:
        """
        A row that is missing between archived rows of its writer is an error, unless it
        was purged.
        """
        self.assertEqual(
            found(self.missing.findings("row_not_archived")),
            [
                ("row_not_archived", "error", "account_data", None, 6, 6, 1),
                ("row_not_archived", "error", "events", "w1", 6, 6, 1),
            ],
        )


W1 = (("w1", 2), ("w1", 3), ("w1", 5))
PINGS = ("RDATA events w9 1 []",) * 70


def lost_case(
    *lines: str,
    rows: tuple[tuple[str, int], ...] = W1,
    archived: tuple[tuple[str, int], ...] = (),
    **more: Any,
) -> Case:
    """Add recorded lines of ``events``, and its committed and archived rows."""
    return CASES.add(
        tables=[("events", *row) for row in rows],
        archive=[("events", *row) for row in archived],
        lines=lines_of(lines),
        **more,
    )


def lost(case: Case) -> list[tuple[int, int]]:
    """Return ``(id, line number)`` of each lost row."""
    return sorted(
        (id_, each["line_number"])
        for each in evidence(case.findings("announced_absent"))
        for id_ in each["ids"]
    )


class AnnouncedAbsentTests(SynchronousTestCase):
    """Tests for committed rows whose absence a POSITION announced."""

    skipped = lost_case(
        "RDATA events w1 2 []",
        "POSITION events w1 2 3",
        "POSITION events w1 3 4",
        "RDATA events w1 5 []",
    )

    def test_skipped_by_position(self) -> None:
        """A committed row in the range of a POSITION is lost if it was never sent."""
        findings = self.skipped.findings("announced_absent")
        self.assertEqual(
            found(findings), [("announced_absent", "error", "events", "w1", 3, 3, 1)]
        )
        self.assertEqual(
            evidence(findings),
            [
                {
                    "recording": "r.jsonl",
                    "line_number": 2,
                    "t": 2.0,
                    "line": "POSITION events w1 2 3",
                    "ids": [3],
                }
            ],
        )
        self.assertEqual(
            findings[0].message,
            "r.jsonl line 2: 'POSITION events w1 2 3' skips 1 ids with committed rows "
            "that were never sent; the first is 3: readers have lost these rows",
        )

    first_line = lost_case("POSITION events w1 1 6")

    def test_first_line(self) -> None:
        """
        The POSITION and the committed row suffice, even if no earlier line was
        recorded.
        """
        self.assertEqual(lost(self.first_line), [(2, 1), (3, 1), (5, 1)])

    only_archived = lost_case("POSITION events w1 2 4", rows=(), archived=W1)

    def test_only_archived(self) -> None:
        """A row that is only in the archive is treated as committed."""
        self.assertEqual(lost(self.only_archived), [(3, 1)])

    overlapping = lost_case(
        "POSITION events w1 2 9", "POSITION events w1 1 2", "POSITION events w1 4 5"
    )

    def test_overlapping_lines(self) -> None:
        """Each lost row is found, even if lines overlap."""
        self.assertEqual([id_ for id_, _ in lost(self.overlapping)], [2, 3, 5])

    healthy = lost_case(
        "POSITION events w1 2 2",
        "RDATA events w1 3 []",
        "POSITION events w1 3 4",
        # A POSITION that answers REPLICATE repeats its token, and announces no absence.
        "POSITION events w1 5 5",
        "POSITION events w1 5 9",
        # Another instance sends the row.
        "RDATA events w3 7 []",
        "POSITION events w2 6 9",
        rows=(*W1, ("w2", 7), ("", 8)),
    )

    def test_healthy(self) -> None:
        """
        Rows that were sent, rows of another writer, and rows outside the range are not
        lost.
        """
        self.assertEqual(lost(self.healthy), [])

    sole_writer = lost_case(
        "POSITION events w1 2 3",
        rows=(("", 3), ("", 5)),
        nameless=("events",),
        writers={"events": ["w1"]},
    )
    second_writer = lost_case(
        "POSITION events w1 2 3",
        "POSITION events w2 4 5",
        rows=(("", 3), ("", 5)),
        nameless=("events",),
        writers={"events": ["w1"]},
    )

    def test_sole_writer(self) -> None:
        """
        If the table does not record the writer, the row is attributed to the sole
        writer of the stream, unless a recording has another one.
        """
        self.assertEqual(lost(self.sole_writer), [(3, 1)])
        self.assertEqual(lost(self.second_writer), [])

    late = tuple(
        lost_case(*lines, idempotent=("events",))
        for lines in (
            ("POSITION events w1 2 3",),
            ("POSITION events w1 2 3", *PINGS),
            ("POSITION events w1 2 3", "RDATA events w1 3 []", *PINGS),
        )
    )

    def test_late_rows(self) -> None:
        """
        A row of an idempotent stream is lost only if it does not arrive for a long
        time.
        """
        self.assertEqual([lost(case) for case in self.late], [[], [(3, 1)], []])

    in_another = CASES.add(
        tables=EVENTS,
        lines=[
            *lines_of(["POSITION events w1 2 3"]),
            *lines_of(["RDATA events w1 3 []"], "other.jsonl"),
        ],
    )

    def test_sent_in_another_recording(self) -> None:
        """A row is not lost if any recording contains it."""
        self.assertEqual(lost(self.in_another), [])


class NotSeenTests(SynchronousTestCase):
    """Tests for rows that are missing between recorded rows."""

    missing = lost_case("RDATA events w1 2 []", "RDATA events w1 5 []")

    def test_missing(self) -> None:
        """A row that is missing between two recorded rows is reported."""
        findings = self.missing.findings("row_not_seen")
        self.assertEqual(
            found(findings), [("row_not_seen", "info", "events", "w1", 3, 3, 1)]
        )
        (sample,) = json.loads(findings[0].evidence)["ids"]
        self.assertEqual(
            sample,
            {
                "stream_id": 3,
                "token_before": 2,
                "line_number": 2,
                "line": "RDATA events w1 5 ...",
            },
        )

    healthy = lost_case(
        "RDATA events w1 3 []", "POSITION events w1 5 5", "RDATA events w1 6 []"
    )

    def test_healthy(self) -> None:
        """
        A row before the recording, or one that a POSITION covers, is not reported.
        """
        self.assertEqual(self.healthy.findings("row_not_seen"), [])


def order_case(*lines: str, idempotent: tuple[str, ...] = ()) -> Case:
    """Add a recording, and unless its stream is idempotent, the same one again."""
    recorded = lines_of(lines)
    # Rows that two recorders received are not duplicates.
    again = lines_of(lines, "again.jsonl") if not idempotent else []
    return CASES.add(
        lines=[*recorded, *again], idempotent=idempotent, in_memory=("typing",)
    )


def order(case: Case) -> Any:
    """Return the findings in the first recording, and their evidence."""
    findings = [
        each
        for each in case.findings(
            "row_out_of_order", "row_twice_on_wire", "late_invalidation"
        )
        if "again.jsonl" not in each.evidence
    ]
    return found(findings), evidence(findings)


class OrderTests(SynchronousTestCase):
    """Tests for rows that readers discard."""

    healthy = order_case(
        "POSITION events w1 4 4",
        "RDATA events w1 batch []",
        "RDATA events w1 6 []",
        # Another writer has a lower token.
        "RDATA events w2 5 []",
        "POSITION events w2 5 6",
        # The answer to REPLICATE has the writer's current token; a row that was already
        # being sent follows.
        "POSITION events w1 9 9",
        "RDATA events w1 8 []",
        "RDATA events w1 9 []",
        "POSITION events w1 9 12",
        # The recorder lost its connection, and an instance restarted slightly behind.
        "RDATA events w1 20 []",
        "POSITION events w1 19 19",
        "RDATA events w1 21 []",
        # The writer of a stream held in memory restarted.
        "RDATA typing w1 600 []",
        "RDATA typing w1 1 []",
        "RDATA typing w1 1 []",
        # A stream of a newer version, of which it is unknown whether it is reset.
        "RDATA of_a_newer_peer w1 7 []",
        "RDATA of_a_newer_peer w1 6 []",
    )

    def test_healthy(self) -> None:
        """A healthy deployment with two recorders has no finding."""
        self.assertEqual(order(self.healthy), ([], []))

    newer_row = order_case(
        "RDATA events w1 5 []", "RDATA events w1 7 []", "RDATA events w1 6 []"
    )

    def test_behind_a_newer_row(self) -> None:
        """A row after a newer row of its writer is out of order."""
        found_, its_evidence = order(self.newer_row)
        self.assertEqual(
            found_, [("row_out_of_order", "error", "events", "w1", 6, 6, 1)]
        )
        lines = [{"line_number": 3, "line": "RDATA events w1 6 ...", "behind_line": 2}]
        self.assertEqual(its_evidence, [{"recording": "r.jsonl", "lines": lines}])

    position = order_case(
        "POSITION events w1 3 8",
        "POSITION events w1 8 9",
        "RDATA events w1 6 []",
        "RDATA events w1 10 []",
    )

    def test_behind_a_position(self) -> None:
        """A row whose absence an earlier POSITION has announced is out of order."""
        found_, (its_evidence,) = order(self.position)
        self.assertEqual(
            found_, [("row_out_of_order", "error", "events", "w1", 6, 6, 1)]
        )
        self.assertEqual(its_evidence["lines"][0]["behind_line"], 1)

    twice = order_case(*(f"RDATA events w1 {token} []" for token in (5, 7, 5, 7)))

    def test_twice(self) -> None:
        """A row that was sent twice is reported with both lines."""
        found_, (its_evidence,) = order(self.twice)
        self.assertEqual(
            found_, [("row_twice_on_wire", "warning", "events", "w1", 5, 7, 2)]
        )
        self.assertEqual(
            [
                (each["line_number"], each["behind_line"])
                for each in its_evidence["lines"]
            ],
            [(3, 1), (4, 2)],
        )

    late = order_case(
        *(f"RDATA events w1 {token} []" for token in (5, 7, 6)), idempotent=("events",)
    )

    def test_idempotent(self) -> None:
        """A late row of an idempotent stream is only a note."""
        found_, _ = order(self.late)
        self.assertEqual(
            found_, [("late_invalidation", "info", "events", "w1", 6, 6, 1)]
        )


class ResetTests(SynchronousTestCase):
    """Tests for streams that are reset."""

    resets = CASES.add(
        lines=lines_of(
            [
                "RDATA typing w1 649 []",
                "POSITION typing w1 0 0",
                "RDATA typing w1 9 []",
                "POSITION typing w1 9 10",
                "RDATA typing w1 2 []",
                "RDATA events w1 9 []",
                "POSITION events w1 8 8",
                "RDATA events w2 7 []",
                "POSITION events w1 9 9",
            ]
        ),
        in_memory=("typing",),
    )

    def test_resets(self) -> None:
        """A reset of a stream is reported, whether a POSITION or a row shows it."""
        self.assertEqual(
            found(self.resets.findings("stream_reset")),
            [
                ("stream_reset", "info", "events", "w1", 8, 9, 1),
                ("stream_reset", "info", "typing", "w1", 0, 649, 1),
                ("stream_reset", "info", "typing", "w1", 2, 10, 1),
            ],
        )


class DamageTests(SynchronousTestCase):
    """Tests for damaged recordings."""

    damage = CASES.add(
        lines=[
            (*line[:-1], line[1] in bad)
            for recording, bad in (
                ("whole", ()),
                ("torn", (3,)),
                ("damaged", (2,)),
                ("both", (1, 3)),
            )
            for line in lines_of(["PING 1"] * 3, recording)
        ]
    )

    def test_damage(self) -> None:
        """
        Damage within a recording is reported as damage; an incomplete last line as a
        recording that was cut off.
        """
        findings = self.damage.findings()

        self.assertEqual(
            {
                each["recording"]: (finding.kind, each["first_line_number"])
                for finding, each in zip(findings, evidence(findings), strict=True)
            },
            {
                "torn": ("recording_cut_off", 3),
                "damaged": ("recording_damaged", 2),
                "both": ("recording_damaged", 1),
            },
        )

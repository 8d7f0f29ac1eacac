"""Tests for the checks of an audit, the queries in ``checks.sql``."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.audit.job import CHECKS, COMMANDS_TWICE, run_check
from tests.pipeline.audits import Deployment, Found, Key, evidence, found, lines_of

TWO_WRITERS, GONE, GAPS, AHEAD = (
    CHECKS[name] for name in ("two_writers", "gone", "gaps", "ahead")
)
DAMAGE, ORDER, RESET, NOT_SEEN = (
    CHECKS[name] for name in ("damage", "order", "reset", "not_seen")
)
ROWS_TWICE, NOT_ARCHIVED = CHECKS["rows_twice"], CHECKS["not_archived"]

EVENTS = tuple(("events", "w1", id_) for id_ in (2, 3, 5))

#: ``account_data`` does not record the writer.
BOTH: dict[str, Any] = {
    "persisted": ("events", "account_data"),
    "nameless": ("account_data",),
}


class CheckTests(SynchronousTestCase):
    """Tests for the conversion of rows to findings."""

    def test_columns(self) -> None:
        """
        A missing column is null; a null name is an unknown writer; evidence has no
        nulls.
        """
        sql = """
            SELECT 'row_gone' AS kind, NULL AS instance_name, 2 AS count,
              '{instance_name} has {count}' AS message,
              {it: {n: 9, m: NULL}} AS evidence
        """
        (finding,) = Deployment().run(sql)
        self.assertEqual(
            found([finding]), [("row_gone", "info", None, None, None, None, 2)]
        )
        self.assertEqual(finding.message, "an unknown writer has 2")
        self.assertEqual(evidence([finding]), [{"it": {"n": 9}}])

    def test_kind_of_each_row(self) -> None:
        """The kind may be a column; each kind has its own severity."""
        sql = """
            SELECT unnest(['row_gone', 'token_ahead']) AS kind, 'x' AS message,
              {x: NULL} AS evidence
        """
        findings = Deployment().run(sql)
        self.assertEqual(
            [(each.kind, each.severity.value) for each in findings],
            [("row_gone", "info"), ("token_ahead", "error")],
        )


class TwoWritersTests(SynchronousTestCase):
    """Tests for ids that two writers have used."""

    def test_of_two_writers(self) -> None:
        """
        An id with rows of two writers is an error, in the tables or across sources.
        """
        deployment = Deployment(
            tables=[
                ("events", "w1", 2),
                ("events", "w2", 3),
                ("events", "w1", 4),
                ("events", "w2", 4),
            ],
            archive=[("events", "w1", 2), ("events", "w1", 3)],
        )

        self.assertEqual(
            found(deployment.run(TWO_WRITERS)),
            [("id_of_two_writers", "error", "events", "w1", 3, 4, 2)],
        )

    def test_healthy(self) -> None:
        """
        An id with several rows, with a table that does not record the writer, or with a
        row that another instance sent is not reported.
        """
        deployment = Deployment(
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

        self.assertEqual(deployment.run(TWO_WRITERS), [])


class GapTests(SynchronousTestCase):
    """Tests for ids without a row, and for rows that were deleted."""

    def test_gaps(self) -> None:
        """
        An id without a row of any writer is reported; an id of another writer is not a
        gap.
        """
        deployment = Deployment(
            tables=[("events", "w1", 2), ("events", "w2", 3), ("events", "w1", 9)],
            archive=[("events", "w1", 5)],
            lines=lines_of(["RDATA events w2 6 []"]),
        )

        gaps = deployment.run(GAPS)

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
            found(deployment.run(GONE)),
            [
                ("row_gone", "info", "events", "w1", 5, 5, 1),
                ("row_gone", "info", "events", "w2", 6, 6, 1),
            ],
        )

    def test_many(self) -> None:
        """Beyond the maximum, gaps are reported together."""
        ids = (3, 4, 5, 7, 9, 20, 24, 25)
        deployment = Deployment(tables=[("events", "w1", id_) for id_ in ids])
        with deployment.workspace() as database:
            database.execute("CREATE OR REPLACE MACRO max_gaps() AS 2")
            findings = list(run_check(database, GAPS))

        self.assertEqual(
            found(findings),
            [
                ("id_without_row", "info", "events", None, 10, 19, 10),
                ("id_without_row", "info", "events", None, 21, 23, 3),
                ("id_without_row", "info", "events", None, 6, 8, 2),
            ],
        )


class AheadTests(SynchronousTestCase):
    """Tests for tokens beyond the last id that a stream's sequence has allocated."""

    def test_ahead(self) -> None:
        """A received or archived token beyond the last allocated id is an error."""
        deployment = Deployment(
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

        findings = deployment.run(AHEAD)

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


class ArchiveTests(SynchronousTestCase):
    """Tests for archives with repeated or missing rows."""

    def test_rows_twice(self) -> None:
        """
        A row that is archived twice is an error; two rows of the same token are not.
        """
        rows = [("events", "w1", id_, index) for id_ in (2, 3) for index in (0, 1)]
        twice = [("events", "w1", 3)] * 2
        with Deployment(archive=[("events", "w1", 2), *twice]).workspace() as database:
            database.executemany("INSERT INTO archived VALUES (?, ?, ?, ?)", rows)
            self.assertEqual(list(run_check(database, ROWS_TWICE)), [])
            database.execute("INSERT INTO archived FROM archived")
            findings = list(run_check(database, ROWS_TWICE))
        self.assertEqual(
            found(findings),
            [("row_twice_in_archive", "error", "events", "w1", 3, 3, 2)],
        )
        (rows_,) = (each["rows"] for each in evidence(findings))
        self.assertEqual(rows_[0], {"stream_id": 3, "row_index": 0, "times": 2})

    def test_commands_twice(self) -> None:
        """A recorded line that is archived twice is an error."""
        lines = [*lines_of(["PING 1", "PING 2"]), *lines_of(["PING 1"], "other")]

        self.assertEqual(
            found(Deployment(lines=[*lines, lines[1]]).run(COMMANDS_TWICE)),
            [("command_twice_in_archive", "error", None, None, None, None, 1)],
        )

    def test_not_archived(self) -> None:
        """
        A row that is missing between archived rows of its writer is an error, unless it
        was purged.
        """
        deployment = Deployment(
            tables=[
                # These rows are before the first archived id and after the last one.
                *(("events", "w1", id_) for id_ in (2, 5, 6, 7, 9)),
                # This row's writer has no archived rows.
                ("events", "w2", 8),
                ("account_data", "", 6),
            ],
            archive=[
                ("events", "w1", 5),
                ("events", "w1", 7),
                ("account_data", "", 5),
                ("account_data", "", 8),
            ],
            **BOTH,
        )
        account_data = ("row_not_archived", "error", "account_data", None, 6, 6, 1)
        with deployment.workspace() as database:
            self.assertEqual(
                found(run_check(database, NOT_ARCHIVED)),
                [account_data, ("row_not_archived", "error", "events", "w1", 6, 6, 1)],
            )
            database.execute("INSERT INTO purged VALUES ('events', 4, 6)")
            self.assertEqual(found(run_check(database, NOT_ARCHIVED)), [account_data])


W1 = (("w1", 2), ("w1", 3), ("w1", 5))
PINGS = ("RDATA events w9 1 []",) * 70


@attrs.frozen
class Case:
    """Recorded lines of ``events``, and its committed rows.

    :ivar rows: writers and ids of the rows in tables.
    :ivar archived: writers and ids of the rows in an archive.
    """

    lines: tuple[str, ...]
    rows: tuple[tuple[str, int], ...] = W1
    archived: tuple[tuple[str, int], ...] = ()
    more: dict[str, Any] = attrs.field(factory=dict)

    def lost(self) -> list[tuple[int, int]]:
        """Return ``(id, line number)`` of each lost row."""

        def keys(rows: tuple[tuple[str, int], ...]) -> list[Key]:
            return [("events", *row) for row in rows]

        deployment = Deployment(
            tables=keys(self.rows),
            archive=keys(self.archived),
            lines=lines_of(self.lines),
            **self.more,
        )
        with deployment.workspace() as database:
            lost = database.execute(
                "SELECT stream_id, line_number FROM lost"
            ).fetchall()
            return sorted(lost)


class AnnouncedAbsentTests(SynchronousTestCase):
    """Tests for committed rows whose absence a POSITION announced."""

    def test_skipped_by_position(self) -> None:
        """A committed row in the range of a POSITION is lost if it was never sent."""
        case = Case(
            (
                "RDATA events w1 2 []",
                "POSITION events w1 2 3",
                "POSITION events w1 3 4",
                "RDATA events w1 5 []",
            )
        )
        self.assertEqual(case.lost(), [(3, 2)])

    def test_first_line(self) -> None:
        """
        The POSITION and the committed row suffice, even if no earlier line was
        recorded.
        """
        case = Case(("POSITION events w1 1 6",))
        self.assertEqual(case.lost(), [(2, 1), (3, 1), (5, 1)])

    def test_only_archived(self) -> None:
        """A row that is only in the archive is treated as committed."""
        case = Case(("POSITION events w1 2 4",), rows=(), archived=W1)
        self.assertEqual(case.lost(), [(3, 1)])

    def test_overlapping_lines(self) -> None:
        """Each lost row is found, even if lines overlap."""
        case = Case(
            (
                "POSITION events w1 2 9",
                "POSITION events w1 1 2",
                "POSITION events w1 4 5",
            )
        )
        self.assertEqual([id_ for id_, _ in case.lost()], [2, 3, 5])

    def test_healthy(self) -> None:
        """
        Rows that were sent, rows of another writer, and rows outside the range are not
        lost.
        """
        case = Case(
            (
                "POSITION events w1 2 2",
                "RDATA events w1 3 []",
                "POSITION events w1 3 4",
                # A POSITION that answers REPLICATE repeats its token, and announces no
                # absence.
                "POSITION events w1 5 5",
                "POSITION events w1 5 9",
                # Another instance sends the row.
                "RDATA events w3 7 []",
                "POSITION events w2 6 9",
            ),
            rows=(*W1, ("w2", 7), ("", 8)),
        )
        self.assertEqual(case.lost(), [])

    def test_sole_writer(self) -> None:
        """
        If the table does not record the writer, the row is attributed to the sole
        writer of the stream.
        """
        case = Case(
            ("POSITION events w1 2 3", "POSITION events w2 4 5"),
            rows=(("", 3), ("", 5)),
            more={"nameless": ("events",), "sole_writers": {"events": "w1"}},
        )
        self.assertEqual(case.lost(), [(3, 1)])

    def test_late_rows(self) -> None:
        """
        A row of an idempotent stream is lost only if it does not arrive for a long
        time.
        """
        line = "POSITION events w1 2 3"
        for lines, lost in (
            ((line,), []),
            ((line, *PINGS), [(3, 1)]),
            ((line, "RDATA events w1 3 []", *PINGS), []),
        ):
            case = Case(lines, more={"idempotent": ("events",)})
            self.assertEqual(case.lost(), lost)

    def test_sent_in_another_recording(self) -> None:
        """A row is not lost if any recording contains it."""
        lines = lines_of(["POSITION events w1 2 3"])
        lines += lines_of(["RDATA events w1 3 []"], "other.jsonl")
        with Deployment(tables=EVENTS, lines=lines).workspace() as database:
            self.assertEqual(database.execute("FROM lost").fetchall(), [])

    def test_evidence(self) -> None:
        """The evidence names the file, the line, the tables and the rows."""
        lines = lines_of(["RDATA events w1 2 []", "POSITION events w1 2 4"])
        with Deployment(tables=EVENTS, lines=lines).workspace() as database:
            database.execute(
                """INSERT INTO texts VALUES ('events', 3, 0, '["row 3"]', 'tables')"""
            )
            findings = list(run_check(database, CHECKS["announced_absent"]))

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
                    "line": "POSITION events w1 2 4",
                    "tables": ["events", "state"],
                    "rows": [
                        {
                            "stream_id": 3,
                            "source": "tables",
                            "row_index": 0,
                            "row": '["row 3"]',
                        }
                    ],
                }
            ],
        )


class NotSeenTests(SynchronousTestCase):
    """Tests for rows that are missing between recorded rows."""

    def not_seen(self, *lines: str) -> list[Found]:
        return found(Deployment(tables=EVENTS, lines=lines_of(lines)).run(NOT_SEEN))

    def test_missing(self) -> None:
        """A row that is missing between two recorded rows is reported."""
        self.assertEqual(
            self.not_seen("RDATA events w1 2 []", "RDATA events w1 5 []"),
            [("row_not_seen", "info", "events", "w1", 3, 3, 1)],
        )

    def test_healthy(self) -> None:
        """
        A row before the recording, or one that a POSITION covers, is not reported.
        """
        self.assertEqual(
            self.not_seen(
                "RDATA events w1 3 []", "POSITION events w1 5 5", "RDATA events w1 6 []"
            ),
            [],
        )


class OrderTests(SynchronousTestCase):
    """Tests for rows that readers discard."""

    def order(self, *lines: str, idempotent: tuple[str, ...] = ()) -> Any:
        """Return the findings, and their evidence."""
        recorded = lines_of(lines)
        # Rows that two recorders received are not duplicates.
        again = lines_of(lines, "again.jsonl") if not idempotent else []
        deployment = Deployment(
            lines=[*recorded, *again], idempotent=idempotent, in_memory=("typing",)
        )
        findings = [
            each for each in deployment.run(ORDER) if "again.jsonl" not in each.evidence
        ]
        return found(findings), evidence(findings)

    def test_healthy(self) -> None:
        """A healthy deployment with two recorders has no finding."""
        lines = (
            "POSITION events w1 4 4",
            "RDATA events w1 batch []",
            "RDATA events w1 6 []",
            # Another writer has a lower token.
            "RDATA events w2 5 []",
            "POSITION events w2 5 6",
            # The answer to REPLICATE has the writer's current token; a row that was
            # already being sent follows.
            "POSITION events w1 9 9",
            "RDATA events w1 8 []",
            "RDATA events w1 9 []",
            "POSITION events w1 9 12",
            # The recorder lost its connection, and an instance restarted slightly
            # behind.
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
        self.assertEqual(self.order(*lines), ([], []))

    def test_behind_a_newer_row(self) -> None:
        """A row after a newer row of its writer is out of order."""
        found_, its_evidence = self.order(
            "RDATA events w1 5 []", "RDATA events w1 7 []", "RDATA events w1 6 []"
        )
        self.assertEqual(
            found_, [("row_out_of_order", "error", "events", "w1", 6, 6, 1)]
        )
        lines = [{"line_number": 3, "line": "RDATA events w1 6 ...", "behind_line": 2}]
        self.assertEqual(its_evidence, [{"recording": "r.jsonl", "lines": lines}])

    def test_behind_a_position(self) -> None:
        """A row whose absence an earlier POSITION has announced is out of order."""
        found_, (its_evidence,) = self.order(
            "POSITION events w1 3 8",
            "POSITION events w1 8 9",
            "RDATA events w1 6 []",
            "RDATA events w1 10 []",
        )
        self.assertEqual(
            found_, [("row_out_of_order", "error", "events", "w1", 6, 6, 1)]
        )
        self.assertEqual(its_evidence["lines"][0]["behind_line"], 1)

    def test_twice(self) -> None:
        """A row that was sent twice is reported with both lines."""
        lines = [f"RDATA events w1 {token} []" for token in (5, 7, 5, 7)]
        found_, (its_evidence,) = self.order(*lines)
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

    def test_idempotent(self) -> None:
        """A late row of an idempotent stream is only a note."""
        lines = [f"RDATA events w1 {token} []" for token in (5, 7, 6)]
        found_, _ = self.order(*lines, idempotent=("events",))
        self.assertEqual(
            found_, [("late_invalidation", "info", "events", "w1", 6, 6, 1)]
        )


class ResetTests(SynchronousTestCase):
    """Tests for streams that are reset."""

    def test_resets(self) -> None:
        """A reset of a stream is reported, whether a POSITION or a row shows it."""
        lines = lines_of(
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
        )

        findings = Deployment(lines=lines, in_memory=("typing",)).run(RESET)

        self.assertEqual(
            found(findings),
            [
                ("stream_reset", "info", "events", "w1", 8, 9, 1),
                ("stream_reset", "info", "typing", "w1", 0, 649, 1),
                ("stream_reset", "info", "typing", "w1", 2, 10, 1),
            ],
        )


class DamageTests(SynchronousTestCase):
    """Tests for damaged recordings."""

    def test_damage(self) -> None:
        """
        Damage within a recording is reported as damage; an incomplete last line as a
        recording that was cut off.
        """
        lines_with_damage = {"whole": (), "torn": (3,), "damaged": (2,), "both": (1, 3)}
        lines = [
            (*line[:-1], line[1] in bad)
            for recording, bad in lines_with_damage.items()
            for line in lines_of(["PING 1"] * 3, recording)
        ]

        findings = Deployment(lines=lines).run(DAMAGE)

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

"""Tests for :mod:`synapse_replication.pipeline.audit.checks.announced`."""

from __future__ import annotations

import functools
from typing import Any

import attrs
from pyspark.sql import functions as sf
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.audit.checks.announced import (
    announced_absent,
    announced_findings,
    not_seen_findings,
)
from tests.pipeline.audits import (
    TOKENS_SCHEMA,
    Found,
    evidence,
    found,
    ids_of_rows,
    make_rows,
    make_tokens,
    tokens_of,
)
from tests.pipeline.shared_session import shared_session

EVENTS = tuple(("events", "w1", id_) for id_ in (2, 3, 5))
W1 = (("w1", 2), ("w1", 3), ("w1", 5))
PINGS = ("RDATA events w9 1 []",) * 70


@attrs.frozen
class Case:
    """Recorded lines and committed rows; ``S`` is replaced by the stream of the case.

    :ivar rows: writers and ids of the rows in tables.
    :ivar archived: writers and ids of the rows in an archive.
    """

    lines: tuple[str, ...]
    rows: tuple[tuple[str, int], ...] = W1
    archived: tuple[tuple[str, int], ...] = ()
    kind: str = "events"


CASES = {
    "skipped": Case(
        (
            "RDATA S w1 2 []",
            "POSITION S w1 2 3",
            "POSITION S w1 3 4",
            "RDATA S w1 5 []",
        )
    ),
    "first line": Case(("POSITION S w1 1 6",)),
    "archived": Case(("POSITION S w1 2 4",), rows=(), archived=W1),
    "overlapping": Case(
        ("POSITION S w1 2 9", "POSITION S w1 1 2", "POSITION S w1 4 5")
    ),
    "healthy": Case(
        (
            "POSITION S w1 2 2",
            "RDATA S w1 3 []",
            "POSITION S w1 3 4",
            # A POSITION that answers REPLICATE repeats its token, and announces no
            # absence.
            "POSITION S w1 5 5",
            "POSITION S w1 5 9",
            # Another instance sends the row.
            "RDATA S w3 7 []",
            "POSITION S w2 6 9",
        ),
        rows=(*W1, ("w2", 7), ("", 8)),
    ),
    "sole writer": Case(
        ("POSITION S w1 2 3", "POSITION S w2 4 5"),
        rows=(("", 3), ("", 5)),
        kind="nameless",
    ),
    "may arrive": Case(("POSITION S w1 2 3",), kind="caches"),
    "never arrived": Case(("POSITION S w1 2 3", *PINGS), kind="caches"),
    "arrived late": Case(
        ("POSITION S w1 2 3", "RDATA S w1 3 []", *PINGS), kind="caches"
    ),
}


def streams_of(kind: str) -> list[str]:
    return [name.replace(" ", "_") for name in CASES if CASES[name].kind == kind]


@functools.cache
def absent() -> dict[str, list[tuple[int, int]]]:
    """
    Return ``(id, line number)`` of each lost row of each case; run all cases at once,
    because Spark is slow.
    """
    rows: list[tuple[str, str, int]] = []
    archived: list[tuple[str, str, int]] = []
    tokens: list[Any] = []
    for name, case in CASES.items():
        stream = name.replace(" ", "_")
        rows += [(stream, *row) for row in case.rows]
        archived += [(stream, *row) for row in case.archived]
        lines = [line.replace(" S ", f" {stream} ") for line in case.lines]
        tokens += tokens_of(lines, f"{stream}.jsonl")
    wire = shared_session().createDataFrame(tokens, TOKENS_SCHEMA)
    streams = [name.replace(" ", "_") for name in CASES]
    nameless = streams_of("nameless")
    ids = ids_of_rows(make_rows(*rows), make_rows(*archived), wire, streams, nameless)
    sole = dict.fromkeys(nameless, "w1")
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in CASES}
    for row in announced_absent(ids, wire, streams_of("caches"), sole).collect():
        found[row.stream.replace("_", " ")].append((row.stream_id, row.line_number))
    return {name: sorted(lost) for name, lost in found.items()}


class AnnouncedAbsentTests(SynchronousTestCase):
    """Tests for committed rows whose absence a POSITION announced."""

    def test_skipped_by_position(self) -> None:
        """A committed row in the range of a POSITION is lost if it was never sent."""
        self.assertEqual(absent()["skipped"], [(3, 2)])

    def test_first_line(self) -> None:
        """
        The POSITION and the committed row suffice, even if no earlier line was
        recorded.
        """
        self.assertEqual(absent()["first line"], [(2, 1), (3, 1), (5, 1)])

    def test_only_archived(self) -> None:
        """A row that is only in the archive is treated as committed."""
        self.assertEqual(absent()["archived"], [(3, 1)])

    def test_overlapping_lines(self) -> None:
        """Each lost row is found, even if lines overlap."""
        self.assertEqual([id_ for id_, _ in absent()["overlapping"]], [2, 3, 5])

    def test_healthy(self) -> None:
        """
        Rows that were sent, rows of another writer, and rows outside the range are not
        lost.
        """
        self.assertEqual(absent()["healthy"], [])

    def test_sole_writer(self) -> None:
        """
        If the table does not record the writer, the row is attributed to the sole
        writer of the stream.
        """
        self.assertEqual(absent()["sole writer"], [(3, 1)])

    def test_late_rows(self) -> None:
        """
        A row of an idempotent stream is lost only if it does not arrive for a long
        time.
        """
        self.assertEqual(absent()["may arrive"], [])
        self.assertEqual(absent()["never arrived"], [(3, 1)])
        self.assertEqual(absent()["arrived late"], [])

    def test_sent_in_another_recording(self) -> None:
        """A row is not lost if any recording contains it."""
        tokens = make_tokens(["POSITION events w1 2 3"]).unionByName(
            make_tokens(["RDATA events w1 3 []"], "other.jsonl")
        )
        ids = ids_of_rows(make_rows(*EVENTS), make_rows(), tokens, ["events"])

        self.assertEqual(announced_absent(ids, tokens, [], {}).collect(), [])

    def test_evidence(self) -> None:
        """The evidence names the file, the line, the tables and the rows."""
        tokens = make_tokens(["RDATA events w1 2 []", "POSITION events w1 2 4"])
        rows = make_rows(*EVENTS)
        ids = ids_of_rows(rows, make_rows(), tokens, ["events"])
        lost = announced_absent(ids, tokens, [], {})
        texts = rows.withColumn("source", sf.lit("tables"))

        findings = announced_findings(lost, texts, {"events": ["events", "state"]})

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
        tokens = make_tokens(lines)
        ids = ids_of_rows(make_rows(*EVENTS), make_rows(), tokens, ["events"])
        return found(not_seen_findings(ids, tokens, ["caches"], {}))

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

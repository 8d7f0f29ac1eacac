"""Tests for the jobs and queries of a report."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.pipeline.deployment import report_command
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.audit.findings import AuditFinding
from synapse_replication.pipeline.audit.kinds import Severity
from synapse_replication.pipeline.recorded_lines import lines_frame
from synapse_replication.pipeline.report.counts import (
    LINE_COLUMNS,
    WRITTEN,
    ReportData,
    collect_report,
)
from synapse_replication.pipeline.report.tallies import COLUMNS, SCHEMA, tally
from synapse_replication.pipeline.scan import table_frame
from synapse_replication.pipeline.schemas import ROWS_SCHEMA, WIRE_SCHEMA, with_texts
from synapse_replication.pipeline.spark.session import own_session
from tests.pipeline.shared_session import shared_session

UTC = datetime.timezone.utc
BEGINNING = datetime.datetime(2026, 1, 31, tzinfo=UTC)


def at(seconds: float) -> datetime.datetime:
    return BEGINNING + datetime.timedelta(seconds=seconds)


LINES_SCHEMA = pa.schema(
    [*map(WIRE_SCHEMA.field, LINE_COLUMNS), pa.field("is_damaged", pa.bool_())]
)

#: Seconds, command, stream, writer, token, previous token and row of a line.
Line = tuple[Any, ...]


def collect(
    rows: Sequence[tuple[Any, ...]] = (), lines: Iterable[Line] = (), **options: Any
) -> ReportData:
    """Collect the report of rows and lines, those that are given."""
    recorded = []
    for number, line in enumerate(lines, 1):
        seconds, command, stream, writer, token, previous, row = line
        head = ("a.jsonl", number, float(seconds), at(seconds), command)
        recorded.append((*head, stream, writer, token, previous, row, command is None))
    session = own_session(shared_session())

    def table(schema: pa.Schema, values: Sequence[tuple[Any, ...]]) -> pa.Table:
        found = [dict(zip(schema.names, each, strict=True)) for each in values]
        return pa.Table.from_pylist(found, schema)

    frames: dict[str, Any] = {}
    if rows:
        stored = table(with_texts(ROWS_SCHEMA, *COLUMNS), rows)
        # As of several tasks.
        counted = [
            each
            for batch in stored.to_batches(max_chunksize=3)
            for each in tally([batch], options.get("window_s"))
        ]
        frames["tallies"] = table_frame(session, pa.Table.from_batches(counted, SCHEMA))
        frames["written"] = table_frame(session, stored.select(WRITTEN.names))
    if recorded:
        frames["wire"] = table_frame(session, table(LINES_SCHEMA, recorded))
    return collect_report(session, **frames, **options)


def event(room: str) -> str:
    return json.dumps(["ev", ["$e", room, "m.room.message", None]])


ROWS = [
    # Three tokens of w1, with 1, 1 and 3 rows; the last token is in another window.
    ("events", "w1", 10, 0, at(0.5), "!a", None),
    ("events", "w1", 11, 0, at(0.75), "!a", None),
    ("events", "w1", 13, 0, at(61), "!b", None),
    ("events", "w1", 13, 1, at(61), "!b", None),
    ("events", "w1", 13, 2, at(61), "!a", None),
    ("events", "w2", 12, 0, at(1), "!b", None),
    # The table does not record the time of writing.
    ("push_rules", "w1", 3, 0, None, None, "@u:x"),
    ("push_rules", "w1", 4, 0, None, None, "@u:x"),
]

WIRE = [
    (0.0, "POSITION", "events", "w1", 9, 9, None),
    (0.51, "RDATA", "events", "w1", 10, None, event("!a")),
    (0.95, "RDATA", "events", "w1", 11, None, event("!a")),
    (61.1, "RDATA", "events", "w1", None, None, event("!b")),
    (61.2, "RDATA", "events", "w1", None, None, event("!b")),
    (61.5, "RDATA", "events", "w1", 13, None, event("!a")),
    # The row has its own time in milliseconds.
    (
        *(2.0, "RDATA", "caches", "w9", 5, None),
        json.dumps(["f", ["k"], int(at(1.996).timestamp() * 1000)]),
    ),
    # The last line of this batch is not in the recording.
    (70.0, "RDATA", "events", "w1", None, None, event("!c")),
    (71.0, None, None, None, None, None, None),
]


@functools.cache
def collected() -> ReportData:
    """
    Return the report of these rows and lines, which is collected once.
    """
    findings = [
        AuditFinding(
            kind="id_without_row",
            stream="events",
            count=3,
            message="3 ids have no row",
            evidence="{}",
        ),
        AuditFinding(kind="announced_absent", message="7 is missing", evidence="{}"),
    ]
    return collect(
        ROWS,
        WIRE,
        findings=findings,
        sources=["tests"],
        window_s=60,
        identify=True,
    )


class CollectTests(SynchronousTestCase):
    """Tests for the figures that result from a few rows and lines."""

    def test_totals(self) -> None:
        """
        Each writer has the number of its rows and tokens, and the first and the last
        token and time.
        """
        self.assertEqual(
            collected().totals,
            [
                SimpleNamespace(
                    stream="events",
                    instance_name="w1",
                    rows=5,
                    tokens=3,
                    first_token=10,
                    last_token=13,
                    timed=5,
                    first_ts=at(0.5),
                    last_ts=at(61),
                ),
                SimpleNamespace(
                    stream="events",
                    instance_name="w2",
                    rows=1,
                    tokens=1,
                    first_token=12,
                    last_token=12,
                    timed=1,
                    first_ts=at(1),
                    last_ts=at(1),
                ),
                SimpleNamespace(
                    stream="push_rules",
                    instance_name="w1",
                    rows=2,
                    tokens=2,
                    first_token=3,
                    last_token=4,
                    timed=0,
                    first_ts=None,
                    last_ts=None,
                ),
            ],
        )

    def test_over_time(self) -> None:
        """
        Rows are counted in the window in which they were written; rows without a time
        are omitted.
        """
        start = int(BEGINNING.timestamp())
        self.assertEqual(
            {(c.instance_name, c.start - start, c.rows) for c in collected().over_time},
            {("w1", 0, 2), ("w1", 60, 3), ("w2", 0, 1)},
        )

    def test_batches(self) -> None:
        """Tokens are counted by the number of their rows."""
        batches = [b for b in collected().batches if b.stream == "events"]
        self.assertEqual(
            batches,
            [
                SimpleNamespace(
                    stream="events", bucket=1, tokens=3, p50=1, p99=3, largest=3
                ),
                SimpleNamespace(
                    stream="events", bucket=2, tokens=1, p50=1, p99=3, largest=3
                ),
            ],
        )

    def test_arrived(self) -> None:
        """
        The rows of a batch arrive with its last line; rows of an incomplete batch do
        not arrive.
        """
        start = int(BEGINNING.timestamp())
        self.assertEqual(
            {(c.stream, c.start - start, c.rows) for c in collected().arrived},
            {("events", 0, 2), ("events", 60, 3), ("caches", 0, 1)},
        )

    def test_lags(self) -> None:
        """
        The lag of a token is the time from the writing of its row to the arrival of its
        line.
        """
        self.assertEqual(
            collected().lags,
            [
                SimpleNamespace(
                    stream="caches",
                    start=None,
                    tokens=1,
                    p50=4.0,
                    p95=4.0,
                    p99=4.0,
                    least=4.0,
                ),
                # 10, 200 and 500 ms.
                SimpleNamespace(
                    stream="events",
                    start=None,
                    tokens=3,
                    p50=200.0,
                    p95=500.0,
                    p99=500.0,
                    least=10.0,
                ),
            ],
        )
        first = min(
            (lag for lag in collected().lags_over_time if lag.stream == "events"),
            key=lambda lag: lag.start or 0,
        )
        self.assertEqual((first.tokens, first.p50, first.p99), (2, 10.0, 200.0))

    def test_commands(self) -> None:
        """Lines are counted by command, lines that cannot be parsed as ``None``."""
        counted = {c.command: c.lines for c in collected().commands}
        self.assertEqual(counted, {"RDATA": 7, "POSITION": 1, None: 1})

    def test_hottest(self) -> None:
        """
        Rooms and users are found in each kind of row; the most frequent ones are first.
        """
        self.assertEqual(
            collected().hottest,
            [
                SimpleNamespace(kind="room", name="!a", rows=3),
                SimpleNamespace(kind="room", name="!b", rows=3),
                SimpleNamespace(kind="user", name="@u:x", rows=2),
            ],
        )

    def test_findings(self) -> None:
        """Errors and warnings are listed individually, notes in groups."""
        data = collected()
        self.assertEqual([f.severity for f in data.findings or ()], [Severity.ERROR])
        self.assertEqual(
            data.notes,
            [
                SimpleNamespace(
                    kind="id_without_row",
                    stream="events",
                    findings=1,
                    count=3,
                    example="3 ids have no row",
                )
            ],
        )
        self.assertEqual(data.finding_count, {"error": 1, "info": 1})

    def test_events(self) -> None:
        """Catch-ups of readers and resets of streams are found.

        The first POSITION is neither, nor is one that repeats a known token, nor is one
        after late rows of ``caches``.
        """
        data = collect(
            lines=[
                (0, "POSITION", "events", "w1", 9, 9, None),
                (1, "RDATA", "events", "w1", 10, None, "[]"),
                (2, "POSITION", "events", "w1", 12, 10, None),
                (3, "POSITION", "events", "w2", 8, 8, None),
                (4, "POSITION", "events", "w1", 15, 14, None),
                (5, "POSITION", "typing", "w1", 649, 649, None),
                (6, "POSITION", "typing", "w1", 0, 0, None),
                (7, "RDATA", "caches", "w1", 61, None, "[]"),
                (8, "RDATA", "caches", "w1", 57, None, "[]"),
                (9, "POSITION", "caches", "w1", 61, 61, None),
            ],
        )
        found = [
            (row.kind, row.stream, row.known, row.line_number) for row in data.events
        ]
        self.assertEqual(
            found, [("reset", "typing", 649, 7), ("catch-up", "events", 12, 5)]
        )


class RecordingAloneTests(SynchronousTestCase):
    """Tests for the command with only a recording, which has no date."""

    def test_command(self) -> None:
        """
        The page shows times since the beginning of the recording, no lag, and no names.
        """
        lines = [
            (100.0, "POSITION events w1 9 9"),
            (160.5, f"RDATA events w1 10 {event('!secret:x')}"),
        ]
        recording = Path("report.jsonl").absolute()
        recording.write_text(
            "".join(
                json.dumps({"t": t, "channel": "x", "line": line}) + "\n"
                for t, line in lines
            )
        )
        out = Path(self.mktemp()).absolute()
        arguments = ["--recording", str(recording), "--out", str(out)]
        result = CliRunner().invoke(report_command, arguments, catch_exceptions=False)
        self.assertIn("report.html", result.output)
        page = (out / "report.html").read_text()
        self.assertTrue("The recordings have no date" in page)
        self.assertTrue("No lag could be measured" in page)
        self.assertTrue("Not audited" in page)
        self.assertFalse("secret" in page)
        again = self.assertRaises(
            PipelineError,
            CliRunner().invoke,
            report_command,
            arguments,
            catch_exceptions=False,
        )
        self.assertIn("exists: give the name of a new folder", str(again))

    def test_damaged_line(self) -> None:
        """A damaged line, whose ``t`` is 0, does not move the beginning."""
        recording = Path("damaged.jsonl").absolute()
        line = '{{"t": {}, "channel": "x", "line": "RDATA events w1 {} []"}}\n'
        recording.write_text(
            "nonsense\n" + line.format(100, 9) + line.format(160.5, 10)
        )
        session = own_session(shared_session())
        wire = lines_frame(session, LINE_COLUMNS, [recording], None)
        data = collect_report(session, wire=wire, window_s=1)
        self.assertEqual([each.start for each in data.arrived], [0, 60])

    def test_names(self) -> None:
        """Without rows, rooms and users come from the recorded rows of any kind."""
        rows = [
            ("events", event("!a")),
            ("events", '["state", ["!b", "t", "k", null]]'),
            ("events", '["state-all", ["!a"]]'),
            ("push_rules", '["@u:x"]'),
            ("receipts", '["!b", "m.read", "@u:x", "$e", null, {}]'),
        ]
        lines = [
            (number, "RDATA", stream, "w1", number, None, row)
            for number, (stream, row) in enumerate(rows)
        ]
        data = collect(lines=lines, identify=True)
        self.assertEqual(
            [(hot.name, hot.rows) for hot in data.hottest],
            [("!a", 2), ("!b", 2), ("@u:x", 2)],
        )

    def test_nothing_to_report(self) -> None:
        """Without any input, the error names the options; the exit status is 2."""
        result = CliRunner(env={"SYNAPSE_REPLICATION_DSN": ""}).invoke(
            report_command, ["--out", "never"]
        )
        self.assertEqual(result.exit_code, 2)
        self.assertIn("--archive, or --recording", result.output)

    def test_any_period(self) -> None:
        """Rows of a month and of ten years are counted in windows of that scale."""
        for days in (30, 3650):
            ends = [
                ("events", "w1", token, 0, at(day * 86_400), None, None)
                for token, day in ((1, 0), (2, days))
            ]
            data = collect(ends)
            starts = [each.start for each in data.over_time]
            self.assertEqual(len(starts), 2, days)
            for start, (*_, written, _, _) in zip(sorted(starts), ends, strict=True):
                late = written.timestamp() - start
                self.assertTrue(0 <= late < data.rows_window, (days, late))

    def test_too_many_windows(self) -> None:
        """A window that is too short for the duration is an error."""
        rows = [("events", "w1", n, 0, at(n * 86_400), None, None) for n in (1, 9)]
        error = self.assertRaises(PipelineError, collect, rows, window_s=1)
        self.assertIn("choose a longer window", str(error))

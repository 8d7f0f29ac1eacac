"""Report data made by hand, with every kind of content."""

from __future__ import annotations

import datetime
import functools
import math
from types import SimpleNamespace

from synapse_replication.pipeline.audit.findings import AuditFinding
from synapse_replication.pipeline.report.counts import ReportData, hide_names
from synapse_replication.pipeline.report.plots import Plot, draw_plots

BEGINNING = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.timezone.utc)

_WINDOWS = 48
_WINDOW = 1800

_WRITERS = {
    "events": ("event_persister1", "event_persister2"),
    "receipts": ("stream_writer1",),
    "caches": ("master", "event_persister1", "event_persister2", "sync_worker1"),
    "to_device": ("stream_writer1",),
}


def make_report_data() -> ReportData:
    """Return the report data, which is the same on each call."""
    start = int(BEGINNING.timestamp())
    counts = [
        SimpleNamespace(
            stream=stream,
            instance_name=writer,
            start=start + number * _WINDOW,
            rows=int(
                (400 - 90 * index)
                * (1.2 + math.sin(number / 8 + index))
                / (1 + len(writer) % 3)
            )
            + 1,
        )
        for index, (stream, writers) in enumerate(_WRITERS.items())
        for writer in writers
        for number in range(_WINDOWS)
    ]
    totals = [
        SimpleNamespace(
            stream=stream,
            instance_name=writer,
            rows=12_000 if writer == "event_persister1" else 4711,
            tokens=4000,
            first_token=2,
            last_token=5000,
            timed=4711,
            first_ts=BEGINNING,
            last_ts=BEGINNING + datetime.timedelta(days=1),
        )
        for stream, writers in _WRITERS.items()
        for writer in writers
    ]
    lags = [
        SimpleNamespace(
            stream=stream,
            start=start + number * _WINDOW,
            tokens=100,
            p50=8 + 3 * math.sin(number / 5),
            p95=40 + 20 * math.sin(number / 3),
            p99=300 + 250 * math.sin(number / 4),
            least=1.0,
        )
        for stream in ("events", "caches")
        for number in range(_WINDOWS)
    ]
    return ReportData(
        made=BEGINNING + datetime.timedelta(days=2),
        sources=["rows of the archive /srv/archive", "recordings: wire.jsonl"],
        totals=totals,
        rows_window=_WINDOW,
        over_time=counts,
        batches=[
            SimpleNamespace(
                stream=stream,
                bucket=2**n,
                tokens=4 ** (8 - n),
                p50=1,
                p99=8,
                largest=101,
            )
            for stream in ("events", "to_device")
            for n in range(7)
        ],
        hottest=hide_names(
            [
                SimpleNamespace(kind=kind, name=f"{kind}{n}", rows=900 - 100 * n)
                for kind in ("room", "user")
                for n in range(5)
            ],
            b"key",
        ),
        has_wire=True,
        wire_window=_WINDOW,
        arrived=counts,
        lags=[
            SimpleNamespace(
                stream=stream,
                start=None,
                tokens=4800,
                p50=8.25,
                p95=55.0,
                p99=1500.0,
                least=1.0,
            )
            for stream in ("caches", "events")
        ],
        lags_over_time=lags,
        events=[
            SimpleNamespace(
                kind="catch-up",
                stream="events",
                instance_name="event_persister1",
                received_ts=BEGINNING,
                recording="wire.jsonl",
                line_number=812,
                known=1840,
                prev_token=1847,
                token=1848,
            ),
            SimpleNamespace(
                kind="reset",
                stream="typing",
                instance_name="stream_writer1",
                received_ts=BEGINNING,
                recording="wire.jsonl",
                line_number=900,
                known=649,
                prev_token=0,
                token=0,
            ),
        ],
        event_count=2,
        commands=[
            SimpleNamespace(command="RDATA", lines=31_000),
            SimpleNamespace(command="POSITION", lines=9000),
            SimpleNamespace(command=None, lines=1),
        ],
        findings=[
            AuditFinding(
                kind="announced_absent",
                stream="events",
                instance_name="event_persister1",
                first_token=1848,
                last_token=1848,
                count=1,
                message="event_persister1 announced 1848, and never sent its row",
                evidence="{}",
            ),
        ],
        notes=[
            SimpleNamespace(
                kind="stream_reset",
                stream="typing",
                findings=1,
                count=1,
                example="stream_writer1 began typing again",
            ),
            *(
                SimpleNamespace(
                    kind="id_without_row",
                    stream=stream,
                    findings=40,
                    count=1200,
                    example=f"1 ids of {stream} in 1 gaps have no row of any writer: "
                    "rolled back, replaced, deleted, or lost",
                )
                for stream in ("caches", "events")
            ),
        ],
        finding_count={"error": 1, "info": 81},
    )


@functools.cache
def shared_plots() -> list[Plot]:
    """Draw the plots once for all tests, because it takes one or two seconds."""
    return draw_plots(make_report_data())

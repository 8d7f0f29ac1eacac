"""Tests for :mod:`synapse_replication.pipeline.report.tallies`."""

from __future__ import annotations

import datetime
from collections import Counter

import pyarrow as pa
from hypothesis import given, settings, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.report.tallies import COLUMNS, tally
from synapse_replication.pipeline.report.windows import choose_window
from synapse_replication.pipeline.schemas import ROWS_SCHEMA, with_texts

SCHEMA = with_texts(ROWS_SCHEMA, *COLUMNS)

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)

#: Times in s since 1970; ``None`` if the table does not store them.
_times = st.none() | st.integers(1_700_000_000, 1_800_000_000)
_near = st.integers(1_700_000_000, 1_700_010_000)


def batch(times: list[int | None]) -> pa.RecordBatch:
    """Return a row for each time."""
    rows = [
        {
            "stream": "events",
            "instance_name": f"w{number % 2}",
            "stream_id": number // 3,
            "row_index": number % 3,
            "written_ts": None if at is None else _EPOCH + datetime.timedelta(0, at),
            "room_id": f"!{number % 5}",
            "user_id": f"@{number % 4}" if number % 4 else None,
        }
        for number, at in enumerate(times)
    ]
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


def counted(
    batches: list[pa.RecordBatch], window: int | None
) -> list[dict[str, object]]:
    """Return the tallies of several tasks."""
    tasks = (tally([each], window) for each in batches)
    return [row for task in tasks for found in task for row in found.to_pylist()]


class TallyTests(SynchronousTestCase):
    """Tests for the sums of several tasks' tallies."""

    @settings(derandomize=True, deadline=None)
    @given(st.lists(st.lists(_times | _near, min_size=1), min_size=1, max_size=4))
    def test_windows(self, tasks: list[list[int | None]]) -> None:
        """The rows of each window are all counted, whatever the tasks' spans are."""
        known = [at for times in tasks for at in times if at is not None]
        if not known:
            return
        first, last = (
            _EPOCH + datetime.timedelta(0, end) for end in (min(known), max(known))
        )
        window = choose_window(first, last)
        found: Counter[int] = Counter()
        for row in counted(list(map(batch, tasks)), None):
            if row["counted"] == "time":
                start, rows = row["start"], row["rows"]
                assert isinstance(start, int)
                assert isinstance(rows, int)
                found[start // window * window] += rows
        self.assertEqual(found, Counter(at // window * window for at in known))

    def test_requested_window(self) -> None:
        """A requested window need not be one that can be chosen."""
        (row,) = (
            row
            for row in counted([batch([1_700_000_003, 1_700_000_006])], 7)
            if row["counted"] == "time" and row["instance_name"] == "w0"
        )
        self.assertEqual(row["start"], 1_700_000_003 // 7 * 7)

    def test_rows_and_names(self) -> None:
        """Rows are counted by index, with their bounds; a row may name nobody."""
        rows = counted([batch([None, 1_700_000_000, None, None, None])], None)
        by_index = {
            (row["instance_name"], row["row_index"]): (
                *(row["rows"], row["timed"]),
                *(row["first_token"], row["last_token"]),
            )
            for row in rows
            if row["counted"] == "rows"
        }
        self.assertEqual(
            by_index,
            {
                ("w0", 0): (1, 0, 0, 0),
                ("w1", 1): (1, 1, 0, 0),
                ("w0", 2): (1, 0, 0, 0),
                ("w1", 0): (1, 0, 1, 1),
                ("w0", 1): (1, 0, 1, 1),
            },
        )
        names = {row["name"]: row["rows"] for row in rows if row["name"] is not None}
        self.assertEqual(
            names,
            {"!0": 1, "!1": 1, "!2": 1, "!3": 1, "!4": 1, "@1": 1, "@2": 1, "@3": 1},
        )

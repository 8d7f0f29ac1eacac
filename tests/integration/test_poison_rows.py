"""Tests with rows in the database that are not valid JSON, and real processes."""

from __future__ import annotations

import contextlib
import copy
import json
import re

import psycopg2
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from synapse_replication.instrumentation.status.model import StallReason
from tests.integration.deployment import DeploymentTestCase, get_over_socket

#: JSON texts that PostgreSQL stores and that are not JSON for its readers.
_POISON = st.one_of(
    st.integers(0xD800, 0xDFFF).map(lambda code: f'"\\u{code:04x}"'),
    st.integers(310, 10_000).map(lambda exponent: f"-1e{exponent}"),
    st.integers(4_400, 10_000).map(lambda digits: "7" * digits),
    st.integers(1_100, 3_000).map(lambda depth: "[" * depth + "]" * depth),
)
_HARMLESS = st.sampled_from(["1", "null", '"\\u0000"', '" "', "{}"])
_NESTED = st.recursive(
    _POISON,
    lambda inner: st.one_of(
        st.tuples(_HARMLESS, inner).map(lambda pair: f"[{', '.join(pair)}]"),
        inner.map(lambda text: f'{{"key": \n{text}}}'),
    ),
    max_leaves=3,
)


class PoisonRowTests(DeploymentTestCase):
    """``notes`` has a column of type ``json``, which SQL may fill with anything."""

    def setUp(self) -> None:
        super().setUp()
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection:
            connection.cursor().execute("ALTER TABLE notes ADD COLUMN extra json")
            connection.commit()
        self.shared = copy.deepcopy(self.shared)
        notes = self.shared["synapse_replication"]["streams"][1]
        notes["columns"]["extra"] = "json?"
        self.main["synapse_replication"]["modules"][0]["config"]["more"] = [None]
        page = {"type": "metrics", "path": str(self.folder / "main.page")}
        self.main["listeners"].append(page)
        self.worker["worker_listeners"] = [
            {"type": "metrics", "path": str(self.folder / "reader1.page")}
        ]

    def insert(self, *texts: str) -> int:
        """Insert a row in the name of main for each JSON text; return the last id."""
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection:
            cursor = connection.cursor()
            for text in texts:
                cursor.execute(
                    "INSERT INTO notes VALUES (nextval('notes_seq'), 'master', 'x', 0, "
                    "%s) RETURNING stream_id",
                    [text],
                )
            row = cursor.fetchone()
            connection.commit()
        assert row is not None
        return int(row[0])

    def skipped(self, name: str) -> int:
        """Return how many rows of ``notes`` a process has skipped."""
        metrics = get_over_socket(self.folder / f"{name}.page", "/metrics")
        found = re.search(r'discarded\S*reason="skipped"\S* (\S+)', metrics)
        return int(float(found[1])) if found else 0

    def reasons(self, name: str) -> list[str]:
        """Return why the page of a process is red."""
        page = get_over_socket(self.folder / f"{name}.page", "/status.json")
        writers = json.loads(page)["writers"]
        return [writer["reason"] for writer in writers if writer["reason"]]

    def test_later_rows_arrive(self) -> None:
        """
        A row that cannot be sent is skipped and counted, its table and id are in both
        logs, both pages are red, and later rows arrive.
        """
        self.start_both()
        self.write_upto(1)
        self.wait_until("a row", lambda: len(self.journal("notes")) == 1)
        id_ = self.insert('["\\ud800"]')
        self.write_upto(2)
        self.wait_until("the next row", lambda: len(self.journal("notes")) == 2)
        for name, log in (("main", "main"), ("reader1", "worker")):
            self.wait_until("the count", lambda: self.skipped(name) == 1)  # noqa: B023
            self.assertEqual(self.reasons(name), [StallReason.ROWS_SKIPPED.value])
            self.assertIn(f"notes.stream_id = {id_}", self.log_of(log))

    @settings(
        max_examples=1,
        derandomize=True,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(_NESTED, min_size=100, max_size=100))
    def test_a_hundred(self, texts: list[str]) -> None:
        """A hundred generated rows are skipped, and the rows between them arrive."""
        self.start_both()
        for number in range(1, 11):
            self.insert(*texts[number * 10 - 10 : number * 10])
            self.write_upto(number)
            self.wait_until(
                f"row {number}",
                lambda: len(self.journal("notes")) == number,  # noqa: B023
            )
        notes = [entry["rows"][0][0] for entry in self.journal("notes")]
        self.assertEqual(notes, [f"note {number}" for number in range(1, 11)])
        self.assertEqual(self.skipped("main"), 100)
        # A row is counted again if its page is fetched again.
        self.assertGreaterEqual(self.skipped("reader1"), 100)

"""Tests with sequences near the ends of integer types, and real processes."""

from __future__ import annotations

import contextlib

import psycopg2

from tests.integration.deployment import DeploymentTestCase

#: The greatest number of rows whose ids are beyond the power of two.
_ROWS = 6


class GreatIdTests(DeploymentTestCase):
    """The sequence of ``notes`` is near a power of two."""

    def start_at(self, last_value: int) -> None:
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection:
            connection.cursor().execute("SELECT setval('notes_seq', %s)", [last_value])
            connection.commit()
        self.start_both()

    def check_crossing(self, power: int) -> None:
        self.start_at(2**power - _ROWS // 2)
        self.write_upto(_ROWS)
        self.wait_for_rows(_ROWS)
        tokens = [entry["token"] for entry in self.journal("notes")]
        self.assertLess(tokens[0], 2**power)
        self.assertGreater(tokens[-1], 2**power)

    def test_four_bytes(self) -> None:
        """All rows arrive in order when ids exceed 31 bits."""
        self.check_crossing(31)

    def test_double_precision(self) -> None:
        """All rows arrive in order when ids exceed the integers of a double."""
        self.check_crossing(53)

    def test_last_id(self) -> None:
        """The last ids of a sequence arrive; then, the writer reports its end."""
        self.start_at(2**63 - 1 - _ROWS)
        self.write_upto(_ROWS)
        self.wait_for_rows(_ROWS)
        self.assertEqual(self.journal("notes")[-1]["token"], 2**63 - 1)
        self.write_upto(_ROWS + 1)
        end = "reached maximum value of sequence"
        self.wait_until("an error", lambda: end in self.log_of("main"))
        self.write_upto(_ROWS)

"""Tests for :mod:`synapse_replication.pipeline.audit.checks.wire`."""

from __future__ import annotations

import functools
import json
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.audit.checks.wire import (
    damage_findings,
    order_findings,
    reset_findings,
    wire_lines,
    wire_tokens,
)
from synapse_replication.pipeline.schemas import WIRE_SCHEMA
from tests.pipeline.audits import (
    TOKENS_SCHEMA,
    Found,
    evidence,
    found,
    make_tokens,
    rows_of,
    tokens_of,
)
from tests.pipeline.shared_session import shared_session


class WireTokensTests(SynchronousTestCase):
    """Tests for the tokens of a recording."""

    def test_rows_of_a_batch_and_other_commands(self) -> None:
        """Only POSITION lines and the last row of each token are selected."""
        nothing = (None,) * 4
        lines = [
            ("RDATA", "events", "w1", None, None, "[]", "RDATA events w1 batch []"),
            ("RDATA", "events", "w1", 5, None, "[]", "RDATA events w1 5 []"),
            ("POSITION", "events", "w1", 7, 5, None, "POSITION events w1 5 7"),
            ("PING", None, *nothing, "PING 1"),
            (None, None, *nothing, ""),
        ]
        wire = shared_session().createDataFrame(
            [
                ("r", number, 0.5, None, "hs", *line)
                for number, line in enumerate(lines, 1)
            ],
            WIRE_SCHEMA,
        )

        self.assertEqual(
            sorted(tuple(row) for row in wire_tokens(wire_lines(wire)).collect()),
            [
                ("r", 2, 0.5, "events", "w1", True, None, 5),
                ("r", 3, 0.5, "events", "w1", False, 5, 7),
            ],
        )


#: The lines of one recording per case; ``S`` is replaced by the stream of the case.
CASES = {
    "healthy": (
        "POSITION S w1 4 4",
        "RDATA S w1 batch []",
        "RDATA S w1 6 []",
        # Another writer has a lower token.
        "RDATA S w2 5 []",
        "POSITION S w2 5 6",
        # The answer to REPLICATE has the writer's current token; a row that was already
        # being sent follows.
        "POSITION S w1 9 9",
        "RDATA S w1 8 []",
        "RDATA S w1 9 []",
        "POSITION S w1 9 12",
        # The recorder lost its connection, and an instance restarted slightly behind.
        "RDATA S w1 20 []",
        "POSITION S w1 19 19",
        "RDATA S w1 21 []",
        # The writer of a stream held in memory restarted.
        "RDATA typing w1 600 []",
        "RDATA typing w1 1 []",
        "RDATA typing w1 1 []",
        # A stream of a newer version, of which it is unknown whether it is reset.
        "RDATA of_a_newer_peer w1 7 []",
        "RDATA of_a_newer_peer w1 6 []",
    ),
    "behind_row": ("RDATA S w1 5 []", "RDATA S w1 7 []", "RDATA S w1 6 []"),
    "behind_position": (
        "POSITION S w1 3 8",
        "POSITION S w1 8 9",
        "RDATA S w1 6 []",
        "RDATA S w1 10 []",
    ),
    "twice": (
        "RDATA S w1 5 []",
        "RDATA S w1 7 []",
        "RDATA S w1 5 []",
        "RDATA S w1 7 []",
    ),
    "idempotent": ("RDATA S w1 5 []", "RDATA S w1 7 []", "RDATA S w1 6 []"),
}


@functools.cache
def order() -> dict[str, list[tuple[Found, Any]]]:
    """
    Return the findings of each case with their evidence; run all cases at once, because
    Spark is slow.
    """
    tokens: list[Any] = []
    for name, texts in CASES.items():
        lines = [text.replace(" S ", f" {name} ") for text in texts]
        tokens += tokens_of(lines, f"{name}.jsonl")
    # Rows that two recorders received are not duplicates.
    tokens += [("again.jsonl", *each[1:]) for each in tokens if each[3] == "healthy"]
    wire = shared_session().createDataFrame(tokens, TOKENS_SCHEMA)
    findings: dict[str, list[tuple[Found, Any]]] = {name: [] for name in CASES}
    for row in rows_of(order_findings(wire, list(CASES), ["idempotent"])):
        findings[row.stream].append((tuple(row)[:7], json.loads(row.evidence)))
    return findings


class OrderTests(SynchronousTestCase):
    """Tests for rows that readers discard."""

    def test_healthy(self) -> None:
        """A healthy deployment with two recorders has no finding."""
        self.assertEqual(order()["healthy"], [])

    def test_behind_a_newer_row(self) -> None:
        """A row after a newer row of its writer is out of order."""
        lines = [
            {"line_number": 3, "line": "RDATA behind_row w1 6 ...", "behind_line": 2}
        ]
        self.assertEqual(
            order()["behind_row"],
            [
                (
                    ("row_out_of_order", "error", "behind_row", "w1", 6, 6, 1),
                    {"recording": "behind_row.jsonl", "lines": lines},
                )
            ],
        )

    def test_behind_a_position(self) -> None:
        """A row whose absence an earlier POSITION has announced is out of order."""
        ((found_, its_evidence),) = order()["behind_position"]
        self.assertEqual(
            found_, ("row_out_of_order", "error", "behind_position", "w1", 6, 6, 1)
        )
        self.assertEqual(its_evidence["lines"][0]["behind_line"], 1)

    def test_twice(self) -> None:
        """A row that was sent twice is reported with both lines."""
        ((found_, its_evidence),) = order()["twice"]
        self.assertEqual(
            found_, ("row_twice_on_wire", "warning", "twice", "w1", 5, 7, 2)
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
        ((found_, _),) = order()["idempotent"]
        self.assertEqual(
            found_, ("late_invalidation", "info", "idempotent", "w1", 6, 6, 1)
        )


class ResetTests(SynchronousTestCase):
    """Tests for streams that are reset."""

    def test_resets(self) -> None:
        """A reset of a stream is reported, whether a POSITION or a row shows it."""
        tokens = make_tokens(
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

        findings = reset_findings(tokens, ["typing"])

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
        nothing = (None,) * 5
        lines_of = {"whole": (), "torn": (3,), "damaged": (2,), "both": (1, 3)}
        wire = shared_session().createDataFrame(
            [
                (recording, number, 0.0, None, "hs")
                + ((None, *nothing, "") if number in bad else ("X", *nothing, "X 1"))
                for recording, bad in lines_of.items()
                for number in (1, 2, 3)
            ],
            WIRE_SCHEMA,
        )

        findings = damage_findings(wire_lines(wire))

        names = {
            each["recording"]: (kind[0], each["first_line_number"])
            for kind, each in zip(
                [tuple(row) for row in findings.collect()],
                evidence(findings),
                strict=True,
            )
        }
        self.assertEqual(
            names,
            {
                "torn": ("recording_cut_off", 3),
                "damaged": ("recording_damaged", 2),
                "both": ("recording_damaged", 1),
            },
        )

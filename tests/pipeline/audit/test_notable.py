"""Tests for :mod:`synapse_replication.pipeline.audit.notable`."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.audit.notable import (
    NOTABLE_SCHEMA,
    Bounds,
    notable,
)
from synapse_replication.pipeline.audit.sightings import Source

#: Stream, id, writer, source, and index of the row within its token.
_Sighting = tuple[str, int, str | None, Source, int]

_TABLES, _ARCHIVE, _WIRE = Source.TABLES, Source.ARCHIVE, Source.WIRE

#: Bounds within which a missing id is relevant: none.
_NOWHERE: Bounds = {}


def _seen(*sightings: _Sighting) -> list[pa.RecordBatch]:
    """Return the sightings in two batches, so that both may contain an id."""
    halves = sightings[::2], sightings[1::2]
    return [
        pa.RecordBatch.from_arrays(
            [
                pa.array([row[index] for row in half], type_)
                for index, type_ in enumerate(
                    (pa.string(), pa.int64(), pa.string(), pa.int32(), pa.int32())
                )
            ],
            names=["stream", "stream_id", "writer", "source", "row_index"],
        )
        for half in halves
    ]


def _chosen(*sightings: _Sighting, **bounds: Bounds) -> dict[int, dict[str, Any]]:
    given: dict[str, Bounds] = {"received": _NOWHERE, "archived": _NOWHERE, **bounds}
    found = notable(_seen(*sightings), **given)
    return {row["stream_id"]: row for row in found.to_pylist()}


def _tables(*ids: int, writer: str | None = "w1") -> list[_Sighting]:
    return [("events", id_, writer, _TABLES, 0) for id_ in ids]


class NotableTests(SynchronousTestCase):
    """Tests for :func:`notable`."""

    def test_nothing(self) -> None:
        """Without input, the result is an empty table with the usual columns."""
        self.assertEqual(notable([]).schema, NOTABLE_SCHEMA)

    def test_healthy_rows(self) -> None:
        """A run of healthy rows is represented by its first row."""
        chosen = _chosen(*_tables(7, 8, 9), ("events", 9, "w1", _WIRE, 0))

        self.assertEqual(list(chosen), [7])
        self.assertEqual(
            (chosen[7]["run_last"], chosen[7]["run_last_writer"]), (9, "w1")
        )

    def test_runs(self) -> None:
        """A run ends before a gap, and at the end of its stream."""
        other: _Sighting = ("receipts", 5, "w2", _TABLES, 0)
        found = notable(
            _seen(*_tables(2, 1, 4), other), received=_NOWHERE, archived=_NOWHERE
        )

        self.assertEqual(
            [
                (row["stream"], row["stream_id"], row["run_last"])
                for row in found.to_pylist()
            ],
            [("events", 1, 2), ("events", 4, 4), ("receipts", 5, 5)],
        )

    def test_two_writers(self) -> None:
        """An id with two writers is selected, independent of its sender."""
        chosen = _chosen(
            *_tables(1, 2, 3),
            ("events", 2, "w0", _ARCHIVE, 0),
            ("events", 3, "w9", _WIRE, 0),
        )

        self.assertEqual(list(chosen), [1, 2])
        row = chosen[2]
        self.assertEqual(
            (row["first_writer"], row["last_writer"], row["sender"]),
            ("w0", "w1", None),
        )

    def test_unknown_writer(self) -> None:
        """
        If neither tables nor archive record the writer, it is null, but the sender is
        known.
        """
        sighting: _Sighting = ("events", 1, "w3", _WIRE, 0)
        chosen = _chosen(*_tables(1, writer=None), sighting)

        row = chosen[1]
        self.assertEqual(
            (row["first_writer"], row["last_writer"], row["sender"]),
            (None, None, "w3"),
        )
        self.assertEqual(row["run_last_writer"], "w3")

    def test_missing_in_a_source(self) -> None:
        """
        An id that a source lacks is selected only within the bounds of that source.
        """
        ids = _tables(*range(1, 10))

        self.assertEqual(list(_chosen(*ids, received={"events": (4, 5)})), [1, 4, 5])
        self.assertEqual(list(_chosen(*ids, archived={"events": (7, 8)})), [1, 7, 8])
        self.assertEqual(list(_chosen(*ids, received={"receipts": (4, 5)})), [1])

    def test_in_no_table(self) -> None:
        """An id that is only in the archive or on the wire is selected."""
        chosen = _chosen(
            *_tables(1, 2, 4),
            ("events", 3, "w1", _ARCHIVE, 0),
            ("events", 5, "w1", _WIRE, 0),
        )

        self.assertEqual(list(chosen), [1, 3, 5])
        self.assertEqual([chosen[3]["in_tables"], chosen[3]["archived"]], [False, True])
        self.assertEqual([chosen[5]["in_tables"], chosen[5]["sent"]], [False, True])

    def test_repeated(self) -> None:
        """An id is marked as repeated if the archive has one of its rows twice."""
        twice: list[_Sighting] = [
            ("events", 2, "w1", _ARCHIVE, 0),
            ("events", 2, "w1", _ARCHIVE, 1),
            ("events", 3, "w1", _ARCHIVE, 1),
            ("events", 3, "w1", _ARCHIVE, 1),
        ]
        chosen = _chosen(*_tables(1, 2, 3, 3), *twice)

        self.assertEqual(
            {id_: row["repeated"] for id_, row in chosen.items()},
            {1: False, 2: False, 3: True},
        )

    def test_ends_in_the_archive(self) -> None:
        """The first and the last archived id of each writer are selected."""
        archived: list[_Sighting] = [
            ("events", id_, f"w{id_ % 2}", _ARCHIVE, 0) for id_ in range(3, 9)
        ]
        tables = [("events", id_, f"w{id_ % 2}", _TABLES, 0) for id_ in range(1, 12)]

        self.assertEqual(list(_chosen(*tables, *archived)), [1, 3, 4, 7, 8])

    def test_same_in_any_order(self) -> None:
        """The same ids are selected in whatever order the sightings arrive."""
        rng = random.Random(7)
        sightings: list[_Sighting] = [
            (
                rng.choice(("events", "receipts")),
                rng.randrange(40),
                rng.choice(("w1", "w2", None)),
                rng.choice(tuple(Source)),
                0,
            )
            for _ in range(120)
        ]
        once = notable(_seen(*sightings))
        rng.shuffle(sightings)

        self.assertEqual(notable(_seen(*sightings)), once)

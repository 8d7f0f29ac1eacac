"""Tests for :mod:`synapse_replication.pipeline.audit.ids`."""

from __future__ import annotations

import functools
import random
from typing import Any

import pyarrow as pa
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline import scan
from synapse_replication.pipeline.audit import ids
from synapse_replication.pipeline.audit.ids import (
    NOTABLE_SCHEMA,
    PACKED_SCHEMA,
    Bounds,
    Source,
    notable,
    notable_ids,
    pack,
)
from synapse_replication.pipeline.scan import Scan
from tests.pipeline.audits import KEYS_SCHEMA, keys_table
from tests.pipeline.shared_session import shared_session

#: Id, writer, source, and index of the row within its token.
_Sighting = tuple[int, str | None, Source, int]

_TABLES, _ARCHIVE, _WIRE = Source.TABLES, Source.ARCHIVE, Source.WIRE

#: Bounds within which every id is relevant.
_EVERYWHERE: Bounds = {"events": (0, 99)}


def _seen(*sightings: _Sighting) -> list[pa.Table]:
    """Return the sightings in two tables, so that both may contain an id."""
    names = ("stream_id", "writer", "source", "row_index")
    types = (pa.int64(), pa.string(), pa.int32(), pa.int32())
    tables = []
    for half in (sightings[::2], sightings[1::2]):
        columns = [
            pa.array([row[index] for row in half], type_)
            for index, type_ in enumerate(types)
        ]
        columns[1] = columns[1].dictionary_encode()
        tables.append(pa.Table.from_arrays(columns, names=names))
    return tables


def _chosen(*sightings: _Sighting, **bounds: Bounds) -> dict[int, dict[str, Any]]:
    """Choose from sightings; by default, an id is relevant in no source."""
    given: dict[str, Bounds] = {"received": {}, "archived": {}, **bounds}
    found = notable("events", _seen(*sightings), **given)
    return {row["stream_id"]: row for row in found.to_pylist()}


def _tables(*ids: int, writer: str | None = "w1") -> list[_Sighting]:
    return [(id_, writer, _TABLES, 0) for id_ in ids]


class NotableTests(SynchronousTestCase):
    """Tests for :func:`notable`."""

    def test_healthy_rows(self) -> None:
        """A run of healthy rows is represented by its first row."""
        chosen = _chosen(*_tables(7, 8, 9), (9, "w1", _WIRE, 0))

        self.assertEqual(list(chosen), [7])
        self.assertEqual(
            (chosen[7]["run_last"], chosen[7]["run_last_writer"]), (9, "w1")
        )

    def test_runs(self) -> None:
        """A run ends before a gap, and at the end of its stream."""
        chosen = _chosen(*_tables(2, 1, 4))

        runs = [(id_, row["run_last"]) for id_, row in chosen.items()]
        self.assertEqual(runs, [(1, 2), (4, 4)])

    def test_two_writers(self) -> None:
        """An id with two writers is selected, independent of its sender."""
        chosen = _chosen(
            *_tables(1, 2, 3),
            (2, "w0", _ARCHIVE, 0),
            (3, "w9", _WIRE, 0),
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
        sighting: _Sighting = (1, "w3", _WIRE, 0)
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
            (3, "w1", _ARCHIVE, 0),
            (5, "w1", _WIRE, 0),
        )

        self.assertEqual(list(chosen), [1, 3, 5])
        self.assertEqual([chosen[3]["in_tables"], chosen[3]["archived"]], [False, True])
        self.assertEqual([chosen[5]["in_tables"], chosen[5]["sent"]], [False, True])

    def test_repeated(self) -> None:
        """An id is marked as repeated if the archive has one of its rows twice."""
        twice: list[_Sighting] = [
            (2, "w1", _ARCHIVE, 0),
            (2, "w1", _ARCHIVE, 1),
            (3, "w1", _ARCHIVE, 1),
            (3, "w1", _ARCHIVE, 1),
        ]
        chosen = _chosen(*_tables(1, 2, 3, 3), *twice)

        self.assertEqual(
            {id_: row["repeated"] for id_, row in chosen.items()},
            {1: False, 2: False, 3: True},
        )

    def test_ends_in_the_archive(self) -> None:
        """The first and the last archived id of each writer are selected."""
        archived: list[_Sighting] = [
            (id_, f"w{id_ % 2}", _ARCHIVE, 0) for id_ in range(3, 9)
        ]
        tables = [(id_, f"w{id_ % 2}", _TABLES, 0) for id_ in range(1, 12)]

        self.assertEqual(list(_chosen(*tables, *archived)), [1, 3, 4, 7, 8])

    def test_same_in_any_order(self) -> None:
        """The same ids are selected in whatever order the sightings arrive."""
        rng = random.Random(7)
        sightings: list[_Sighting] = [
            (
                rng.randrange(40),
                rng.choice(("w1", "w2", None)),
                rng.choice(tuple(Source)),
                0,
            )
            for _ in range(120)
        ]
        once = notable("events", _seen(*sightings), _EVERYWHERE, _EVERYWHERE)
        rng.shuffle(sightings)
        again = notable("events", _seen(*sightings), _EVERYWHERE, _EVERYWHERE)

        self.assertEqual(again, once)


_Row = tuple[str, str, int, int]


def _batch(*rows: _Row) -> pa.RecordBatch:
    names = ("stream", "instance_name", "stream_id", "row_index")
    types = (pa.string(), pa.string(), pa.int64(), pa.int32())
    return pa.RecordBatch.from_arrays(
        [
            pa.array([row[index] for row in rows], type_)
            for index, type_ in enumerate(types)
        ],
        names=names,
    )


def _unpacked(packed: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """Return stream, id, writer, index and source of each sighting."""
    return sorted(
        (row["stream"], *sighting.values())
        for row in packed.to_pylist()
        for sighting in ids._unpack(row["source"], row["sightings"]).to_pylist()
    )


class SightingsTests(SynchronousTestCase):
    """Tests for :func:`pack`."""

    def test_round_trip(self) -> None:
        """Rows are restored with their source. The writer is null if the name is empty,
        or if the source does not record it."""
        rows = _batch(
            ("events", "w1", 9, 0),
            ("events", "", 3, 1),
            ("account_data", "w2", 5, 0),
        )

        (packed,) = pack([rows], source=Source.ARCHIVE, nameless={"account_data"})

        self.assertEqual(
            _unpacked(packed),
            [
                ("account_data", 5, None, 0, Source.ARCHIVE),
                ("events", 3, None, 1, Source.ARCHIVE),
                ("events", 9, "w1", 0, Source.ARCHIVE),
            ],
        )

    def test_buckets(self) -> None:
        """
        The ids of a bucket are packed together, in whatever order they are; there is
        one value for each stream and bucket of a batch.
        """
        numbers = [12, 1, 5, 13, 2, 4]
        rows = _batch(*(("events", "w1", id_, 0) for id_ in numbers))

        (packed,) = pack([rows], source=Source.WIRE, bucket_bits=2)

        found = [(row["stream"], row["bucket"]) for row in packed.to_pylist()]
        self.assertEqual(found, [("events", 0), ("events", 1), ("events", 3)])
        for number, bucket in enumerate((0, 1, 3)):
            of_bucket = _unpacked(packed.slice(number, 1))
            self.assertEqual(
                [id_ for _, id_, *_ in of_bucket],
                sorted(id_ for id_ in numbers if id_ >> 2 == bucket),
            )

    def test_nothing(self) -> None:
        """An empty batch has no sightings."""
        (packed,) = pack([_batch()], source=Source.TABLES)

        self.assertEqual(packed.num_rows, 0)
        self.assertEqual(_unpacked(packed), [])


class NotableIdsTests(SynchronousTestCase):
    """Tests for the ids that an audit examines."""

    def test_in_tasks(self) -> None:
        """
        Ids are compared by buckets, in this process or in tasks; the runs of ids end
        there, too.
        """
        tables = self.scan([3, 4, 5, 7, 9], Source.TABLES)
        archive = self.scan([3, 4, 9, 11], Source.ARCHIVE)

        here = self.runs([tables, archive])
        self.patch(scan, "FEW_ROWS", 1)
        self.patch(scan, "FEW_IDS", 1)
        there = self.runs([tables, archive])

        self.assertEqual(here, [(3, 3), (4, 5), (7, 7), (9, 9), (11, 11)])
        self.assertEqual(there, here)

    def runs(self, stored: list[Scan]) -> list[tuple[int, int]]:
        """Return the runs of consecutive ids."""
        nothing = iter(keys_table([]).to_batches())
        sent = pack(nothing, source=Source.WIRE)
        found = notable_ids(
            stored,
            sent,
            shared_session,
            ["events"],
            received={"events": (0, 99)},
            archived={"events": (0, 99)},
        )
        table = pa.Table.from_batches(list(found), NOTABLE_SCHEMA)
        return sorted(
            (row["stream_id"], row["run_last"])
            for row in table.to_pylist()
            if row["run_last"] is not None
        )

    def scan(self, numbers: list[int], source: Source) -> Scan:
        """Return the packed sightings of ids, with four ids in a bucket."""
        table = keys_table(("events", "w1", number) for number in numbers)
        scan = Scan(KEYS_SCHEMA, [table], lambda rows: rows.to_batches(), len(numbers))
        work = functools.partial(pack, source=source, bucket_bits=2)
        return scan.then(work, PACKED_SCHEMA)

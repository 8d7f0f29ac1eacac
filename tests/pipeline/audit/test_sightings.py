"""Tests for :mod:`synapse_replication.pipeline.audit.sightings`."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.audit.sightings import Source, pack, unpack

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


def _unpacked(packed: list[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    return sorted(
        tuple(row.values()) for batch in unpack(packed) for row in batch.to_pylist()
    )


class SightingsTests(SynchronousTestCase):
    """Tests for :func:`pack` and :func:`unpack`."""

    def test_round_trip(self) -> None:
        """Rows are restored with their source. The writer is null if the name is empty,
        or if the source does not record it."""
        rows = _batch(
            ("events", "w1", 9, 0),
            ("events", "", 3, 1),
            ("account_data", "w2", 5, 0),
        )

        packed = list(pack([rows], source=Source.ARCHIVE, nameless={"account_data"}))

        self.assertEqual(
            _unpacked(packed),
            [
                ("account_data", 5, None, Source.ARCHIVE, 0),
                ("events", 3, None, Source.ARCHIVE, 1),
                ("events", 9, "w1", Source.ARCHIVE, 0),
            ],
        )

    def test_buckets(self) -> None:
        """
        The ids of a bucket are packed together, in whatever order they are; there is
        one value for each stream and bucket of a batch.
        """
        ids = [12, 1, 5, 13, 2, 4]
        rows = _batch(*(("events", "w1", id_, 0) for id_ in ids))

        packed = list(pack([rows], source=Source.WIRE, bucket_bits=2))

        found = [(row["stream"], row["bucket"]) for row in packed[0].to_pylist()]
        self.assertEqual(found, [("events", 0), ("events", 1), ("events", 3)])
        for number, bucket in enumerate((0, 1, 3)):
            of_bucket = _unpacked([packed[0].slice(number, 1)])
            self.assertEqual(
                [id_ for _, id_, *_ in of_bucket],
                sorted(id_ for id_ in ids if id_ >> 2 == bucket),
            )

    def test_nothing(self) -> None:
        """An empty batch has no sightings."""
        (packed,) = pack([_batch()], source=Source.TABLES)

        self.assertEqual(packed.num_rows, 0)
        self.assertEqual(_unpacked([packed]), [])

"""Tests for :mod:`synapse_replication.pipeline.audit.ids`."""

from __future__ import annotations

import functools

import pyarrow as pa
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.audit import ids
from synapse_replication.pipeline.audit.ids import notable_ids
from synapse_replication.pipeline.audit.notable import NOTABLE_SCHEMA
from synapse_replication.pipeline.audit.sightings import PACKED_SCHEMA, Source, pack
from synapse_replication.pipeline.scan import Scan
from tests.pipeline.audits import KEYS_SCHEMA, keys_table
from tests.pipeline.shared_session import shared_session


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
        self.patch(ids, "FEW_KEYS", 1)
        self.patch(ids, "FEW_IDS", 1)
        there = self.runs([tables, archive])

        self.assertEqual(here, [(3, 3), (4, 5), (7, 7), (9, 9), (11, 11)])
        self.assertEqual(there, here)

    def runs(self, stored: list[Scan]) -> list[tuple[int, int]]:
        """Return the runs of consecutive ids."""
        nothing = iter(keys_table([]).to_batches())
        sent = pack(nothing, source=Source.WIRE)
        found = notable_ids(stored, sent, shared_session, ["events"])
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

"""The contents of the tables, the archive and the recordings about each id."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from synapse_replication.pipeline.audit.notable import NOTABLE_SCHEMA, Bounds, notable
from synapse_replication.pipeline.audit.sightings import (
    PACKED_SCHEMA,
    Source,
    pack,
    unpack,
)
from synapse_replication.pipeline.scan import (
    FEW_IDS,
    FEW_KEYS,
    Batches,
    Scan,
    table_frame,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The columns of packed sightings that are compared together.
_BUCKET: Final = ("stream", "bucket")


def packed(scan: Scan, source: Source, nameless: Collection[str] = ()) -> Scan:
    """Return the packed sightings of the rows of a scan; see :func:`.sightings.pack`.

    :param nameless: streams whose writers this source does not record reliably.
    """
    work = functools.partial(pack, source=source, nameless=frozenset(nameless))
    return scan.then(work, PACKED_SCHEMA)


def notable_ids(
    stored: Sequence[Scan],
    sent: Batches,
    spark: Callable[[], SparkSession],
    persisted: Collection[str],
    *,
    received: Bounds | None = None,
    archived: Bounds | None = None,
) -> Batches:
    """Return the ids that an audit has to examine; see :func:`.notable.notable`.

    :param stored: scans of the tables and of the archive, with PACKED_SCHEMA.
    :param sent: the sightings in recordings, with PACKED_SCHEMA.
    :param spark: returns the session; called if there are many ids.
    :param persisted: names of the streams that are stored in the database.
    :return: batches with NOTABLE_SCHEMA.
    """
    streams = pa.array(sorted(persisted), pa.string())

    def choose(batches: Batches) -> Batches:
        seen = unpack(
            batch.filter(pc.is_in(batch.column("stream"), streams)) for batch in batches
        )
        yield from notable(seen, received=received, archived=archived).to_batches()

    total = sum(scan.ids for scan in stored)
    if total <= FEW_KEYS:
        for bucket in _buckets(stored, sent):
            yield from choose(iter(bucket))
        return
    from pyspark.sql.pandas.types import from_arrow_schema

    session = spark()
    seen = table_frame(session, pa.Table.from_batches(list(sent), PACKED_SCHEMA))
    for scan in stored:
        seen = seen.unionAll(scan.frame(session))
    # Use at least the session's number of shuffle partitions, and enough tasks that
    # the ids of each task fit into the memory of a worker.
    default = int(session.conf.get("spark.sql.shuffle.partitions") or 1)
    tasks = max(default, total // FEW_IDS)
    chosen = seen.repartition(tasks, "stream", "bucket").mapInArrow(
        choose, from_arrow_schema(NOTABLE_SCHEMA)
    )
    yield from chosen.toArrow().to_batches()


def _buckets(stored: Sequence[Scan], sent: Batches) -> Iterator[list[pa.RecordBatch]]:
    """Read all sightings, and yield those of each stream and bucket.

    While they are packed, even millions of sightings need little memory.
    """
    found: dict[tuple[str, int], list[pa.RecordBatch]] = {}
    for batches in (*(scan.batches() for scan in stored), sent):
        for batch in batches:
            keys = zip(*(batch.column(n).to_pylist() for n in _BUCKET), strict=True)
            for row, key in enumerate(keys):
                found.setdefault(key, []).append(batch.slice(row, 1))
    for key in sorted(found):
        yield found[key]

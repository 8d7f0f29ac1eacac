"""What the tables, the archive and the recordings contain about each id."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from synapse_replication.pipeline.audit.notable import NOTABLE_SCHEMA, Bounds, notable
from synapse_replication.pipeline.audit.sightings import (
    PACKED_SCHEMA,
    Source,
    pack,
    unpack,
)
from synapse_replication.pipeline.scan import FEW_IDS, Batches, Scan, table_frame

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
    if total <= FEW_IDS:
        yield from choose(_chained(stored, sent))
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


def _chained(stored: Sequence[Scan], sent: Batches) -> Batches:
    for scan in stored:
        yield from scan.batches()
    yield from sent

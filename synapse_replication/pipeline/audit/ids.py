"""Selects the ids that an audit has to examine.

A *sighting* is a row of the tables, the archive or a recording, reduced to its id,
writer and ``row_index``. A healthy id is in the tables, in the archive and on the wire,
and has the same writer in the tables and in the archive. There may be millions of
healthy ids, and in a healthy deployment few others.

Theory of operation: moving a few large values between Spark's tasks is much cheaper
than moving millions of small rows. So the tasks that read rows pack the sightings of a
stream and range of ids (a *bucket*) into one binary value. The tasks that compare
sightings unpack the values of a bucket, and remove nearly all healthy ids before Spark
joins, sorts or caches anything. Few sightings are packed and compared in this process.
While they are packed, even millions of them need little memory.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from synapse_replication.pipeline import scan
from synapse_replication.pipeline.schemas import read_schema


class Source(enum.IntEnum):
    """A source in which an id was seen."""

    TABLES = 0
    ARCHIVE = 1
    WIRE = 2


#: Maps a stream to the least and the greatest relevant id; others have none.
Bounds = Mapping[str, tuple[int, int]]

#: The columns of packed sightings.
PACKED_SCHEMA: Final = read_schema("sightings")

#: The columns that describe an id.
NOTABLE_SCHEMA: Final = read_schema("ids")

#: The number of low bits in which the ids of a bucket may differ.
BUCKET_BITS: Final = 18

_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="lz4")

_Array = np.ndarray[Any, Any]

#: The number of an unknown writer in the computation of the smallest writer number. It
#: is greater than the number of any known writer.
_NO_WRITER: Final = np.iinfo(np.int32).max


# -- packing -----------------------------------------------------------------------


def packed(
    rows: scan.Scan, source: Source, nameless: Collection[str] = ()
) -> scan.Scan:
    """Return the packed sightings of the rows of a scan; see :func:`pack`."""
    work = functools.partial(pack, source=source, nameless=frozenset(nameless))
    return rows.then(work, PACKED_SCHEMA)


def pack(
    batches: Iterable[pa.RecordBatch],
    *,
    source: Source,
    nameless: Collection[str] = (),
    bucket_bits: int = BUCKET_BITS,
) -> scan.Batches:
    """Pack the rows of a source; yield batches of :data:`PACKED_SCHEMA`.

    :param batches: ``stream``, ``instance_name`` (the writer, empty if the source does
        not record it; on the wire, the instance that sent the id), ``stream_id`` and
        ``row_index`` (relevant only for the archive); they may have more columns.
    :param nameless: streams whose writers this source does not record reliably.
    :param bucket_bits: the number of low bits in which the ids of a bucket may differ.
    """
    unknown = pa.scalar(None, pa.string())
    for batch in batches:
        streams = batch.column("stream")
        found: list[tuple[str, int, Source, bytes]] = []
        for stream in pc.unique(streams).to_pylist():
            rows = batch.filter(pc.equal(streams, stream))
            writers = rows.column("instance_name")
            is_unknown = pc.or_(pc.equal(writers, ""), stream in nameless)
            sightings = pa.RecordBatch.from_arrays(
                [
                    rows.column("stream_id"),
                    pc.if_else(is_unknown, unknown, writers).dictionary_encode(),
                    rows.column("row_index"),
                ],
                names=["stream_id", "writer", "row_index"],
            )
            found += [
                (stream, bucket, source, _to_bytes(part))
                for bucket, part in _buckets(sightings, bucket_bits)
            ]
        yield scan.to_batch(found, PACKED_SCHEMA)


def _buckets(
    sightings: pa.RecordBatch, bits: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    buckets = sightings.column("stream_id").to_numpy() >> bits
    order = np.argsort(buckets, kind="stable")
    buckets, sightings = buckets[order], sightings.take(pa.array(order))
    edges = np.flatnonzero(np.diff(buckets)) + 1
    for start, end in zip([0, *edges], [*edges, len(buckets)], strict=True):
        yield int(buckets[start]), sightings.slice(start, end - start)


def _to_bytes(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_OPTIONS) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _unpack(source: int, data: bytes) -> pa.Table:
    with pa.ipc.open_stream(data) as reader:
        table = reader.read_all()
    return table.append_column(
        "source", pa.repeat(pa.scalar(source, pa.int8()), table.num_rows)
    )


# -- comparing ---------------------------------------------------------------------


def notable_ids(
    stored: Sequence[scan.Scan],
    sent: scan.Batches,
    spark: scan.Spark,
    persisted: Collection[str],
    *,
    received: Bounds,
    archived: Bounds,
) -> scan.Batches:
    """Return the ids that an audit has to examine; see :func:`notable`.

    :param stored: scans of the tables and of the archive, with PACKED_SCHEMA.
    :param sent: the sightings in recordings, with PACKED_SCHEMA.
    :param spark: called if there are many ids.
    :param persisted: names of the streams that are stored in the database.
    :return: batches with NOTABLE_SCHEMA.
    """

    def choose(batches: scan.Batches) -> scan.Batches:
        found: dict[tuple[str, int], list[tuple[int, bytes]]] = {}
        for batch in batches:
            columns = batch.to_pydict().values()
            for stream, bucket, *values in zip(*columns, strict=True):
                if stream in persisted:
                    found.setdefault((stream, bucket), []).append(tuple(values))
        for stream, bucket in sorted(found):
            sightings = (_unpack(*values) for values in found[stream, bucket])
            yield notable(stream, sightings, received, archived)

    total = sum(each.ids for each in stored)
    if total <= scan.FEW_ROWS:
        yield from choose(chain(*(each.batches() for each in stored), sent))
        return
    from pyspark.sql.pandas.types import from_arrow_schema

    session = spark()
    seen = scan.table_frame(session, pa.Table.from_batches(list(sent), PACKED_SCHEMA))
    for each in stored:
        seen = seen.unionAll(each.frame(session))
    # Use at least the session's number of shuffle partitions, and enough tasks that
    # the ids of each task fit into the memory of a worker.
    default = int(session.conf.get("spark.sql.shuffle.partitions") or 1)
    tasks = max(default, total // scan.FEW_IDS)
    chosen = seen.repartition(tasks, "stream", "bucket").mapInArrow(
        choose, from_arrow_schema(NOTABLE_SCHEMA)
    )
    yield from chosen.toArrow().to_batches()


def notable(
    stream: str, sightings: Iterable[pa.Table], received: Bounds, archived: Bounds
) -> pa.RecordBatch:
    """Return the ids of a stream that an audit has to examine, with NOTABLE_SCHEMA.

    These are ids that have more than one writer in the tables and the archive together,
    are in no table, are missing on the wire or in the archive, or have two archived
    rows with the same ``row_index``. The result also has the first id of each range of
    consecutive ids, in one row with the last id of the range. Finally, the result has
    the first and the last archived id of each writer.

    :param sightings: ``stream_id``, ``writer`` (null if unknown), ``row_index`` (used
        only for the archive) and ``source``. They must include all sightings of an id,
        or none of them.
    :param received: the ranges in which an id that was not sent is relevant.
    :param archived: the ranges in which an id that is not archived is relevant.
    """
    seen = pa.concat_tables(sightings).unify_dictionaries()
    names, writer = _numbered(seen.column("writer"))
    all_ids, source, row_index = (
        seen.column(name).to_numpy() for name in ("stream_id", "source", "row_index")
    )
    order = np.lexsort((row_index, source, all_ids))
    all_ids, source, writer, row_index = (
        values[order] for values in (all_ids, source, writer, row_index)
    )
    starts = np.flatnonzero(np.diff(all_ids, prepend=all_ids[0] - 1))
    ids = all_ids[starts]

    def least(of: _Array) -> _Array:
        known = np.where(of & (writer >= 0), writer, _NO_WRITER)
        return np.minimum.reduceat(known, starts)

    def has(of: _Array) -> _Array:
        return np.logical_or.reduceat(of, starts)

    on_wire, of_archive = source == Source.WIRE, source == Source.ARCHIVE
    first, sender = least(~on_wire), least(on_wire)
    last = np.maximum.reduceat(np.where(on_wire, -1, writer), starts)
    in_tables, in_archive = has(source == Source.TABLES), has(of_archive)
    sent = has(on_wire)
    twice = of_archive[1:] & of_archive[:-1] & (np.diff(row_index) == 0)
    repeated = has(np.append(twice & (np.diff(all_ids) == 0), False))
    range_starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)

    selected = (first < last) | ~in_tables | repeated
    selected |= ~in_archive & _within(ids, archived, stream)
    selected |= ~sent & _within(ids, received, stream)
    selected[range_starts] = True
    selected[_ends_of_writers(first, in_archive)] = True

    range_ends = np.full(len(ids), -1)
    range_ends[range_starts] = np.append(range_starts[1:], len(ids)) - 1
    chosen = np.flatnonzero(selected)
    ends = range_ends[chosen]
    end_writer = np.where(first[ends] == _NO_WRITER, sender[ends], first[ends])
    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(pa.scalar(stream), len(chosen)),
            pa.array(ids[chosen]),
            *(_names(names, numbers[chosen]) for numbers in (first, last, sender)),
            *(
                pa.array(flag[chosen])
                for flag in (in_tables, in_archive, sent, repeated)
            ),
            pa.array(ids[ends], mask=ends < 0),
            _names(names, np.where(ends < 0, _NO_WRITER, end_writer)),
        ],
        schema=NOTABLE_SCHEMA,
    )


def _numbered(writers: pa.ChunkedArray) -> tuple[pa.Array, _Array]:
    """Return the sorted distinct names, and the index of each name; -1 for null."""
    encoded = writers.combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    order = pc.array_sort_indices(encoded.dictionary)
    # The last entry is for null.
    rank = np.append(np.argsort(order), -1).astype(np.int32)
    indices = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
    return encoded.dictionary.take(order), rank[indices]


def _names(names: pa.Array, numbers: _Array) -> pa.Array:
    unknown = (numbers < 0) | (numbers == _NO_WRITER)
    return names.take(pa.array(numbers, mask=unknown))


def _within(ids: _Array, bounds: Bounds, stream: str) -> _Array:
    low, high = bounds.get(stream, (1, 0))
    return (ids >= low) & (ids <= high)


def _ends_of_writers(writer: _Array, archived: _Array) -> _Array:
    """Return the indexes of each writer's first and last archived id."""
    indices = np.flatnonzero(archived)
    _, first = np.unique(writer[indices], return_index=True)
    _, last = np.unique(writer[indices][::-1], return_index=True)
    return np.concatenate((indices[first], indices[::-1][last]))

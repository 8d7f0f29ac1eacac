"""Packed sightings of ids: binary values, each for one stream and range of ids.

A sighting is a row of the tables, the archive or a recording, reduced to its source,
id, writer and ``row_index``. An audit compares the sightings of millions of ids. Moving
a few large values between Spark's tasks is much cheaper than moving millions of small
rows. So the tasks that read rows pack the sightings, and the tasks that compare the
sightings unpack them. This module uses Arrow, but not Spark.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from synapse_replication.pipeline.scan import to_batch

#: The columns of packed sightings. All sightings of a stream with the same ``bucket``
#: are compared in one task.
PACKED_SCHEMA: Final = pa.schema(
    [
        pa.field("stream", pa.string()),
        pa.field("bucket", pa.int64()),
        pa.field("sightings", pa.binary()),
    ]
)

#: The number of low bits in which the ids of a bucket may differ.
BUCKET_BITS: Final = 18

_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="lz4")


class Source(enum.IntEnum):
    """A source in which an id was seen."""

    TABLES = 0
    ARCHIVE = 1
    WIRE = 2


def pack(
    batches: Iterable[pa.RecordBatch],
    *,
    source: Source,
    nameless: Collection[str] = (),
    bucket_bits: int = BUCKET_BITS,
) -> Iterator[pa.RecordBatch]:
    """Pack the rows of a source; yield batches of :data:`PACKED_SCHEMA`.

    :param batches: ``stream``, ``instance_name`` (the writer, empty if the source does
        not record it; on the wire, the instance that sent the id), ``stream_id`` and
        ``row_index`` (relevant only for the archive); they may have more columns.
    :param nameless: streams whose writers this source does not record reliably.
    :param bucket_bits: the number of low bits in which the ids of a bucket may differ.
    """
    for batch in batches:
        streams = batch.column("stream")
        found: list[tuple[str, int, bytes]] = []
        for stream in pc.unique(streams).to_pylist():
            of_stream = batch.filter(pc.equal(streams, stream))
            found += _packed(
                stream, of_stream, source, bucket_bits, named=stream not in nameless
            )
        yield to_batch(found, PACKED_SCHEMA)


def _packed(
    stream: str, batch: pa.RecordBatch, source: Source, bucket_bits: int, *, named: bool
) -> Iterator[tuple[str, int, bytes]]:
    writers = batch.column("instance_name")
    unknown = pa.scalar(None, pa.string())
    writer = (
        pc.if_else(pc.equal(writers, ""), unknown, writers)
        if named
        else pa.nulls(len(writers), pa.string())
    )
    ids: np.ndarray[Any, Any] = batch.column("stream_id").to_numpy()
    buckets = ids >> bucket_bits
    sightings = pa.RecordBatch.from_arrays(
        [
            batch.column("stream_id"),
            writer.dictionary_encode(),
            pa.repeat(pa.scalar(int(source), pa.int8()), len(ids)),
            batch.column("row_index"),
        ],
        names=["stream_id", "writer", "source", "row_index"],
    )
    if len(ids) and (buckets[0] != buckets).any():
        order = np.argsort(buckets, kind="stable")
        buckets, sightings = buckets[order], sightings.take(pa.array(order))
    edges = np.flatnonzero(buckets[1:] != buckets[:-1]) + 1
    starts = [0, *edges.tolist()] if len(ids) else []
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        yield (
            stream,
            int(buckets[start]),
            _to_bytes(sightings.slice(start, end - start)),
        )


def _to_bytes(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_OPTIONS) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def unpack(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Unpack batches of :data:`PACKED_SCHEMA`.

    :return: batches of ``stream``, ``stream_id``, ``writer`` (null if the source does
        not record it reliably; on the wire, the instance that sent the id),
        ``source`` (a :class:`Source`) and ``row_index``.
    """
    for packed in batches:
        names = packed.column("stream").to_pylist()
        for stream, data in zip(names, packed.column("sightings"), strict=True):
            with pa.ipc.open_stream(data.as_buffer()) as reader:
                for batch in reader:
                    yield pa.RecordBatch.from_arrays(
                        [
                            pa.repeat(pa.scalar(stream, pa.string()), batch.num_rows),
                            batch.column("stream_id"),
                            batch.column("writer").dictionary_decode(),
                            batch.column("source"),
                            batch.column("row_index"),
                        ],
                        names=[
                            "stream",
                            "stream_id",
                            "writer",
                            "source",
                            "row_index",
                        ],
                    )

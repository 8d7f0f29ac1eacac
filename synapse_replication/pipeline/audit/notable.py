"""Selects the ids that an audit has to examine.

A healthy id is in the tables, in the archive and on the wire, and has the same writer
in the tables and in the archive. There may be millions of healthy ids, and in a healthy
deployment few others. So each task removes nearly all healthy ids before Spark joins,
sorts or caches anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from synapse_replication.pipeline.audit.sightings import Source

#: Maps a stream to the least and the greatest relevant id.
Bounds = Mapping[str, tuple[int, int]]

#: The columns that describe an id.
NOTABLE_SCHEMA: Final = pa.schema(
    [
        pa.field("stream", pa.string()),
        pa.field("stream_id", pa.int64()),
        # The least and the greatest name of the id's writers in tables and archive:
        # they differ only if several writers used the id, and are null if the writer is
        # unknown.
        pa.field("first_writer", pa.string()),
        pa.field("last_writer", pa.string()),
        # The instance that sent the id, the one with the least name if there are
        # several; null if the id was not sent. It is not always the writer, because
        # some instances send the rows of all instances.
        pa.field("sender", pa.string()),
        pa.field("in_tables", pa.bool_()),
        pa.field("archived", pa.bool_()),
        pa.field("sent", pa.bool_()),
        # Whether two archived rows, maybe of two writers, have the id and the same
        # ``row_index``.
        pa.field("repeated", pa.bool_()),
        # The last id of the run of consecutive ids that begins with this id, and its
        # writer, or its sender if the writer is unknown; null for other ids.
        pa.field("run_last", pa.int64()),
        pa.field("run_last_writer", pa.string()),
    ]
)

_Array = np.ndarray[Any, Any]

#: The number of an unknown writer in the computation of the smallest writer number. It
#: is greater than the number of any known writer.
_NO_WRITER: Final = np.iinfo(np.int32).max


@attrs.frozen
class _Sightings:
    """Sightings, sorted by stream and id, with numbers instead of names.

    :ivar writer: the number of each sighting's writer; -1 if it is unknown.
    :ivar starts: the index of each id's first sighting.
    :ivar streams: the sorted names of streams.
    :ivar names: the sorted names of writers.
    """

    stream: _Array
    id: _Array
    writer: _Array
    source: _Array
    row_index: _Array
    starts: _Array
    streams: tuple[str, ...]
    names: tuple[str, ...]

    def least(self, of: _Array) -> _Array:
        """Return each id's smallest writer number among sightings that a mask selects.

        For an id without such a sighting of a known writer, the number is
        :data:`_NO_WRITER`.
        """
        writers = np.where(of & (self.writer >= 0), self.writer, _NO_WRITER)
        return np.minimum.reduceat(writers, self.starts)

    def greatest(self, of: _Array) -> _Array:
        """Return each id's greatest writer number among sightings that a mask selects.

        For an id without such a sighting of a known writer, the number is -1.
        """
        return np.maximum.reduceat(np.where(of, self.writer, -1), self.starts)

    def any(self, of: _Array) -> _Array:
        """Return, for each id, whether a mask selects any of its sightings."""
        return np.logical_or.reduceat(of, self.starts)


def notable(
    seen: Iterable[pa.RecordBatch],
    *,
    received: Bounds | None = None,
    archived: Bounds | None = None,
) -> pa.Table:
    """Return the ids that an audit has to examine, with NOTABLE_SCHEMA.

    These are ids that have more than one writer in the tables and the archive together,
    are in no table, are missing on the wire or in the archive, or have two archived
    rows with the same ``row_index``. The result also has the first id of each run of
    consecutive ids, in one row with the last id of that run. Finally, the result has
    the first and the last archived id of each writer of each stream.

    :param seen: sightings: ``stream``, ``stream_id``, ``writer`` (null if unknown),
        ``source`` and ``row_index`` (used only for the archive). They must include all
        sightings of an id, or none of them.
    :param received: the ranges in which an id that was not sent is relevant; by default
        all.
    :param archived: the ranges in which an id that is not archived is relevant; by
        default all.
    """
    found = [batch for batch in seen if batch.num_rows]
    if not found:
        return NOTABLE_SCHEMA.empty_table()
    table = pa.Table.from_batches(found)
    all_ = _sort(table)
    stream, id_ = all_.stream[all_.starts], all_.id[all_.starts]
    on_wire = all_.source == Source.WIRE
    first, last = all_.least(~on_wire), all_.greatest(~on_wire)
    in_tables = all_.any(all_.source == Source.TABLES)
    in_archive = all_.any(all_.source == Source.ARCHIVE)
    sent = all_.any(on_wire)
    repeated = _repeated(all_)
    run_starts = np.flatnonzero(
        np.concatenate(
            ([True], (stream[1:] != stream[:-1]) | (id_[1:] != id_[:-1] + 1))
        )
    )
    run_ends = np.concatenate((run_starts[1:], [len(id_)])) - 1
    selected = (first < last) | ~in_tables | repeated
    selected |= ~in_archive & _within(stream, id_, all_.streams, archived)
    selected |= ~sent & _within(stream, id_, all_.streams, received)
    selected[run_starts] = True
    selected[_ends_of_writers(stream, first, in_archive)] = True

    sender = all_.least(on_wire)
    of_run = np.full(len(id_), -1)
    of_run[run_starts] = run_ends
    chosen = np.flatnonzero(selected)
    run_end = of_run[chosen]
    end_writer = np.where(first[run_end] == _NO_WRITER, sender[run_end], first[run_end])
    return pa.Table.from_arrays(
        [
            pa.array(all_.streams).take(pa.array(stream[chosen])),
            pa.array(id_[chosen]),
            _names(all_.names, first[chosen]),
            _names(all_.names, last[chosen]),
            _names(all_.names, sender[chosen]),
            *(pa.array(flag[chosen]) for flag in (in_tables, in_archive, sent)),
            pa.array(repeated[chosen]),
            pa.array(id_[run_end], mask=run_end < 0),
            _names(all_.names, np.where(run_end < 0, _NO_WRITER, end_writer)),
        ],
        schema=NOTABLE_SCHEMA,
    )


def _sort(table: pa.Table) -> _Sightings:
    streams, stream = _numbered(table.column("stream"))
    names, writer = _numbered(table.column("writer"))
    id_, source, row_index = (
        table.column(name).to_numpy() for name in ("stream_id", "source", "row_index")
    )
    order = np.lexsort((id_, stream))
    stream, id_ = stream[order], id_[order]
    begins = (stream[1:] != stream[:-1]) | (id_[1:] != id_[:-1])
    return _Sightings(
        stream,
        id_,
        writer[order],
        source[order],
        row_index[order],
        np.flatnonzero(np.concatenate(([True], begins))),
        streams,
        names,
    )


def _numbered(texts: pa.ChunkedArray) -> tuple[tuple[str, ...], _Array]:
    """Return the sorted distinct texts, and the index of each text; -1 for null."""
    encoded = texts.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    order = pc.array_sort_indices(encoded.dictionary)
    rank = np.empty(len(order) + 1, dtype=np.int32)
    rank[order.to_numpy()] = np.arange(len(order))
    # The last entry is for null.
    rank[-1] = -1
    indices = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
    return tuple(encoded.dictionary.take(order).to_pylist()), rank[indices]


def _names(names: tuple[str, ...], numbers: _Array) -> pa.Array:
    unknown = (numbers < 0) | (numbers == _NO_WRITER)
    indices = pa.array(np.where(unknown, 0, numbers), mask=unknown)
    return pa.array(names, pa.string()).take(indices)


def _repeated(all_: _Sightings) -> _Array:
    """Return, for each id, whether two of its archived rows have the same index."""
    archived = np.flatnonzero(all_.source == Source.ARCHIVE)
    stream, id_ = all_.stream[archived], all_.id[archived]
    row_index = all_.row_index[archived]
    order = np.lexsort((row_index, id_, stream))
    keys = stream[order], id_[order], row_index[order]
    same = np.logical_and.reduce([key[1:] == key[:-1] for key in keys])
    flags = np.zeros(len(all_.id), dtype=bool)
    flags[archived[order[1:][same]]] = True
    return all_.any(flags)


def _within(
    stream: _Array, id_: _Array, streams: tuple[str, ...], bounds: Bounds | None
) -> _Array:
    if bounds is None:
        return np.ones(len(id_), dtype=bool)
    low = np.ones(len(streams), dtype=np.int64)
    high = np.zeros(len(streams), dtype=np.int64)
    for index, name in enumerate(streams):
        if name in bounds:
            low[index], high[index] = bounds[name]
    return (id_ >= low[stream]) & (id_ <= high[stream])


def _ends_of_writers(stream: _Array, writer: _Array, archived: _Array) -> _Array:
    """Return the indexes of each (stream, writer)'s first and last archived id."""
    indices = np.flatnonzero(archived)
    pairs = stream[indices].astype(np.int64) << 32 | writer[indices]
    _, first = np.unique(pairs, return_index=True)
    _, last = np.unique(pairs[::-1], return_index=True)
    return np.concatenate((indices[first], indices[::-1][last]))

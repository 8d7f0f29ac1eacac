"""Batches of the archive job: parts that it reads together and then commits.

In each cycle, the job plans once which rows to read, divides them into parts by id, and
reads and commits the parts batch by batch, so that a crash loses little work and
progress is visible. Each stream of a batch has a commit of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs

from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.source.partitions import Part


@attrs.frozen
class Batch:
    """Parts that are read together.

    :ivar offsets: the offset of each stream in ``parts``, after this batch.
    """

    parts: tuple[Part, ...]
    offsets: Mapping[str, StreamOffset]

    @property
    def ids(self) -> int:
        """The number of ids in the ranges of the parts, including ids without a row."""
        return sum(part.size for part in self.parts)


def batches_of(
    parts: Iterable[Part],
    start: Mapping[str, StreamOffset],
    end: Mapping[str, StreamOffset],
    limit: int,
) -> Iterator[Batch]:
    """Group parts into batches, one stream after another.

    :param parts: the parts, which cover all rows between ``start`` and ``end``.
    :param limit: the maximum number of ids in a batch, unless a single part has more.
    """
    batch: list[Part] = []
    size = 0
    by_stream: dict[str, list[Part]] = {}
    for part in parts:
        by_stream.setdefault(part.stream.name, []).append(part)
    for of_stream in by_stream.values():
        of_stream.sort(key=lambda part: (part.span.low, part.span.high))
    ordered = [part for name in sorted(by_stream) for part in by_stream[name]]
    left = {name: len(of_stream) for name, of_stream in by_stream.items()}
    for part in ordered:
        if batch and size + part.size > limit:
            yield _batch(batch, start, end, left)
            batch, size = [], 0
        batch.append(part)
        size += part.size
    if batch:
        yield _batch(batch, start, end, left)


def _batch(
    parts: list[Part],
    start: Mapping[str, StreamOffset],
    end: Mapping[str, StreamOffset],
    left: dict[str, int],
) -> Batch:
    offsets = {}
    for part in parts:
        name = part.stream.name
        left[name] -= 1
        # All rows of the stream up to the last id of the part are in this batch or in
        # earlier ones.
        offsets[name] = (
            start[name].towards(end[name], part.span.high) if left[name] else end[name]
        )
    return Batch(tuple(parts), offsets)

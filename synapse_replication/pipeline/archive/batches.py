"""Batches: the ids that the archive commits together.

Complete rows are planned once, divided into parts by their ids, and archived batch by
batch, so that a crash loses little work and progress is visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs

from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.source.partitions import Part

__all__ = ["Batch", "batches_of"]


@attrs.frozen
class Batch:
    """Parts that are read together.

    :ivar offsets: the offsets of their streams after this batch.
    """

    parts: tuple[Part, ...]
    offsets: Mapping[str, StreamOffset]

    @property
    def ids(self) -> int:
        """The number of ids in its ranges, whether used or not."""
        return sum(part.size for part in self.parts)


def batches_of(
    parts: Iterable[Part],
    start: Mapping[str, StreamOffset],
    end: Mapping[str, StreamOffset],
    limit: int,
) -> Iterator[Batch]:
    """Group parts into batches, one stream after another.

    :param parts: the parts, which cover all rows between ``start`` and ``end``.
    :param limit: the most ids of a batch, unless a single part has more.
    """
    waiting: list[Part] = []
    size = 0
    by_stream: dict[str, list[Part]] = {}
    for part in parts:
        by_stream.setdefault(part.stream.name, []).append(part)
    for of_stream in by_stream.values():
        of_stream.sort(key=lambda part: (part.span.low, part.span.high))
    ordered = [part for name in sorted(by_stream) for part in by_stream[name]]
    left = {name: len(of_stream) for name, of_stream in by_stream.items()}
    for part in ordered:
        if waiting and size + part.size > limit:
            yield _batch(waiting, start, end, left)
            waiting, size = [], 0
        waiting.append(part)
        size += part.size
    if waiting:
        yield _batch(waiting, start, end, left)


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
        # This batch or earlier ones have all rows of the stream up to the part's last
        # id.
        offsets[name] = (
            start[name].towards(end[name], part.span.high) if left[name] else end[name]
        )
    return Batch(tuple(parts), offsets)

"""Offsets: vector clocks of the rows read from each stream, and their arithmetic.

An offset that was read from the database contains every writer that was known at that
time, even a slow one. Writers that are not in the offset are at the offset's minimum.
So no rows of a writer are skipped, even if the writer is slow, or writes its first row
later. This module uses neither a database nor Spark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import msgspec

from synapse_replication.errors import PipelineError, excerpt

_MAX_ID = 2**63 - 1


_Id = Annotated[int, msgspec.Meta(ge=0, le=_MAX_ID)]


class StreamOffset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The position up to which each writer of a stream has been read.

    Unlike a :class:`~synapse_replication.streams.tokens.MultiWriterStreamToken`, it can
    also contain writers at or below the minimum.

    :ivar minimum: the position of all writers that are not in ``writers``, and of rows
        whose table does not store the writer.
    :ivar writers: the positions of known writers.
    """

    minimum: _Id = 0
    writers: Mapping[str, _Id] = {}

    @property
    def furthest(self) -> int:
        """The greatest position of any writer."""
        return max(self.minimum, *self.writers.values(), 0)

    @property
    def least(self) -> int:
        """The least position of any writer."""
        return min(self.minimum, *self.writers.values(), _MAX_ID)

    def position(self, writer: str) -> int:
        """Return the position of a writer."""
        return self.writers.get(writer, self.minimum)

    def naming(self, writers: Iterable[str]) -> StreamOffset:
        """Return an equal offset that contains further writers."""
        names = sorted({*writers, *self.writers})
        return StreamOffset(self.minimum, {w: self.position(w) for w in names})

    def advance(self, other: StreamOffset) -> StreamOffset:
        """Return the least offset that covers all rows that either offset covers."""
        return self._combine(other, max)

    def retreat(self, other: StreamOffset) -> StreamOffset:
        """Return the offset that covers exactly the rows that both offsets cover."""
        return self._combine(other, min)

    def _combine(
        self, other: StreamOffset, choose: Callable[[int, int], int]
    ) -> StreamOffset:
        return StreamOffset(
            choose(self.minimum, other.minimum),
            {
                writer: choose(self.position(writer), other.position(writer))
                for writer in sorted({*self.writers, *other.writers})
            },
        )

    def towards(self, target: StreamOffset, read_upto: int) -> StreamOffset:
        """Return the offset after reading some of the rows up to ``target``.

        :param target: an offset at or after this one.
        :param read_upto: the id up to which the rows between the two offsets were read,
            for every writer.
        """
        bounded = StreamOffset(
            min(target.minimum, read_upto),
            {w: min(p, read_upto) for w, p in target.writers.items()},
        )
        return self.advance(bounded)

    @classmethod
    def from_json(cls, value: Any) -> StreamOffset:
        """Parse a JSON value. A number is a minimum without writers.

        :raises PipelineError: if the value is not a position.
        """
        try:
            found = msgspec.convert(value, _Id | StreamOffset)
        except msgspec.ValidationError:
            raise PipelineError(
                f"{excerpt(json.dumps(value))} is not a position; write a number of "
                '0 or more, or an object like {"minimum": 5, "writers": {"master": 7}}'
            ) from None
        return cls(found) if isinstance(found, int) else found


def offsets_to_json(offsets: Mapping[str, StreamOffset]) -> dict[str, Any]:
    """Return the JSON value of the offsets of streams.

    Keys are sorted, because Spark compares offsets as text.
    """
    found: dict[str, Any] = msgspec.to_builtins(offsets, order="sorted")
    return found


def offsets_from_json(value: Any) -> dict[str, StreamOffset]:
    """Parse the result of :func:`offsets_to_json`.

    :raises PipelineError: if the value is invalid. The message says what to write.
    """
    if not isinstance(value, dict):
        raise PipelineError(
            f"{excerpt(json.dumps(value))} is no offset; write a JSON object that "
            "maps streams to positions"
        )
    offsets = {}
    for name, position in value.items():
        try:
            offsets[name] = StreamOffset.from_json(position)
        except PipelineError as error:
            raise PipelineError(f"stream {excerpt(name)}: {error}") from error
    return offsets

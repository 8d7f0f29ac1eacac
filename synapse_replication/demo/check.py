"""Comparison of the rows that a writer wrote with those in a reader's journal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import msgspec


class JournalEntry(
    msgspec.Struct,
    frozen=True,
    rename={"stream_name": "stream", "instance_name": "writer"},
):
    """A line of a journal, or of a writer's log: the rows of one token.

    A line without rows records only a position.

    :ivar rows: JSON values, as on the wire.
    """

    stream_name: str
    instance_name: str
    token: int
    rows: list[Any]


def read_entries(path: Path) -> list[JournalEntry]:
    """Read a journal, or a writer's log.

    An incomplete last line, and lines without the key ``rows``, are skipped.
    """
    entries = []
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            with suppress(msgspec.ValidationError):
                entries.append(msgspec.json.decode(line, type=JournalEntry))
    return entries


@attrs.frozen
class WriterTally:
    """The result of comparing one writer's rows of a stream with a reader's journal.

    :ivar written: the number of rows that the writer wrote.
    :ivar received: the number of its rows in the reader's journal.
    :ivar missing: the number of written rows that are absent from the journal, or
        differ there.
    :ivar duplicated: the number of rows in the journal beyond those that were written:
        repetitions, and rows that were not written.
    :ivar out_of_order: the number of rows in the journal after an entry with a greater
        token.
    :ivar final_position: the last position of the writer in the journal; ``None`` if
        there is none.
    :ivar last_token: the greatest token of a written row; 0 if there is none.
    """

    stream_name: str
    instance_name: str
    reader: str
    written: int
    received: int
    missing: int
    duplicated: int
    out_of_order: int
    final_position: int | None
    last_token: int

    @property
    def has_caught_up(self) -> bool:
        """Whether the reader has a position, and has reached the writer's last row."""
        return self.final_position is not None and (
            self.final_position >= self.last_token
        )

    @property
    def is_good(self) -> bool:
        """Whether every row arrived once, in order, and the reader has caught up."""
        faults = self.missing + self.duplicated + self.out_of_order
        return not faults and self.has_caught_up


def compare(
    stream_name: str,
    instance_name: str,
    reader: str,
    written: Iterable[tuple[int, Any]],
    journal: Iterable[JournalEntry],
) -> WriterTally:
    """Compare the rows of one writer of one stream with a reader's journal.

    The order of tokens is checked, but not the order of rows with the same token.

    :param reader: the reader's name.
    :param written: ``(token, row)`` of every row that the writer wrote to the stream.
    :param journal: the reader's journal; entries of other streams or writers are
        ignored.
    """
    expected = Counter((token, _canonical(row)) for token, row in written)
    received: Counter[tuple[int, str]] = Counter()
    out_of_order = 0
    highest = position = None
    for entry in journal:
        if (entry.stream_name, entry.instance_name) != (stream_name, instance_name):
            continue
        position = entry.token
        received.update((entry.token, _canonical(row)) for row in entry.rows)
        if highest is not None and entry.token < highest:
            out_of_order += len(entry.rows)
        highest = entry.token if highest is None else max(highest, entry.token)
    return WriterTally(
        stream_name,
        instance_name,
        reader,
        written=expected.total(),
        received=received.total(),
        missing=(expected - received).total(),
        duplicated=(received - expected).total(),
        out_of_order=out_of_order,
        final_position=position,
        last_token=max((token for token, _ in expected), default=0),
    )


def _canonical(row: Any) -> str:
    return json.dumps(row, sort_keys=True)

"""Compare what was written with what a reader has in its journal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

__all__ = ["Entry", "Tally", "compare", "read_entries"]


@attrs.frozen
class Entry:
    """A line of a journal: the rows of one token, or a position if there are none.

    :ivar rows: JSON values, as on the wire.
    """

    stream_name: str
    instance_name: str
    token: int
    rows: list[Any]


def read_entries(path: Path) -> list[Entry]:
    """Read a journal, or what a writer noted down.

    A last line that is not finished is skipped, and so is what holds no rows.
    """
    entries = []
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            value = json.loads(line)
            if "rows" not in value:
                continue
            entries.append(
                Entry(value["stream"], value["writer"], value["token"], value["rows"])
            )
    return entries


@attrs.frozen
class Tally:
    """What became of the rows of one writer of a stream at one reader.

    :ivar written: rows that the writer wrote.
    :ivar received: rows in the reader's journal.
    :ivar missing: rows that were written and are not in the journal as they were.
    :ivar duplicated: rows in the journal that were not written, or not so often.
    :ivar out_of_order: rows in the journal behind one with a greater token.
    :ivar final_position: how far the reader got; ``None`` if it never heard of the
        writer.
    :ivar last_token: of the last row that was written, 0 if there was none.
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
    def is_level(self) -> bool:
        """Return whether the reader got to the writer's last row."""
        return self.final_position is not None and (
            self.final_position >= self.last_token
        )

    @property
    def is_good(self) -> bool:
        """Return whether every row came once, in order, and the reader is level."""
        faults = self.missing + self.duplicated + self.out_of_order
        return not faults and self.is_level


def compare(
    stream_name: str,
    instance_name: str,
    reader: str,
    written: Iterable[tuple[int, Any]],
    journal: Iterable[Entry],
) -> Tally:
    """Count, for one writer of one stream, what one reader got.

    Rows of one token arrive together; their order among themselves is not
    compared.

    :param written: ``(token, row)`` of every row, from their source.
    :param reader: its name.
    :param journal: of the reader, with the entries of others among them.
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
    return Tally(
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

"""Reading of recordings from files.

:mod:`synapse_replication.recordings.format` describes the format. Files may be
compressed with gzip or xz.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from synapse_replication.recordings.format import (
    Record,
    RecordingError,
    read_records,
    unpacked,
)


def shipped_recording() -> Path:
    """Return the path of the recording that ships with the package.

    It contains the first traffic of a real Synapse of five processes, started with an
    empty database and driven over the client API: 9,000 commands, 4,676 of them
    rows. Its users and tokens are fictitious.
    """
    return Path(
        str(files("synapse_replication.recordings") / "data" / "startup.jsonl.xz")
    )


def read_recording(path: Path) -> Iterator[Record | RecordingError]:
    """Yield the records of a recording, a line at a time.

    An error is yielded in place of a line that is not a record. Where a compressed file
    is damaged or truncated, an error is yielded as the last item. Blank lines are
    skipped.

    :raises OSError: if the file cannot be opened or read.
    """
    with path.open("rb") as file:
        yield from read_records(unpacked(file))

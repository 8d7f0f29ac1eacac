"""Read recordings of traffic from files.

Their format is in :mod:`synapse_replication.recordings.format`. Files may be compressed
with gzip or xz.
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

__all__ = ["Record", "RecordingError", "read_recording", "shipped_recording"]


def shipped_recording() -> Path:
    """Find the recording that comes with the package.

    A real Synapse of five processes, from an empty database, driven over the client
    API: 21,168 commands, 10,159 of them rows. Its users and tokens were made up.
    """
    return Path(
        str(files("synapse_replication.recordings") / "data" / "startup_drive.jsonl.xz")
    )


def read_recording(path: Path) -> Iterator[Record | RecordingError]:
    """Read a recording, a line at a time.

    What is no record is given in its place, as an error; blank lines are passed
    over. A file that is cut off gives an error as its last.

    :raises OSError: if the file cannot be opened or read.
    """
    with path.open("rb") as file:
        yield from read_records(unpacked(file))

"""Writes recordings of the rows of :mod:`tests.support.big_database`.

Each recording is one process's traffic: a line for each row, in the order of time, in
files of half a million lines, as ``synapse-replication record`` divides them.
"""

from __future__ import annotations

import gzip
import heapq
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from tests.support.big_database import SHARES

#: The number of lines in a file.
_LINES_OF_FILE: Final = 500_000

#: The streams that one process writes; four writers share the others.
_WRITER: Final = {"to_device": "writer1", "account_data": "master"}

#: The duration of the traffic, in s: thirty days.
_SECONDS: Final = 30 * 86_400


def write_recordings(folder: Path, rows: int, lines: int) -> list[Path]:
    """Write recordings, each of all rows, until there are enough lines.

    :param rows: the number of rows for which the database was filled.
    :return: the recordings: folders of files.
    """
    paths: list[Path] = []
    while lines > 0:
        path = folder / f"reader{len(paths) + 1}"
        path.mkdir(parents=True)
        paths.append(path)
        lines -= _write(path, islice(_lines(rows), lines))
    return paths


def _write(folder: Path, lines: Iterator[str]) -> int:
    """Write the files of a recording, and return the number of lines."""
    written = 0
    while chunk := list(islice(lines, _LINES_OF_FILE)):
        path = folder / f"{written:010}.jsonl.gz"
        with gzip.open(path, "wt", compresslevel=1, encoding="utf-8") as file:
            file.writelines(chunk)
        written += len(chunk)
    return written


def _lines(rows: int) -> Iterator[str]:
    """Yield the lines of all streams in the order of time."""
    streams = []
    for stream, share in SHARES.items():
        last = max(int(rows * share), 8)
        streams.append(_stream_lines(stream, last))
    for _, line in heapq.merge(*streams):
        yield line


def _stream_lines(stream: str, last: int) -> Iterator[tuple[float, str]]:
    """Yield the time and the line of each row of a stream."""
    only = _WRITER.get(stream)
    for id_ in range(1, last + 1):
        # As in the database: one id in a thousand was rolled back.
        if id_ % 1000 == 999:
            continue
        at = id_ / last * _SECONDS
        writer = only or f"writer{1 + id_ * 7 // 3 % 4}"
        row = rf"[\"!room{id_ * 104_729 % 700}:example.org\", {id_}]"
        line = f"RDATA {stream} {writer} {id_} {row}"
        yield at, f'{{"t": {at:.6f}, "channel": "example.org", "line": "{line}"}}\n'

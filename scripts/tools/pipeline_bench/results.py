"""Digests of the results of jobs, to compare those of different masters."""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
from deltalake import DeltaTable

#: Findings about rows that the measurement leaves as they are have no other content.
_FINDING = ("kind", "stream", "instance_name", "first_token", "last_token", "count")


def result_of(job: str, folder: Path, words: Sequence[str]) -> str:
    """Return a digest of what a job has printed and written, without times and names.

    :param job: the name of the job's command.
    :param folder: the folder of the measurement, with the output of the job.
    :param words: the arguments of the job.
    """
    found: Any
    if job == "archive":
        found = {
            table.name: _rows_of(DeltaTable(str(table)).file_uris())
            for table in sorted((folder / "archive" / "streams").iterdir())
        }
    elif job == "export":
        found = _rows_of([str(folder / "export" / "rows.parquet")])
    elif job == "audit":
        listed = json.loads((folder / "output").read_bytes())["findings"]
        found = sorted([str(each[name]) for name in _FINDING] for each in listed)
    else:
        found = _text_of(Path(words[words.index("--out") + 1]) / "report.html")
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _rows_of(paths: Sequence[str]) -> Sequence[int]:
    """Return the number of rows in files, and a digest of the rows in any order."""
    with duckdb.connect() as connection:
        (found,) = connection.execute(
            "SELECT count(*), bit_xor(hash(rows)) FROM read_parquet($paths) AS rows",
            {"paths": list(paths)},
        ).fetchall()
    return [int(value) for value in found]


def _text_of(page: Path) -> list[str]:
    """Return the words of a report that do not depend on the run."""
    text = re.sub(r"(?s)<(style|script|svg)\b.*?</\1>|<[^>]*>", " ", page.read_text())
    # The time of the report, the names of rooms and users, and the folder.
    varying = r"\d{4}-\d\d-\d\d \d\d:\d\d\S*|(?:room|user) [0-9a-f]{10}|/\S+"
    return re.sub(varying, "", html.unescape(text)).split()


def damage_a_file(archive: Path) -> None:
    """Cut off the end of one file of an archive."""
    table = DeltaTable(str(archive / "streams" / "receipts"))
    path = Path(min(table.file_uris()))
    path.write_bytes(path.read_bytes()[:-100])

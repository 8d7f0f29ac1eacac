"""Files that ship with this package beside the code: tables, and SQL statements."""

from __future__ import annotations

import csv
import re
from pathlib import Path


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, by the names of its columns."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_queries(path: Path) -> dict[str, str]:
    """Return the parts of a file of SQL, which begin with lines like ``-- name: x``.

    Lines of comments are omitted.
    """
    parts = re.split(r"^-- name: (\w+)$", path.read_text("utf-8"), flags=re.MULTILINE)
    return {
        name: re.sub(r"^ *--.*\n", "", text, flags=re.MULTILINE).strip()
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }

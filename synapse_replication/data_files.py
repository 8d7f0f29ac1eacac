"""Tables that ship with this package as CSV files beside the code."""

from __future__ import annotations

import csv
from pathlib import Path


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, by the names of its columns."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))

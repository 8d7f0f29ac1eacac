"""Reads what tasks would read, in the process of a test."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import pyarrow as pa

from synapse_replication.pipeline.scan import Scan


def read_here(scan: Scan) -> Iterator[pa.RecordBatch]:
    """Read all tasks of a scan, one after the other."""
    return chain.from_iterable(map(scan.read, scan.tasks))

"""The tables that this package needs, created by numbered deltas.

A stand-alone main process runs :func:`prepare_database` when it starts. A released
delta is never changed, but corrected by a later delta. An existing ``stream_positions``
of a homeserver is left unchanged.

See docs/failure-modes.rst: failure-migration-twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from synapse_replication.data_files import read_queries
from synapse_replication.storage import queries

_SQL = read_queries(Path(__file__).with_suffix(".sql"))

#: The deltas, in order from number 1.
DELTAS = tuple(sql for name, sql in _SQL.items() if name.startswith("delta_"))


def prepare_database(txn: Any) -> int:
    """Apply the deltas that a database lacks, in one transaction.

    The caller must commit the transaction. An advisory lock serialises concurrent
    processes.

    :param txn: a cursor.
    :return: the number of deltas applied, 0 if the database is up to date.
    """
    txn.execute(queries.SQL["lock_positions"])
    txn.execute("SELECT to_regclass('synapse_replication_schema') IS NOT NULL")
    version = None
    if txn.fetchone()[0]:
        txn.execute("SELECT version FROM synapse_replication_schema")
        version = txn.fetchone()
    else:
        txn.execute(_SQL["version_table"])
    applied = 0 if version is None else int(version[0])
    for delta in DELTAS[applied:]:
        txn.execute(delta)
    if version is None:
        txn.execute(
            "INSERT INTO synapse_replication_schema VALUES (%s)", (len(DELTAS),)
        )
    elif applied < len(DELTAS):
        txn.execute(
            "UPDATE synapse_replication_schema SET version = %s", (len(DELTAS),)
        )
    return len(DELTAS[applied:])

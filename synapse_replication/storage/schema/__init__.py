"""The tables that this package itself needs, made by numbered deltas.

:func:`prepare_database` is run at the start of a stand-alone main process. A
delta is never changed once it was released; the next one repairs it. A homeserver
that has ``stream_positions`` keeps it as it is.
"""

from __future__ import annotations

from typing import Any

from synapse_replication.storage import queries
from synapse_replication.storage.schema.deltas import DELTAS

__all__ = ["prepare_database"]

_MAKE_VERSION = """
    CREATE TABLE IF NOT EXISTS synapse_replication_schema (
        -- the number of the last delta that was applied; one row
        version integer NOT NULL
    )
"""


def prepare_database(txn: Any) -> int:
    """Apply the deltas that a database lacks; none if it has them all.

    Processes that do it at the same time wait for one another. Runs in one
    transaction, which the caller commits.

    :return: the number of deltas that were applied.
    """
    txn.execute(queries.LOCK_POSITIONS)
    txn.execute("SELECT to_regclass('synapse_replication_schema') IS NOT NULL")
    version = None
    if txn.fetchone()[0]:
        txn.execute("SELECT version FROM synapse_replication_schema")
        version = txn.fetchone()
    else:
        txn.execute(_MAKE_VERSION)
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

"""An advisory lock for an instance's name in PostgreSQL: its key and its queries.

:mod:`~synapse_replication.storage.writer_lock` acquires and checks it.
"""

from __future__ import annotations

import hashlib
import struct
from datetime import datetime
from typing import Any

from msgspec import Struct

from synapse_replication.errors import StorageError
from synapse_replication.storage import queries

#: How long to wait for a lock that another process holds, in s.
WAIT = 10.0
#: The interval between two attempts to acquire the lock, in s.
RETRY_INTERVAL = 0.5


class _Session(Struct, frozen=True):
    """The session that holds the lock, as PostgreSQL shows it."""

    pid: int
    address: str = ""
    application_name: str = ""
    since: datetime | None = None

    def __str__(self) -> str:
        name = f" ({self.application_name})" if self.application_name else ""
        return f"session {self.pid} from {self.address}{name}, open since {self.since}"


def lock_key(server_name: str, instance_name: str) -> tuple[int, ...]:
    """Return the two numbers that identify the lock of a name."""
    name = f"synapse_replication {server_name} {instance_name}".encode()
    return struct.unpack(">ii", hashlib.sha256(name).digest()[:8])


def taken(instance_name: str, holder: _Session, override: str) -> StorageError:
    """Return the error that another process has the lock.

    :param override: how to start without the lock.
    """
    return StorageError(
        f"another process writes as {instance_name}: {holder} holds the lock of this "
        "name. Stop that process; if it does not exist any more, end its session: "
        f"SELECT pg_terminate_backend({holder.pid}). To start without the lock, "
        f"{override}"
    )


def try_lock(txn: Any, key: tuple[int, ...]) -> tuple[int, _Session]:
    """Acquire a lock if it is free.

    :return: the process id of this session, and the session with the lock.
    """
    txn.execute("SELECT pg_backend_pid()")
    ((own,),) = txn.fetchall()
    unsigned = [number % 2**32 for number in key]
    txn.execute(queries.SQL["lock_holder"], unsigned)
    found = txn.fetchall()
    if not found:
        txn.execute(queries.SQL["lock_settings"])
        txn.execute("SELECT pg_try_advisory_lock(%s, %s)", key)
        ((is_acquired,),) = txn.fetchall()
        if is_acquired:
            return own, _Session(own)
        txn.execute(queries.SQL["lock_holder"], unsigned)
        found = txn.fetchall()
    return own, _Session(*found[0]) if found else _Session(-1, "an unknown address")

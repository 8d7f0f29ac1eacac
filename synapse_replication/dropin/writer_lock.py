"""The lock of a writer's name in a process of the host.

It is acquired before the process allocates an id, in a session of its own that stays
open until the process ends. Unlike the lock of a process of this package, it is not
acquired again if the database ends the session.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import psycopg2

from synapse_replication.dropin.settings import variable
from synapse_replication.storage.name_lock import (
    RETRY_INTERVAL,
    WAIT,
    lock_key,
    taken,
    try_lock,
)

#: The sessions that hold the locks of this process, by database and lock.
_sessions: dict[tuple[str, tuple[int, ...]], Any] = {}


def hold_name(db_conn: Any, server_name: str, instance_name: str) -> None:
    """Acquire the lock of a name, unless this process has it. Blocks up to 10 s.

    :param db_conn: a connection of the host to the database.
    :raises StorageError: if another process holds it for too long.
    """
    info = db_conn.conn.info
    key = lock_key(server_name, instance_name)
    held = (f"{info.host}:{info.port}/{info.dbname}", key)
    if held in _sessions:
        return
    session: Any = psycopg2.connect(**info.dsn_parameters, password=info.password)
    session.autocommit = True
    deadline = time.monotonic() + WAIT
    with closing(session.cursor()) as cursor:
        while True:
            own, holder = try_lock(cursor, key)
            if holder.pid == own:
                _sessions[held] = session
                return
            if time.monotonic() > deadline:
                session.close()
                raise taken(
                    instance_name,
                    holder,
                    "start it with exec --no-writer-lock, or with "
                    f"{variable('writer_lock')}=false",
                )
            time.sleep(RETRY_INTERVAL)

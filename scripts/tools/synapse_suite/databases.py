"""The PostgreSQL server in which the homeserver's tests create their databases."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg2

from synapse_replication.testing.servers import PrivatePostgres

_MEMORY = Path("/dev/shm")
#: The maximum size of the databases of a few modules, in bytes.
_MEMORY_NEEDED = 2 << 30

#: The interval between searches for blocking sessions, in s.
_INTERVAL = 0.1

#: In the pattern, ``\m`` and ``\M`` match the start and the end of a word.
_TERMINATE = r"""
    SELECT pg_terminate_backend(blocking.pid)
    FROM pg_stat_activity AS waiting
    JOIN pg_stat_activity AS blocking
        ON waiting.query ~* ('^\s*DROP DATABASE\M.*\m' || blocking.datname || '\M')
        AND waiting.pid <> blocking.pid
    WHERE waiting.state = 'active'
"""


@contextlib.contextmanager
def open_server() -> Iterator[PrivatePostgres]:
    """Run a server with its data in memory, or on disk if memory is short.

    Each test creates a database, which is faster in memory.
    """
    parent = None
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _MEMORY_NEEDED:
        parent = _MEMORY
    with (
        PrivatePostgres(parent=parent) as server,
        terminate_blocking_sessions(server.dsn()),
    ):
        yield server


@contextlib.contextmanager
def terminate_blocking_sessions(dsn: str) -> Iterator[None]:
    """While the context is open, terminate sessions that block a ``DROP DATABASE``.

    A test drops its database while sessions that the test left open still use it. The
    server would wait for them and then report an error, and the test would try again
    for half a minute. A timeout of idle sessions instead would also end sessions of a
    running test on a slow machine.

    :param dsn: the connection string of a superuser.
    """
    stopped = threading.Event()
    with (
        contextlib.closing(psycopg2.connect(dsn)) as connection,
        ThreadPoolExecutor(1) as pool,
    ):
        connection.autocommit = True

        def terminate() -> None:
            with connection.cursor() as cursor:
                while not stopped.wait(_INTERVAL):
                    cursor.execute(_TERMINATE)

        terminated = pool.submit(terminate)
        try:
            yield
        finally:
            stopped.set()
        terminated.result()

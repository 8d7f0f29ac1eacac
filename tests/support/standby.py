"""A primary and a hot standby whose replay can be stopped, shared by tests."""

from __future__ import annotations

import atexit
import contextlib
import functools

import psycopg2

from synapse_replication.testing.servers import PrivatePostgres


class ReplicatedPostgres:
    """A primary and its hot standby, on private servers.

    The standby replays all databases of the primary. Each test uses a database of its
    own, and calls :meth:`resume` at its end.
    """

    def __init__(self) -> None:
        self.primary = PrivatePostgres()
        self.primary.start()
        self.standby = PrivatePostgres(primary=self.primary)
        self.standby.start()

    def stop(self) -> None:
        """Stop both servers."""
        self.standby.stop()
        self.primary.stop()

    def pause(self) -> None:
        """Stop the replay, after all that was written so far."""
        self.resume()
        _query(self.standby, "SELECT pg_wal_replay_pause()")
        # The request takes effect between two records.
        while (
            _query(self.standby, "SELECT pg_get_wal_replay_pause_state()") != "paused"
        ):
            _query(self.standby, "SELECT pg_sleep(0.01)::text")

    def resume(self) -> None:
        """Go on with the replay, until all that was written so far is replayed."""
        written = _query(self.primary, "SELECT pg_current_wal_lsn()::text")
        _query(self.standby, "SELECT pg_wal_replay_resume()::text")
        reached = f"SELECT pg_last_wal_replay_lsn() >= '{written}'"
        while not _query(self.standby, reached):
            _query(self.standby, "SELECT pg_sleep(0.01)::text")


def _query(server: PrivatePostgres, sql: str) -> object:
    with contextlib.closing(psycopg2.connect(server.dsn())) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(sql)
            ((value,),) = cursor.fetchall()
            return value


@functools.cache
def replicated_postgres() -> ReplicatedPostgres:
    """Return this process's servers, which start on first use and stop at exit."""
    servers = ReplicatedPostgres()
    atexit.register(servers.stop)
    return servers

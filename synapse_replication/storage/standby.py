"""What a snapshot of the database can prove: a standby may lack rows that exist.

Theory of operation: a writer stores its position after the transactions of all ids up
to it have ended. So a snapshot that contains a writer's stored position contains every
row of that writer up to it. In a snapshot that does not, a missing row proves nothing
if the database is a hot standby, which may lag behind its primary: the row may not have
been replayed yet. The primary itself has every committed row, whatever it has stored.

What a snapshot knows is selected by the statement that selects the rows, so that both
are of the same snapshot, without a further round trip.

The functions take a cursor and block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs
from psycopg2.extensions import parse_dsn

from synapse_replication.errors import CatchUpError, DatabaseBehindError, excerpt
from synapse_replication.storage.queries import SQL, literal


def knowledge_sql(
    positions_name: str | None,
    *,
    of_writer: bool = False,
    columns: str = "NULL::bigint",
) -> str:
    """Return a statement for what a snapshot knows, for :meth:`Knowledge.parse`.

    It selects one record, which a statement for rows can be joined to by ``UNION ALL``.

    :param positions_name: the stream's name in ``stream_positions``; ``None`` if it has
        no stored positions.
    :param of_writer: whether to select only the position of the writer
        ``instance_name``, a parameter of the statement.
    :param columns: the expressions before it.
    """
    stored = "NULL"
    if positions_name is not None:
        name = literal(positions_name).replace("%", "%%")
        stored = SQL["stored_of_stream"].format(stream_name=name)
        if of_writer:
            stored += " AND instance_name = %(instance_name)s"
    return f"SELECT {columns}, " + SQL["knowledge"].format(stored=stored)


@attrs.frozen
class Knowledge:
    """What a snapshot knows about the writers of a stream.

    :ivar is_standby: whether the database is in recovery.
    :ivar stored: the stored positions, as tokens, by writer.
    :ivar behind: the age in s of the last transaction that the standby has replayed,
        by its own clock; ``None`` if it is not known.
    """

    is_standby: bool
    stored: Mapping[str, int]
    behind: float | None

    @classmethod
    def parse(cls, text: str) -> Knowledge:
        """Return the knowledge that a statement of :func:`knowledge_sql` selected."""
        is_standby, stored, behind = json.loads(text)
        return cls(is_standby, stored or {}, behind)

    def error(self, stream_name: str, writer: str, upto_token: int) -> CatchUpError:
        """Return the error that the database does not know a writer's rows yet.

        :param upto_token: the token that was announced.
        """
        if self.behind is None:
            age = "has not replayed any transaction"
        else:
            age = f"is {max(self.behind, 0):.0f} s behind"
        at = self.stored.get(writer, "no position")
        return DatabaseBehindError(
            f"its database is a standby, which {age}: it shows {at} of "
            f"{excerpt(writer)} in {stream_name}, but {upto_token} was announced"
        )


@attrs.frozen
class DatabaseRole:
    """How a database can be used.

    :ivar is_standby: whether it is in recovery.
    :ivar is_read_only: whether transactions are read-only, by whatever setting.
    """

    is_standby: bool
    is_read_only: bool


def read_role(txn: Any) -> DatabaseRole:
    """Return how the connected database can be used."""
    txn.execute(SQL["role"])
    ((is_standby, is_read_only),) = txn.fetchall()
    return DatabaseRole(is_standby, is_read_only)


def preferring_writable(conninfo: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return connection parameters that select the primary among several hosts.

    If several hosts are listed and ``target_session_attrs`` is not set, libpq connects
    to the first host that answers, which may be a standby.

    :param conninfo: libpq's parameters by name, or a connection string as ``dsn``.
    """
    parameters = {**parse_dsn(conninfo.get("dsn") or ""), **conninfo}
    parameters.pop("dsn", None)
    hosts = f"{parameters.get('host') or ''}{parameters.get('hostaddr') or ''}"
    if "," not in hosts or parameters.get("target_session_attrs"):
        return conninfo
    return {**parameters, "target_session_attrs": "read-write"}

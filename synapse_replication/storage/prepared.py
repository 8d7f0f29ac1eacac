"""Statements that are planned once for each connection, not each time.

The check of a process's name costs a part of what planning the statements of a write
costs. So these statements are prepared, where the connection is the process's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import attrs


@attrs.frozen
class Prepared:
    """A statement with named parameters.

    :ivar sql: the statement, as for a cursor of psycopg2 with parameters.
    :ivar types: the SQL type of each parameter, by name.
    """

    sql: str
    types: Mapping[str, str]
    #: Its name on each connection.
    name: str = attrs.field(init=False)
    #: The statements that prepare and execute it.
    prepare: str = attrs.field(init=False)
    execute: str = attrs.field(init=False)

    @name.default
    def _make_name(self) -> str:
        digest = blake2b(self.sql.encode(), digest_size=8).hexdigest()
        return f"synapse_replication_{digest}"

    @prepare.default
    def _make_prepare(self) -> str:
        numbers = {name: f"${place}" for place, name in enumerate(self.types, 1)}
        types = f"({', '.join(self.types.values())})" if self.types else ""
        return f"PREPARE {self.name}{types} AS {self.sql % numbers}"

    @execute.default
    def _make_execute(self) -> str:
        values = f"({', '.join(f'%({name})s' for name in self.types)})"
        return f"EXECUTE {self.name}{values if self.types else ''}"


def run(txn: Any, parameters: Mapping[str, Any], *statements: Prepared) -> None:
    """Execute statements in one message, prepared if the cursor can do that.

    :param txn: a cursor; a
        :class:`~synapse_replication.storage.transactions.Transaction` prepares a
        statement when its connection first executes it. It has the rows of the last
        statement.
    """
    execute_prepared = getattr(txn, "execute_prepared", None)
    if execute_prepared is None:
        txn.execute("; ".join(each.sql for each in statements), parameters)
    else:
        execute_prepared(parameters, *statements)

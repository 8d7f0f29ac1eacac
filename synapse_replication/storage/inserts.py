"""The statements that write rows of declared streams."""

from __future__ import annotations

from msgspec import Struct

from synapse_replication.storage.queries import identifier
from synapse_replication.streams.table import TableStream


class InsertStatement(Struct, frozen=True):
    """A statement that inserts rows.

    :ivar sql: the statement, with the named parameters ``id``, ``instance_name`` (only
        if the stream has a writer column) and ``rows`` (JSON text: an array of objects
        that map columns to values).
    :ivar columns: the columns of a row, in the order of the wire.
    """

    sql: str
    columns: tuple[str, ...]


def declared_insert(declaration: TableStream) -> InsertStatement:
    """Return the statement that inserts rows of a declared stream."""
    table = identifier(declaration.table)
    columns = ", ".join(map(identifier, declaration.column_names))
    names, values = [identifier(declaration.id_column)], ["%(id)s"]
    if declaration.writer_column is not None:
        names.append(identifier(declaration.writer_column))
        values.append("%(instance_name)s")
    # PostgreSQL converts JSON to the columns' types, including arrays and timestamps.
    return InsertStatement(
        f"""
        INSERT INTO {table} ({", ".join(names)}, {columns})
        SELECT {", ".join(values)}, {columns}
        FROM jsonb_populate_recordset(NULL::{table}, %(rows)s::jsonb)
        """,
        declaration.column_names,
    )

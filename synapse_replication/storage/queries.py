"""SQL statements about sequences, stored positions, and the ids in tables.

Most are in ``queries.sql``, where a comment says what each does.

Values are named parameters. Identifiers (tables, columns, sequences) are quoted by
:func:`identifier`. They are inserted into the statement, or are parameters that
PostgreSQL converts with ``regclass``. A stream's table may have columns of any name.
Where columns of another table or subquery are in scope, too, column names are
qualified.

The ids of a stream that counts down are negative, both in ``stream_positions`` and in
the stream's tables. A statement that "needs" an index works without it, but reads the
whole table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from synapse_replication.data_files import read_queries
from synapse_replication.streams.id_column import IdColumn

#: The statements of ``queries.sql``, by name.
SQL: Final = read_queries(Path(__file__).with_suffix(".sql"))


def identifier(name: str) -> str:
    """Quote a name, which may be qualified by a schema."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in name.split("."))


def literal(text: str) -> str:
    """Quote a text as a literal, for statements without parameters."""
    return "'" + text.replace("'", "''") + "'"


def sequence_state(sequence: str) -> str:
    """Select ``last_value`` and ``is_called`` of a sequence."""
    return f"SELECT last_value, is_called FROM {identifier(sequence)}"


def admitted_sequence_state(sequence: str) -> str:
    """Select the same, and check the name of this process afterwards."""
    return (
        "SELECT (synapse_replication_admit(%(writer)s, %(term)s, ARRAY[last_value]))"
        f"[1], is_called FROM {identifier(sequence)}"
    )


def upsert_position(negative: bool, *, is_admitted: bool) -> str:
    """Insert a writer's position, or advance the stored one.

    A stored position never moves back. If it is unchanged, the row is not updated.

    :param is_admitted: whether the name of this process is checked.
    """
    name = "upsert_admitted_position" if is_admitted else "upsert_position"
    return SQL[name].format(further="<" if negative else ">")


def for_table(name: str, column: IdColumn, negative: bool = False) -> str:
    """Return a statement of ``queries.sql`` about the ids in a table.

    :param negative: whether the ids count down.
    """
    return SQL[name].format(
        table=identifier(column.table),
        id=identifier(column.id_column),
        writer=identifier(column.writer_column or ""),
        farthest="min" if negative else "max",
        further="<" if negative else ">",
        order="DESC" if negative else "ASC",
    )


def id_expressions(id_column: str, negative: bool) -> tuple[str, str, str]:
    """Return the expressions of a query that walks an index of the ids.

    :param id_column: the column, quoted if necessary.
    :param negative: whether ids count down.
    :return: the token, the order, and the condition for ``after`` and ``up_to``.
    """
    if negative:
        bounds = f"{id_column} < -%(after)s AND {id_column} >= -%(up_to)s"
        return f"-{id_column}", f"{id_column} DESC", bounds
    bounds = f"{id_column} > %(after)s AND {id_column} <= %(up_to)s"
    return id_column, id_column, bounds


def ids_between(column: IdColumn, negative: bool, *, of_writer: bool) -> str:
    """Select at most ``limit`` tokens ``after`` one and ``up_to`` another, in order.

    :param of_writer: whether to select only those of the writer ``instance_name``.
    """
    id_, order, bounds = id_expressions(identifier(column.id_column), negative)
    if of_writer:
        assert column.writer_column is not None
        writer = identifier(column.writer_column)
        bounds = f"{writer} = %(instance_name)s AND {bounds}"
    return f"""
        SELECT {id_} FROM {identifier(column.table)}
        WHERE {bounds} ORDER BY {order} LIMIT %(limit)s
    """

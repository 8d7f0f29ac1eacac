"""A temporary DuckDB database, in which a job queries what it has read.

Data that does not fit into memory is written to the database's file.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa

#: The memory that a database uses before it writes to its file.
_MEMORY: Final = "512MB"


@contextlib.contextmanager
def open_workspace() -> Iterator[duckdb.DuckDBPyConnection]:
    """Create the database, and remove it at the end of the context."""
    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": _MEMORY,
        # Extensions would be downloaded.
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "preserve_insertion_order": "false",
    }
    with tempfile.TemporaryDirectory(prefix="synapse-replication-") as folder:
        path = Path(folder, "workspace.duckdb")
        with duckdb.connect(str(path), config=settings) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            yield connection


def load(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
) -> None:
    """Create a table of batches.

    :raises Exception: the exceptions of the iterator.
    """
    with batches_as(connection, "batches", schema, batches):
        connection.execute(f"CREATE TABLE {table} AS FROM batches")


@contextlib.contextmanager
def batches_as(
    connection: duckdb.DuckDBPyConnection,
    name: str,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[None]:
    """Let one query read batches, under a name, within the context.

    :raises Exception: the exceptions of the iterator.
    """
    failures: list[Exception] = []

    def guarded() -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except Exception as error:
            # Arrow and DuckDB would convert it.
            failures.append(error)
            raise

    connection.register(name, pa.RecordBatchReader.from_batches(schema, guarded()))
    try:
        yield
    except Exception as error:
        if failures and failures[0] is not error:
            raise failures[0] from error
        raise
    finally:
        connection.unregister(name)


def rows_of(
    connection: duckdb.DuckDBPyConnection, sql: str, **parameters: Any
) -> list[dict[str, Any]]:
    """Run a query, and return its rows by column.

    :param parameters: the values of names in the query, such as ``$name``.
    """
    cursor = connection.execute(sql, parameters or None)
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

"""The workspace of a job: a temporary DuckDB database, and the folder that it creates.

A job loads what it has read into the database, and queries it there. Data that does not
fit into memory is written to the database's file. The folder of the results gets its
name once it is complete. What is temporary is removed at the end of the job.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.snapshot import Snapshot
from synapse_replication.pipeline.scan import Batches, Scan, Spark
from synapse_replication.pipeline.schemas import WIRE_SCHEMA
from synapse_replication.pipeline.wire_lines import find_recordings, scan_recordings

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


# -- recorded lines ----------------------------------------------------------------


def load_lines(
    workspace: duckdb.DuckDBPyConnection,
    columns: Sequence[str],
    recordings: Sequence[str | os.PathLike[str]],
    archive: Snapshot | None,
    spark: Spark,
) -> None:
    """Create the table ``wire`` of the lines of recordings and of an archive.

    A recording that is in both is read only from the archive.

    :param columns: columns of WIRE_SCHEMA; the table also has ``is_damaged``, which is
        whether a line is an invalid record.
    :param spark: called if there are many lines.
    """
    new = [
        path
        for path in find_recordings(recordings)
        if archive is None or archive.lacks(path)
    ]
    scans = [scan_recordings(new)]
    if archive is not None:
        read = {"recording", "command", "line", *columns}
        names = [name for name in WIRE_SCHEMA.names if name in read]
        wire = archive.wire(*names)
        scans.append(wire.then(_with_folder, wire.schema))
    schema = lines_schema(columns)
    batches = (
        batch
        for scan in scans
        for batch in _reduced(scan, columns, schema).collect(spark)
    )
    load(workspace, "wire", schema, batches)


def lines_schema(columns: Sequence[str]) -> pa.Schema:
    """Return the columns of the table of :func:`load_lines`."""
    fields = [WIRE_SCHEMA.field(name) for name in columns]
    return pa.schema([*fields, pa.field("is_damaged", pa.bool_())])


def _reduced(scan: Scan, columns: Sequence[str], schema: pa.Schema) -> Scan:
    def reduce(batches: Batches) -> Batches:
        for batch in batches:
            no_command = pc.is_null(batch.column("command"))
            damaged = pc.and_(no_command, pc.equal(batch.column("line"), ""))
            chosen = [*(batch.column(name) for name in columns), damaged]
            yield pa.RecordBatch.from_arrays(chosen, schema=schema)

    return scan.then(reduce, schema)


def _with_folder(batches: Batches) -> Batches:
    """Mark the names of archived recordings."""
    for batch in batches:
        names = pc.binary_join_element_wise("archive/wire", batch.column(0), "/")
        yield batch.set_column(0, batch.schema.field(0), names)


# -- the folder of the results -----------------------------------------------------


def path_of_new_folder(out: str) -> Path:
    """Return the absolute path of the folder that a job will create.

    :raises PipelineError: if the folder exists, or its parent does not.
    """
    folder = Path(out).absolute()
    if folder.exists():
        raise PipelineError(f"{folder} exists: give the name of a new folder")
    if not folder.parent.is_dir():
        raise PipelineError(f"{folder.parent} is not a folder: create it first")
    return folder


@contextlib.contextmanager
def created_atomically(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which gets its name once the context has ended.

    :raises PipelineError: if the folder exists and is not empty, or cannot be written.
    """
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir()
        yield temporary
        # This fails if another process has created a folder of that name with files.
        temporary.rename(folder)
    except OSError as error:
        raise PipelineError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

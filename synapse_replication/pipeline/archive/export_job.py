"""The job that exports rows of an archive to files for other programs."""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from synapse_replication.errors import PipelineError, excerpt
from synapse_replication.pipeline.archive.frames import ArchivedTables, read_archive
from synapse_replication.pipeline.archive.store import open_archive
from synapse_replication.pipeline.folders import new_folder
from synapse_replication.pipeline.progress import JobProgress
from synapse_replication.pipeline.spark.failures import short_failures, shorten
from synapse_replication.pipeline.spark.session import job_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The suffix of the files of each format.
FORMATS = {"parquet": ".parquet", "csv": ".csv", "jsonl": ".jsonl"}


def run_export(
    archive: str,
    out: str,
    format_: str,
    where: str | None,
    *,
    stream: str | None = None,
    master: str | None = None,
) -> int:
    """Export rows of an archive in a new Spark session; return their number.

    The other arguments are those of :func:`export_rows`.

    :param master: the URL of the Spark master; ``None`` for the default of
        :func:`~synapse_replication.pipeline.spark.session.make_session`.
    """
    # Fail fast on invalid arguments, because Spark takes seconds to start.
    new_folder(out)
    open_archive(archive)
    with (
        JobProgress(sys.stderr, 2) as progress,
        job_session(
            "synapse-replication export", master=master, progress=progress
        ) as session,
    ):
        progress.begin("write rows")
        return export_rows(session, archive, out, format_, where, stream=stream)


def export_rows(
    session: SparkSession,
    archive: str,
    out: str,
    format_: str,
    where: str | None,
    *,
    stream: str | None = None,
) -> int:
    """Export rows of an archive, and return their number.

    The rows are written to a temporary folder, which is renamed when it is complete.

    :param where: a condition on the columns, in Spark SQL.
    :param stream: the stream to export, with the fields of its rows as columns;
        ``None`` for all streams.
    :raises PipelineError: if the archive cannot be read, the folder exists or cannot be
        written, the condition is invalid, or the archive has no such stream.
    """
    folder = new_folder(out)
    rows = _rows(read_archive(session, archive), stream)
    if where is not None:
        rows = _filter(rows, where)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        count = _write(rows, temporary, format_)
        _tidy(temporary, FORMATS[format_])
        # This fails if another process has created a folder of that name with files.
        temporary.rename(folder)
    except OSError as error:
        raise PipelineError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return count


def _rows(archive: ArchivedTables, stream: str | None) -> DataFrame:
    if stream is None:
        return archive.rows()
    if stream not in archive.streams:
        raise PipelineError(
            f"--stream {excerpt(stream)}: the archive has no rows of this stream; it "
            f"has rows of {', '.join(archive.streams) or 'no stream'}"
        )
    return archive.streams[stream]


def _filter(rows: DataFrame, where: str) -> DataFrame:
    from pyspark.errors import AnalysisException, ParseException

    try:
        filtered = rows.where(where)
    except (AnalysisException, ParseException) as error:
        raise PipelineError(
            f"--where {excerpt(where)}: {shorten(error).rstrip(';')}; the columns are "
            f"{', '.join(rows.columns)}"
        ) from None
    return filtered


def _write(rows: DataFrame, folder: Path, format_: str) -> int:
    from pyspark.sql import Observation, functions as sf

    counted = Observation()
    rows = rows.observe(counted, sf.count(sf.lit(1)).alias("rows"))
    with short_failures():
        _write_as(rows, f"file://{folder}", format_)
    written: int = counted.get["rows"]
    return written


def _write_as(rows: DataFrame, uri: str, format_: str) -> None:
    if format_ == "parquet":
        rows.write.option("compression", "zstd").parquet(uri)
    elif format_ == "jsonl":
        _as_json_lines(rows).write.text(uri)
    else:
        # Escape a quotation mark by doubling it, as RFC 4180 requires. By default,
        # Spark escapes it with a backslash.
        rows.write.csv(
            uri,
            header=True,
            quote='"',
            escape='"',
            timestampFormat="yyyy-MM-dd'T'HH:mm:ss.SSSXXX",
        )


def _as_json_lines(rows: DataFrame) -> DataFrame:
    """Convert each row to a line with a JSON object.

    The JSON text in ``row`` becomes a JSON value of the object, not a string.

    :param rows: rows with at least one column other than ``row``; ``row``, if present,
        contains JSON.
    :return: a frame with the single column ``value``.
    """
    from pyspark.sql import functions as sf

    others = [name for name in rows.columns if name != "row"]
    named = rows.select(*rows.columns)
    # Retain the order of the columns, and write null for missing values.
    plain = sf.to_json(
        sf.struct(*(sf.col(name) for name in others)), {"ignoreNullFields": "false"}
    )
    if "row" not in rows.columns:
        return named.select(plain.alias("value"))
    whole = sf.concat(
        sf.substring(plain, sf.lit(1), sf.length(plain) - 1),
        sf.lit(',"row":'),
        sf.col("row"),
        sf.lit("}"),
    )
    return named.select(whole.alias("value"))


def _tidy(folder: Path, suffix: str) -> None:
    """Rename the data files to ``rows-NNNNN``, and remove all other files."""
    files: Sequence[Path] = sorted(folder.glob(f"part-*{suffix}"))
    if not files:
        files = sorted(folder.glob("part-*"))
    for index, path in enumerate(files):
        path.rename(folder / f"rows-{index:05d}{suffix}")
    for other in folder.iterdir():
        if not other.name.startswith("rows-"):
            other.unlink()

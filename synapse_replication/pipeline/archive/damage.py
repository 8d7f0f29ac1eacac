"""Finds damaged files of an archive: missing, truncated, or with changed bytes.

The transaction log names each file with its size, its number of rows and the range of
its tokens. The pages of the files that this package writes have checksums. A compaction
writes files without checksums, in which a changed byte is found only if it makes the
file invalid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import attrs
import pyarrow as pa
from pyarrow import dataset, parquet

from synapse_replication.errors import excerpt
from synapse_replication.pipeline.archive.log import MISSING_REASON
from synapse_replication.pipeline.scan import FEW_ROWS, Spark, grouped, run_tasks
from synapse_replication.pipeline.schemas import DAY

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from synapse_replication.pipeline.archive.store import ArchiveStore

_PARTITIONING: Final = dataset.partitioning(
    pa.schema([pa.field(DAY, pa.date32())]), flavor="hive"
)

_REPAIR: Final = (
    "restore it from a backup, or run: synapse-replication pipeline archive --repair"
)


@attrs.frozen
class ArchivedFile:
    """A file, as the log describes it.

    :ivar table_uri: the URI of the table.
    :ivar table_name: the name of the stream, or ``the wire``.
    :ivar path: the path of the file, relative to the table.
    :ivar size: the size in bytes.
    :ivar row_count: the number of rows.
    :ivar token_range: the least and the greatest token; ``None`` if unknown.
    """

    table_uri: str
    table_name: str
    path: str
    size: int
    row_count: int
    day: str
    token_range: tuple[int, int] | None


@attrs.frozen
class DamagedFile:
    """A file that cannot be read.

    :ivar reason: what is wrong, as the end of a sentence about the file.
    """

    file: ArchivedFile
    reason: str

    def __str__(self) -> str:
        """Name the table, the file, its tokens, and the remedy."""
        file = self.file
        token_range = file.token_range
        tokens = "" if token_range is None else f"tokens {_range(*token_range)}, "
        return (
            f"{file.table_name}: the file {file.table_uri}/{file.path} "
            f"({tokens}{file.row_count} rows) {self.reason}; {_REPAIR}"
        )


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def files_of(table: DeltaTable, uri: str, name: str) -> list[ArchivedFile]:
    """Return the files of a table, from its log.

    :param name: the name of the stream, or ``the wire``.
    """
    found = []
    for action in pa.table(table.get_add_actions(flatten=True)).to_pylist():
        bounds = action.get("min.stream_id"), action.get("max.stream_id")
        found.append(
            ArchivedFile(
                uri,
                name,
                action["path"],
                action["size_bytes"],
                action["num_records"] or 0,
                str(action[f"partition.{DAY}"]),
                None if None in bounds else bounds,
            )
        )
    return sorted(found, key=lambda file: file.path)


def dataset_of(
    store: ArchiveStore, file: ArchivedFile, schema: pa.Schema
) -> dataset.Dataset:
    """Return the rows of a file, which are not read yet.

    :param schema: the columns, also ``day``. Those that the file lacks are null.
    """
    root = store.path(file.table_uri)
    return dataset.dataset(
        f"{root}/{file.path}",
        schema=schema,
        format="parquet",
        filesystem=store.filesystem,
        partitioning=_PARTITIONING,
        partition_base_dir=root,
    )


def wrong_sizes(
    store: ArchiveStore, files: Sequence[ArchivedFile]
) -> list[DamagedFile]:
    """Return the files that are missing, or whose size is wrong.

    :raises PipelineError: if the store cannot be reached.
    """
    sizes: dict[str, int] = {}
    for uri in {file.table_uri for file in files}:
        sizes |= _sizes(store, uri)
    found = []
    for file in files:
        size = sizes.get(f"{file.table_uri}/{file.path}")
        if size is None:
            found.append(DamagedFile(file, MISSING_REASON))
        elif size != file.size:
            reason = f"has {size} bytes instead of {file.size}"
            found.append(DamagedFile(file, reason))
    return found


def _sizes(store: ArchiveStore, uri: str) -> dict[str, int]:
    root, found = store.path(uri), store.list_folder(uri, recursive=True)
    return {uri + info.path[len(root) :]: info.size for info in found if info.is_file}


def find_damage(
    store: ArchiveStore, files: Sequence[ArchivedFile], spark: Spark | None = None
) -> list[DamagedFile]:
    """Read files, and return the damaged ones.

    :param spark: called if there are many rows; ``None`` to read the files in this
        process.
    """

    def check(group: Iterable[ArchivedFile]) -> list[DamagedFile]:
        reasons = ((file, _check_file(store, file)) for file in group)
        return [DamagedFile(file, reason) for file, reason in reasons if reason]

    if spark is None or sum(file.row_count for file in files) <= FEW_ROWS:
        return check(files)
    found = run_tasks(check, grouped(files), spark)
    return [each for damaged in found for each in damaged]


def _check_file(store: ArchiveStore, file: ArchivedFile) -> str | None:
    """Read a file; return what is wrong, or ``None`` if the file is intact."""
    try:
        with parquet.ParquetFile(
            f"{store.path(file.table_uri)}/{file.path}",
            filesystem=store.filesystem,
            pre_buffer=True,
            page_checksum_verification=True,
        ) as opened:
            rows = sum(batch.num_rows for batch in opened.iter_batches())
    except FileNotFoundError:
        return MISSING_REASON
    except (pa.ArrowException, OSError) as error:
        return f"is damaged ({excerpt(' '.join(str(error).split()))})"
    if rows == file.row_count:
        return None
    return f"has {rows} rows instead of {file.row_count}"

"""Many small files of one folder are made into one, without a row lost or doubled.

A batch brings each stream and day a file, so a day that is archived as it goes has
thousands. One job of Spark writes the small files of all such folders anew, below
``_meta/staging``; the large files of each folder are linked in beside them. Then the
new folder and the old one change places, in one act of the operating system: who lists
the folder sees the old files or the new ones, never both or neither. A crash before
leaves the old folder, a crash after it the new one; what is left over is removed by the
next start.

Where the file system cannot exchange folders (NFS), the old one is renamed away and the
new one renamed to its place; between both renames the folder is missing for a moment.
``_meta/swap.json`` then lets the next start finish the work.

Whoever listed a folder before the exchange and opens a file after it finds that the
file is gone, and has to read again.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
from pyspark.sql.types import StructType

from synapse_replication.durable import sync_folder, write_durably
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.layout import (
    ARCHIVED_WIRE_SCHEMA,
    ArchiveLayout,
)
from synapse_replication.pipeline.archive.writer import (
    Point,
    Watch,
    count_rows,
    remove_tree,
    sync_file,
)
from synapse_replication.pipeline.schemas import ARCHIVE_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["ENOUGH_FILES", "Compaction", "Compactor", "exchange_folders"]

_logger = logging.getLogger(__name__)

#: A file of fewer bytes is small.
SMALL_BYTES: Final = 16 * 1024 * 1024

#: A folder with as many small files is made anew.
ENOUGH_FILES: Final = 8

_SCHEMAS: Final = {"rows": ARCHIVE_SCHEMA, "wire": ARCHIVED_WIRE_SCHEMA}
_PARTITIONS: Final = {"rows": ("stream", "day"), "wire": ("day",)}
_ORDER: Final = {
    "rows": ("stream", "day", "instance_name", "stream_id", "row_index"),
    "wire": ("day", "recording", "line_number"),
}

#: Of renameat2(2), in linux/fs.h.
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


@attrs.frozen
class Compaction:
    """What was done.

    :ivar folders: made anew.
    :ivar before: files that were small.
    :ivar after: files that they became.
    """

    folders: int
    before: int
    after: int


class Compactor:
    """Compacts one kind of an archive. Its driver holds the lock.

    :param kind: ``"rows"`` or ``"wire"``.
    :param exchange: makes two folders change places, or raises OSError.
    """

    def __init__(
        self,
        layout: ArchiveLayout,
        kind: str,
        watch: Watch = lambda point: None,
        *,
        small_bytes: int = SMALL_BYTES,
        enough_files: int = ENOUGH_FILES,
        exchange: Callable[[Path, Path], None] | None = None,
    ) -> None:
        self._layout = layout
        self._kind = kind
        self._watch = watch
        self._small_bytes = small_bytes
        self._enough_files = enough_files
        self._exchange = exchange or exchange_folders
        self._data = layout.data(kind)
        self._staging = layout.staging / f"{kind}-compaction"
        self._journal = layout.meta / f"{kind}-swap.json"

    def recover(self) -> None:
        """Finish what a crash cut off. To be called once, before anything else.

        :raises PipelineError: the note of an exchange is damaged.
        """
        try:
            swap = json.loads(self._journal.read_bytes())
            live, new = self._data / swap["partition"], self._staging / swap["new"]
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError) as error:
            raise PipelineError(
                f"{self._journal} is damaged: {error!r}; restore it from a backup"
            ) from error
        else:
            if not live.exists():
                new.rename(live)
                sync_folder(live.parent)
            self._journal.unlink()
        if self._staging.exists():
            remove_tree(self._staging)

    def compact(self, session: SparkSession) -> Compaction:
        """Make the folders anew that have many small files.

        :raises PipelineError: what was written is not what was read; nothing of the
            folder concerned was changed then.
        """
        crowded = dict(self._crowded())
        if not crowded:
            return Compaction(0, 0, 0)
        written = self._staging / uuid.uuid4().hex
        self._rewrite(
            session, [path for each in crowded.values() for path in each], written
        )
        self._watch(Point.COMPACTION_STAGED)
        after = 0
        for partition, small in crowded.items():
            after += self._replace(partition, small, written / partition)
        remove_tree(self._staging)
        self._watch(Point.COMPACTED)
        return Compaction(len(crowded), sum(map(len, crowded.values())), after)

    def _crowded(self) -> Iterator[tuple[str, list[Path]]]:
        pattern = "/".join(f"{name}=*" for name in _PARTITIONS[self._kind])
        for folder in sorted(self._data.glob(pattern)):
            small = sorted(
                path
                for path in folder.glob("*.parquet")
                if path.stat().st_size < self._small_bytes
            )
            if len(small) >= self._enough_files:
                yield str(folder.relative_to(self._data)), small

    def _rewrite(self, session: SparkSession, paths: list[Path], to: Path) -> None:
        partitions = _PARTITIONS[self._kind]
        schema: StructType = _SCHEMAS[self._kind]
        (
            session.read.schema(schema)
            .option("basePath", f"file://{self._data}")
            .parquet(*(f"file://{path}" for path in paths))
            .hint("rebalance", *partitions)
            .sortWithinPartitions(*_ORDER[self._kind])
            .write.partitionBy(*partitions)
            .option("compression", "zstd")
            .parquet(f"file://{to}")
        )

    def _replace(self, partition: str, small: list[Path], new: Path) -> int:
        live = self._data / partition
        rows = sum(map(count_rows, small))
        files = sorted(new.glob("*.parquet"))
        if (found := sum(map(count_rows, files))) != rows:
            raise PipelineError(
                f"compaction of {live} read {rows} rows and wrote {found}: nothing was "
                "changed; run it again, and report this if it stays so"
            )
        for index, path in enumerate(files):
            sync_file(path)
            # Spark leaves checksums beside its files, and would read by them.
            path.rename(new / f"compacted-{uuid.uuid4().hex[:16]}-{index:04d}.parquet")
        for rest in new.iterdir():
            if rest.suffix != ".parquet":
                rest.unlink()
        for kept in sorted(set(live.glob("*.parquet")) - set(small)):
            (new / kept.name).hardlink_to(kept)
        sync_folder(new)
        self._watch(Point.COMPACTION_LINKED)
        self._swap(partition, live, new)
        self._watch(Point.SWAPPED)
        return len(files)

    def _swap(self, partition: str, live: Path, new: Path) -> None:
        try:
            self._exchange(live, new)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
                raise
            self._swap_in_steps(partition, live, new)
        sync_folder(live.parent)

    def _swap_in_steps(self, partition: str, live: Path, new: Path) -> None:
        note = {"partition": partition, "new": str(new.relative_to(self._staging))}
        write_durably(self._journal, json.dumps(note).encode())
        self._watch(Point.SWAP_WRITTEN)
        live.rename(self._staging / f"old-{uuid.uuid4().hex}")
        self._watch(Point.SWAP_OLD_AWAY)
        new.rename(live)
        self._journal.unlink()


def exchange_folders(one: Path, other: Path) -> None:
    """Make two folders of one file system change places, at once.

    :raises OSError: they cannot; ``EINVAL``, ``ENOSYS`` or ``ENOTSUP`` if this file
        system or operating system never can.
    """
    done = _renameat2()(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    )
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one), None, str(other))


@functools.cache
def _renameat2() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        # Not Linux, or a C library that does not know it yet.
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    function.argtypes = (
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_uint,
    )
    return function

"""How batches come into an archive: each row once, whatever is killed, and when.

Spark gives each micro-batch a number and the same content when it is given again
after a crash. A batch goes through these states, each begun by one atomic act:

1. *staged*: Spark has written its files below ``_meta/staging/ATTEMPT``. The name of
   the attempt is random, so what an earlier driver's executors still write is nobody's.
2. *committed*: ``_meta/KIND/NUMBER.pending.json`` lists the files, by rename. From
   here on the batch is part of the archive.
3. *published*: each staged file was renamed into ``rows`` or ``wire``.
4. *settled*: the manifest was renamed to ``NUMBER.json``. Then Spark is told that the
   batch is done, and writes its own checkpoint.

Invariants, at each moment:

- A file below ``rows`` and ``wire`` is whole, and belongs to one committed batch.
- No row is in two of these files (:mod:`.archive_compaction` keeps this up, too).
- A batch without a manifest has no file there: it is written again from nothing.
- A committed batch is never written again: a restart renames what is still staged,
  and when Spark gives the batch again, nothing is left to do.
- The offsets of a batch are on disk before its manifest is, and are compared when the
  batch is given again. So a checkpoint that was lost, mixed up or restored from a
  backup is refused, where numbers alone would pass over rows.

Only one driver is at work (:mod:`.archive_lock`). Files, names and manifests are
synced to disk in this order, so a loss of power is a crash like others.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from synapse_replication.durable import sync_folder, write_durably
from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive.layout import (
    SCHEMA_VERSIONS,
    ArchiveLayout,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["ArchiveWriter", "Batch", "Manifest", "Point", "StagedFile", "Watch"]

_logger = logging.getLogger(__name__)

#: Settled manifests of rows that are kept: as many as Spark keeps of its own.
KEPT_MANIFESTS: Final = 100

_PARTITIONS: Final = {"rows": ("stream", "day"), "wire": ("day",)}


class Point(enum.Enum):
    """Where the writing can be cut off; the kill tests do so at each."""

    BEGUN = "begun"
    STAGED = "staged"
    COMMITTED = "committed"
    FILE_PUBLISHED = "file-published"
    PUBLISHED = "published"
    SETTLED = "settled"
    CLEANED = "cleaned"
    COMPACTION_STAGED = "compaction-staged"
    COMPACTION_LINKED = "compaction-linked"
    SWAP_WRITTEN = "swap-written"
    SWAP_OLD_AWAY = "swap-old-away"
    SWAPPED = "swapped"
    COMPACTED = "compacted"


#: Called at each point; does nothing but in tests.
Watch: TypeAlias = Callable[[Point], object]


def _pass(point: Point) -> None:
    pass


@attrs.frozen
class Batch:
    """Which batch it is.

    :ivar number: from 0, one after another.
    :ivar origin: whose numbers they are: the id of Spark's query.
    :ivar inputs: what it was made of: a JSON value, the same each time.
    """

    number: int
    origin: str
    inputs: Any


@attrs.frozen
class StagedFile:
    """A file of a batch.

    :ivar partition: its folder below ``rows`` or ``wire``: ``stream=a/day=b``.
    :ivar staged: its path below the folder of the attempt.
    :ivar name: what it is called once published.
    """

    partition: str
    staged: str
    name: str
    rows: int
    size: int


@attrs.frozen
class Manifest:
    """A batch of the archive, and what it consists of.

    :ivar attempt: the folder below ``_meta/staging``.
    :ivar again: true if it was there already when it was given.
    """

    batch: Batch
    attempt: str
    schema_version: int
    files: tuple[StagedFile, ...]
    again: bool = False

    @property
    def rows(self) -> int:
        """Count the rows."""
        return sum(file.rows for file in self.files)

    def to_json(self) -> bytes:
        """Encode it, without ``again``."""
        value = attrs.asdict(self, filter=attrs.filters.exclude("again"))
        return json.dumps(value, indent=1).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Manifest:
        """Decode it.

        :raises ValueError: it is none.
        """
        try:
            value = json.loads(content)
            return cls(
                Batch(**value["batch"]),
                value["attempt"],
                value["schema_version"],
                tuple(StagedFile(**file) for file in value["files"]),
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"no manifest: {error!r}") from error


class ArchiveWriter:
    """Writes the batches of one kind. Not thread-safe; one for each kind.

    :param kind: ``"rows"`` or ``"wire"``.
    :param watch: called at each point.
    :raises PipelineError: the archive is damaged.
    """

    def __init__(self, layout: ArchiveLayout, kind: str, watch: Watch = _pass) -> None:
        self._layout = layout
        self._kind = kind
        self._watch = watch
        self._manifests = layout.manifests(kind)
        self._staging = layout.staging / kind
        self._manifests.mkdir(exist_ok=True)
        self._staging.mkdir(parents=True, exist_ok=True)
        self._numbers = sorted(
            int(path.name.split(".")[0])
            for path in self._manifests.iterdir()
            if path.suffix == ".json" and path.name[0] != "."
        )

    def newest(self) -> Manifest | None:
        """Give the last committed batch.

        :raises PipelineError: its manifest cannot be read.
        """
        return self._find(self._numbers[-1]) if self._numbers else None

    def batches(self) -> Iterator[Manifest]:
        """Give each batch whose manifest is kept, the oldest first.

        :raises PipelineError: a manifest cannot be read.
        """
        for number in self._numbers:
            found = self._find(number)
            if found is not None:
                yield found

    def recover(self) -> None:
        """Finish what a crash cut off. To be called once, before any batch.

        :raises PipelineError: a file of a committed batch is missing.
        """
        for number in self._numbers:
            if self._path(number, settled=False).exists():
                manifest = self._find(number)
                assert manifest is not None
                _logger.info(
                    "batch %d of %s was committed, and is published now",
                    number,
                    self._kind,
                )
                self._publish(manifest)
        for attempt in self._staging.iterdir():
            remove_tree(attempt)

    def write(self, frame: DataFrame, batch: Batch) -> Manifest:
        """Write a batch, unless it is there already.

        :param frame: of the schema of the kind; read once.
        :raises PipelineError: it is not the batch that was to follow.
        """
        self._watch(Point.BEGUN)
        if (known := self._known(batch)) is not None:
            return attrs.evolve(known, again=True)
        attempt = uuid.uuid4().hex
        folder = self._staging / attempt
        # The rebalancing gives each partition one file, or several if it is large.
        partitions = _PARTITIONS[self._kind]
        (
            frame.hint("rebalance", *partitions)
            .write.partitionBy(*partitions)
            .option("compression", "zstd")
            .parquet(f"file://{folder}")
        )
        files = tuple(self._list(folder, batch.number))
        self._watch(Point.STAGED)
        manifest = Manifest(batch, attempt, SCHEMA_VERSIONS[self._kind], files)
        write_durably(self._path(batch.number, settled=False), manifest.to_json())
        self._numbers.append(batch.number)
        self._watch(Point.COMMITTED)
        self._publish(manifest)
        remove_tree(folder)
        self._forget_old()
        self._watch(Point.CLEANED)
        return manifest

    def _known(self, batch: Batch) -> Manifest | None:
        newest = self.newest()
        if newest is None:
            if batch.number == 0:
                return None
            raise self._mismatch(batch, "it has no batch yet")
        if newest.batch.origin != batch.origin:
            raise self._mismatch(batch, "its batches come from another checkpoint")
        if batch.number == newest.batch.number + 1:
            return None
        known = self._find(batch.number)
        if known is None:
            raise self._mismatch(batch, f"its last is {newest.batch.number}")
        if known.batch.inputs != batch.inputs:
            raise self._mismatch(batch, "its batch of this number has other offsets")
        return known

    def _mismatch(self, batch: Batch, why: str) -> PipelineError:
        return PipelineError(
            f"batch {batch.number} of {self._layout.checkpoint} does not belong to "
            f"{self._layout.data(self._kind)}: {why}. Restore archive and checkpoint "
            "from the same backup, or start a new archive"
        )

    def _path(self, number: int, *, settled: bool) -> Path:
        return self._manifests / f"{number:012d}{'' if settled else '.pending'}.json"

    def _find(self, number: int) -> Manifest | None:
        for settled in (True, False):
            path = self._path(number, settled=settled)
            try:
                return Manifest.from_json(path.read_bytes())
            except FileNotFoundError:
                continue
            except ValueError as error:
                raise PipelineError(
                    f"{path} is damaged: {error}; restore it from a backup"
                ) from error
        return None

    def _list(self, folder: Path, number: int) -> Iterator[StagedFile]:
        paths = sorted(folder.rglob("*.parquet"))
        for index, path in enumerate(paths):
            sync_file(path)
            yield StagedFile(
                partition=str(path.parent.relative_to(folder)),
                staged=str(path.relative_to(folder)),
                name=f"batch-{number:012d}-{index:04d}-{folder.name[:8]}.parquet",
                rows=count_rows(path),
                size=path.stat().st_size,
            )
        # Up to the attempt's own name.
        above = {parent for path in paths for parent in path.parents}
        for parent in above - set(self._staging.parents):
            sync_folder(parent)

    def _publish(self, manifest: Manifest) -> None:
        data = self._layout.data(self._kind)
        touched: set[Path] = set()
        for file in manifest.files:
            staged = self._staging / manifest.attempt / file.staged
            published = data / file.partition / file.name
            for parent in (published.parent.parent, published.parent):
                if not parent.exists():
                    parent.mkdir()
                    touched.add(parent.parent)
            touched.add(published.parent)
            try:
                staged.rename(published)
            except FileNotFoundError:
                # Renamed before the crash.
                if not published.exists():
                    raise PipelineError(
                        f"{staged} is missing, which batch {manifest.batch.number} "
                        f"of {data} consists of: restore the archive from a backup"
                    ) from None
            self._watch(Point.FILE_PUBLISHED)
        for folder in touched:
            sync_folder(folder)
        self._watch(Point.PUBLISHED)
        number = manifest.batch.number
        self._path(number, settled=False).rename(self._path(number, settled=True))
        sync_folder(self._manifests)
        self._watch(Point.SETTLED)

    def _forget_old(self) -> None:
        if self._kind == "wire":
            # They tell which recordings are there.
            return
        for number in self._numbers[:-KEPT_MANIFESTS]:
            self._path(number, settled=True).unlink()
        del self._numbers[:-KEPT_MANIFESTS]


def count_rows(path: Path) -> int:
    """Count the rows of a Parquet file, by its footer.

    :raises OSError: it cannot be read.
    """
    from pyarrow import parquet

    rows: int = parquet.read_metadata(path).num_rows
    return rows


def sync_file(path: Path) -> None:
    """Make the content of a file survive a loss of power.

    :raises OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(folder: Path) -> None:
    """Remove a folder that nobody needs; what resists is left, and told.

    Executors of a driver that was killed may still be writing there. The next
    start tries again.
    """

    def tell(function: object, path: str, error: Any) -> None:
        _logger.warning("%s cannot be removed: %s", path, error[1])

    shutil.rmtree(folder, onerror=tell)

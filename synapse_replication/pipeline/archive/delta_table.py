"""A table of the archive, to which only one driver may commit batches.

Delta Lake guarantees that a commit is atomic, and that a commit which conflicts with
another one is rejected. A driver bases each change on the version that it read last. If
two drivers run by mistake, the first one to commit a batch wins, and the other one
stops. A purge may change the table while a driver is running.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import RemoveAction

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.archive import log
from synapse_replication.pipeline.archive.files import (
    WITH_STATISTICS,
    ArchivedFile,
    WrittenFile,
    files_of,
    merge_files,
)
from synapse_replication.pipeline.archive.store import ArchiveStore, storage_error_text
from synapse_replication.pipeline.scan import Spark, batched, run_tasks
from synapse_replication.pipeline.schemas import DAY, describe_table
from synapse_replication.pipeline.source.offsets import StreamOffset

_logger = logging.getLogger(__name__)

#: The size below which a file counts as small, in bytes.
SMALL_BYTES: Final = 16 * 2**20

#: The size up to which files are merged into one, in bytes.
TARGET_BYTES: Final = 256 * 2**20

#: The property with the columns that have statistics. Without it, deltalake's datasets
#: compare a column without statistics with null, and a filter on it finds no row.
_STATISTICS: Final = "delta.dataSkippingStatsColumns"

#: The maximum number of attempts to commit, if purges change the table meanwhile.
_ATTEMPTS: Final = 5


class ArchiveTable:
    """One table of the archive, loaded at a version. Not thread-safe.

    :ivar delta: the table in Delta's format; ``None`` if it does not exist.
    :param store: the archive.
    :param uri: the location of the table.
    :param name: the name of the stream, or ``the wire``; for messages, and as the name
        in the metadata of a new table.
    :param schema: the columns that this release of the package writes.
    :raises PipelineError: if the table cannot be read, has a column of another type, or
        is changed by another process while columns are added.
    """

    def __init__(
        self, store: ArchiveStore, uri: str, name: str, schema: pa.Schema
    ) -> None:
        self.name = name
        self.uri = uri
        self._store = store
        self._schema = schema
        self.delta = store.table(uri)
        self.state = log.TableState()
        if self.delta is not None:
            self.state = log.read_state(self.delta)
            self._evolve(self.delta)

    def archived_size(self, recording: str) -> int | None:
        """Return the archived size of a recording; ``None`` if it is not archived.

        :raises PipelineError: if the store fails.
        """
        if self.delta is None:
            return None
        with self._explaining_failures():
            return log.archived_size(self.delta, recording)

    def commit(
        self,
        files: Sequence[WrittenFile],
        offset: StreamOffset | None = None,
        recordings: Mapping[str, int] | None = None,
        replaced: Sequence[ArchivedFile] = (),
    ) -> None:
        """Commit files as the next batch.

        :param offset: the offset up to which the stream is then archived; ``None`` if
            the offset does not change.
        :param recordings: the names of the recordings that the files contain, with
            their sizes in bytes.
        :param replaced: files to remove in the same commit.
        :raises PipelineError: if the store fails, or if another driver has committed a
            batch, either before this batch, which is then not added, or just after it.
        """
        table = self.delta or self._create()
        self._check_batch(table)
        new = log.TableState(self.state.batch + 1, offset or self.state.offset)
        now = int(time.time() * 1000)
        actions: list[Any] = [
            *(file.to_action() for file in files),
            *(RemoveAction(f.path, True, now, f.size, {DAY: f.day}) for f in replaced),
        ]
        properties = log.commit_properties(new, recordings=recordings, adds_batch=True)
        with self._explaining_failures():
            for attempt in range(_ATTEMPTS):
                try:
                    _commit(table, actions, properties)
                except CommitFailedError:
                    table.update_incremental()
                    # Without another driver's batch, a purge has changed the table:
                    # commit to its new version.
                    self._check_batch(table)
                    if attempt == _ATTEMPTS - 1:
                        raise
                else:
                    break
            table.update_incremental()
        self.state = new
        self.check_sole_driver()

    def check_sole_driver(self) -> None:
        """Check that no other driver has committed a batch to the table.

        :raises PipelineError: if another driver has committed one, or the store fails.
        """
        if self.delta is None:
            # The driver's first commit performs this check.
            return
        with self._explaining_failures():
            self.delta.update_incremental()
        self._check_batch(self.delta)

    def _check_batch(self, table: DeltaTable) -> None:
        with self._explaining_failures():
            found = table.transaction_version(log.APPLICATION) or 0
        if found == self.state.batch:
            return
        newest = self._store.table(self.uri)
        other = "another driver" if newest is None else log.committer_of(newest, found)
        raise PipelineError(
            f"{self.name}: {other} has archived batch {found} to {self.uri}. Only one "
            "driver may write to an archive; stop the other one. No rows are lost or "
            "duplicated"
        )

    @property
    def files(self) -> list[ArchivedFile]:
        """The files of the table, from its log."""
        if self.delta is None:
            return []
        return files_of(self.delta, self.uri, self.name)

    # -- maintenance -------------------------------------------------------------------

    def compact(self, enough_files: int, spark: Spark) -> tuple[int, int]:
        """Merge the files of each day that has many small ones, on executors.

        Files above the target size, and damaged ones, remain as they are. Readers of
        older versions continue to use the old files, until :meth:`vacuum` removes
        these.

        :param enough_files: a day with at least this number of small files is
            compacted.
        :param spark: called if there are files to merge.
        :return: the number of files that were merged, and of those that replace them.
        :raises PipelineError: if the store fails.
        """
        before = after = 0
        groups = self._small_files(enough_files)
        if self.delta is None or not groups:
            return before, after
        merge = partial(merge_files, self._store, pa.schema(self.delta.schema()))
        for group, new in zip(groups, run_tasks(merge, groups, spark()), strict=True):
            if new and self._replace(self.delta, group, new):
                before += len(group)
                after += len(new)
        return before, after

    def _small_files(self, enough_files: int) -> list[list[ArchivedFile]]:
        """Return groups of files, each of which one task merges."""
        days: dict[str, list[ArchivedFile]] = {}
        for file in self.files:
            if file.size < SMALL_BYTES:
                days.setdefault(file.day, []).append(file)
        groups: list[list[ArchivedFile]] = []
        for _, files in sorted(days.items()):
            if len(files) >= enough_files:
                files.sort(key=lambda file: file.token_range or ())
                groups += batched(files, lambda file: file.size, TARGET_BYTES)
        return [group for group in groups if len(group) > 1]

    def _replace(
        self,
        table: DeltaTable,
        old: Sequence[ArchivedFile],
        new: Sequence[WrittenFile],
    ) -> bool:
        """Replace files by others with the same rows.

        :return: false if the files were changed at the same time, for instance by a
            purge; nothing is replaced then.
        """
        now = int(time.time() * 1000)
        actions: list[Any] = [
            *(file.to_action(has_new_rows=False) for file in new),
            *(RemoveAction(f.path, False, now, f.size, {DAY: f.day}) for f in old),
        ]
        with self._explaining_failures():
            try:
                _commit(table, actions, log.commit_properties(self.state))
            except CommitFailedError:
                return False
            finally:
                table.update_incremental()
        return True

    def vacuum(self, retention_hours: int) -> int:
        """Remove files that the newest version does not contain; return their number.

        These are the files that compactions and purges removed from the table, and
        files that were written but never committed.

        :param retention_hours: the age in hours below which a file is not removed.
        :raises PipelineError: if the store fails.
        """
        if self.delta is None:
            return 0
        with self._explaining_failures():
            removed = self.delta.vacuum(
                retention_hours=retention_hours,
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
                commit_properties=log.commit_properties(self.state),
            )
            self.delta.update_incremental()
        return len(removed)

    # -- the table ---------------------------------------------------------------------

    def _create(self) -> DeltaTable:
        indexed = [name for name in WITH_STATISTICS if name in self._schema.names]
        try:
            # Another driver may create the table at the same time. Both then use the
            # same table, and the first to commit a batch wins.
            self.delta = DeltaTable.create(
                self.uri,
                schema=self._schema,
                partition_by=[DAY],
                mode="ignore",
                name=self.name,
                description=describe_table(self.name),
                configuration={_STATISTICS: ",".join(indexed)},
                storage_options=self._store.delta_options,
            )
            self.delta.update_incremental()
        except (DeltaError, OSError) as error:
            self.delta = self._store.table(self.uri)
            if self.delta is None:
                raise self._failed(error) from error
        self.check_sole_driver()
        return self.delta

    def _evolve(self, table: DeltaTable) -> None:
        """Add the columns of the schema that the table lacks.

        The new columns are null in existing rows, whose files do not change.

        :raises PipelineError: if a column has another type, another process changes
            the table at the same time, or the store fails.
        """
        wanted = Schema.from_arrow(self._schema).fields
        known = {field.name: field for field in table.schema().fields}
        for field in wanted:
            found = known.get(field.name)
            if found is not None and found.type != field.type:
                raise PipelineError(
                    f"{self.uri}: the type of column {field.name} is {found.type}, but "
                    f"the stream has {field.type}; archive to a new location, or "
                    "declare the previous type"
                )
        new = [field for field in wanted if field.name not in known]
        if not new:
            return
        _logger.info(
            "adding columns to %s: %s", self.uri, ", ".join(field.name for field in new)
        )
        with self._explaining_failures():
            try:
                table.alter.add_columns(
                    new, commit_properties=log.commit_properties(self.state)
                )
            except CommitFailedError as error:
                raise PipelineError(
                    f"{self.name}: another process changed {self.uri} while columns "
                    "were added to it; run the job again"
                ) from error
            table.update_incremental()

    @contextlib.contextmanager
    def _explaining_failures(self) -> Iterator[None]:
        try:
            yield
        except (DeltaError, OSError) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> PipelineError:
        return PipelineError(
            f"the archive {self.uri} cannot be read or written: "
            f"{storage_error_text(error)}"
        )


def _commit(
    table: DeltaTable, actions: list[Any], properties: CommitProperties
) -> None:
    table.create_write_transaction(
        actions, "append", table.schema(), [DAY], commit_properties=properties
    )

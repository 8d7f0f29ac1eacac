"""A table of the archive, as its one driver changes it.

Delta Lake does what this leaves out: a commit is visible whole or not at all; a commit
that another one made impossible is refused. Each change starts from a version that was
read, so a second driver cannot slip in between: whichever commits a batch first wins,
and the other one stops.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs
import pyarrow as pa

from synapse_replication.errors import PipelineError, excerpt
from synapse_replication.pipeline.archive.files import WrittenFile
from synapse_replication.pipeline.archive.log import (
    APPLICATION,
    TableState,
    archived_size,
    commit_properties,
    read_state,
    who_committed,
)
from synapse_replication.pipeline.archive.store import ArchiveStore
from synapse_replication.pipeline.source.offsets import StreamOffset
from synapse_replication.pipeline.tables import DAY

if TYPE_CHECKING:
    from deltalake import DeltaTable

__all__ = ["ArchiveTable", "Compaction", "Point", "Watch"]

_logger = logging.getLogger(__name__)

#: A file of fewer bytes is small.
SMALL_BYTES: Final = 16 * 2**20

#: How large a file may become when small ones are made into one, in bytes.
TARGET_BYTES: Final = 256 * 2**20


class Point(enum.Enum):
    """Where the writing can be cut off; the kill tests do so at each."""

    PLANNED = "planned"
    WRITTEN = "written"
    COMMITTED = "committed"
    ALL_COMMITTED = "all-committed"
    COMPACTING = "compacting"
    COMPACTED = "compacted"
    VACUUMED = "vacuumed"


#: Called at each point; does nothing but in tests.
Watch: TypeAlias = Callable[[Point], object]


@attrs.frozen
class Compaction:
    """What a compaction did.

    :ivar before: files that were small.
    :ivar after: files that they became.
    """

    before: int = 0
    after: int = 0


class ArchiveTable:
    """One table of the archive, held at a version by its driver. Not thread-safe.

    :param name: of the stream, or ``the wire``; for messages.
    :param schema: the columns that this version writes.
    :raises PipelineError: if the table cannot be read, or has a column of another type.
    """

    def __init__(
        self, store: ArchiveStore, uri: str, name: str, schema: pa.Schema
    ) -> None:
        self.name = name
        self.uri = uri
        self._store = store
        self._schema = schema
        self._table = store.table(uri)
        self.state = TableState(-1)
        if self._table is not None:
            self.state = read_state(self._table)
            self._evolve(self._table)

    def archived_size(self, recording: str) -> int | None:
        """Return the size of a recording as archived; ``None`` if it is not."""
        return None if self._table is None else archived_size(self._table, recording)

    def commit(
        self,
        files: Sequence[WrittenFile],
        offset: StreamOffset | None = None,
        recordings: Mapping[str, int] | None = None,
    ) -> None:
        """Add files, with the offset or the recordings that they reach up to.

        :raises PipelineError: if another driver was first; nothing is added then.
        """
        from deltalake.exceptions import CommitFailedError, DeltaError

        table = self._table or self._create()
        self._check_batch(table)
        batch = self.state.batch + 1
        new = attrs.evolve(
            self.state,
            batch=batch,
            offset=self.state.offset if offset is None else offset,
        )
        try:
            table.create_write_transaction(
                [file.to_action() for file in files],
                "append",
                table.schema(),
                [DAY],
                commit_properties=commit_properties(
                    new, recordings=recordings, new=True
                ),
            )
        except CommitFailedError as error:
            raise self._refused(batch) from error
        except DeltaError as error:
            raise self._failed(error) from error
        table.update_incremental()
        self.state = attrs.evolve(new, version=table.version())
        self.check_alone()

    def check_alone(self) -> None:
        """Make sure that no other driver has committed to the table.

        :raises PipelineError: if one has.
        """
        if self._table is None:
            # The first commit tells.
            return
        self._table.update_incremental()
        self._check_batch(self._table)

    def _check_batch(self, table: DeltaTable) -> None:
        found = table.transaction_version(APPLICATION) or 0
        if found != self.state.batch:
            raise self._refused(found)

    # -- maintenance -------------------------------------------------------------------

    def compact(self, enough_files: int) -> Compaction:
        """Make the small files of each day into larger ones, where they are many.

        Readers of older versions go on with the files of those.

        :param enough_files: small files of a day that are worth it.
        :raises PipelineError: if the store fails.
        """
        from deltalake import WriterProperties
        from deltalake.exceptions import CommitFailedError, DeltaError

        done = Compaction()
        if self._table is None:
            return done
        for day in self._crowded_days(self._table, enough_files):
            try:
                found = self._table.optimize.compact(
                    partition_filters=[(DAY, "=", day)],
                    target_size=TARGET_BYTES,
                    writer_properties=WriterProperties(compression="ZSTD"),
                    commit_properties=commit_properties(self.state, new=False),
                )
            except CommitFailedError:
                # The day was purged meanwhile. What is left is looked at next time.
                self._table.update_incremental()
                continue
            except DeltaError as error:
                raise self._failed(error) from error
            done = Compaction(
                done.before + int(found["numFilesRemoved"]),
                done.after + int(found["numFilesAdded"]),
            )
        return done

    def vacuum(self, retention_hours: int) -> int:
        """Remove files that no version of the retention needs; return how many.

        These are the files that compactions and purges replaced, and those of attempts
        that were never committed.

        :raises PipelineError: if the store fails.
        """
        from deltalake.exceptions import DeltaError

        if self._table is None:
            return 0
        try:
            removed = self._table.vacuum(
                retention_hours=retention_hours,
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
                commit_properties=commit_properties(self.state, new=False),
            )
        except DeltaError as error:
            raise self._failed(error) from error
        self._table.update_incremental()
        return len(removed)

    def _crowded_days(self, table: DeltaTable, enough_files: int) -> list[str]:
        small: dict[str, int] = {}
        for action in _actions(table):
            if action["size_bytes"] < SMALL_BYTES:
                day = str(action[f"partition.{DAY}"])
                small[day] = small.get(day, 0) + 1
        return sorted(day for day, count in small.items() if count >= enough_files)

    # -- the table ---------------------------------------------------------------------

    def _create(self) -> DeltaTable:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        try:
            # If another driver makes it at the same time, its first commit decides.
            self._table = DeltaTable.create(
                self.uri,
                schema=self._schema,
                partition_by=[DAY],
                mode="ignore",
                name=self.name,
                storage_options=self._store.delta_options,
            )
            self._table.update_incremental()
        except (DeltaError, OSError) as error:
            self._table = self._store.table(self.uri)
            if self._table is None:
                raise self._failed(error) from error
        self.check_alone()
        return self._table

    def _evolve(self, table: DeltaTable) -> None:
        """Add the columns that a newer version brought.

        Rows from before have nulls there; files need no change.
        """
        from deltalake import Schema
        from deltalake.exceptions import CommitFailedError

        wanted = Schema.from_arrow(self._schema).fields
        known = {field.name: field for field in table.schema().fields}
        for field in wanted:
            found = known.get(field.name)
            if found is not None and found.type != field.type:
                raise PipelineError(
                    f"{self.uri}: column {field.name} is {found.type}, and is to be "
                    f"{field.type} now: archive to a new place, or declare the type "
                    "that it had"
                )
        new = [field for field in wanted if field.name not in known]
        if not new:
            return
        _logger.info(
            "%s gets new columns: %s", self.uri, ", ".join(field.name for field in new)
        )
        try:
            table.alter.add_columns(
                new, commit_properties=commit_properties(self.state, new=False)
            )
        except CommitFailedError as error:
            raise self._refused(self.state.batch + 1) from error
        table.update_incremental()

    def _refused(self, batch: int) -> PipelineError:
        table = self._store.table(self.uri)
        who = "another driver" if table is None else who_committed(table, batch)
        return PipelineError(
            f"{self.name}: {who} has archived batch {batch} to {self.uri} first: one "
            "driver at a time; stop one of them. Nothing is lost or doubled"
        )

    def _failed(self, error: Exception) -> PipelineError:
        reason = " ".join(str(error).split())
        return PipelineError(
            f"the archive {self.uri} cannot be written: {excerpt(reason)}"
        )


def _actions(table: DeltaTable) -> Iterable[dict[str, Any]]:
    found: list[dict[str, Any]] = pa.table(
        table.get_add_actions(flatten=True)
    ).to_pylist()
    return found

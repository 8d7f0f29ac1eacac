"""The transaction logs of an archive's tables: metadata in commits.

A commit that adds rows of a stream contains the resulting offset of the stream, and an
application transaction with the number of the batch. Rows and offset therefore become
visible atomically. Delta Lake stores the number in its checkpoints, and rejects the
commit of a batch if another driver has committed a batch since the table was loaded.
Maintenance commits repeat the offset and the number, so that both can still be read
after the log has been cleaned.

Each archived recording has an application transaction. Its application id contains the
name of the recording, and its version is the size of the recording in bytes.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import attrs
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError
from msgspec import to_builtins

from synapse_replication.errors import PipelineError, excerpt
from synapse_replication.pipeline.archive.store import storage_error_text
from synapse_replication.pipeline.source.offsets import StreamOffset

#: The application id of the transactions of batches.
APPLICATION: Final = "synapse_replication.archive"

#: The beginning of the application id of a recording's transaction.
_RECORDING: Final = "recording/"

_OFFSET: Final = "synapse_replication.offset"
_BATCH: Final = "synapse_replication.batch"
_WRITTEN_BY: Final = "synapse_replication.written_by"
_PURGED: Final = "synapse_replication.purged"

#: The number of newest commits that each search for the offset covers; ``None`` for
#: all commits.
_SEARCH_LIMITS: Final = (1, 20, 1000, None)


@attrs.frozen
class TableState:
    """The progress of a table.

    :ivar batch: the number of the last batch; 0 before the first.
    :ivar offset: the offset up to which the stream is archived.
    """

    batch: int = 0
    offset: StreamOffset = attrs.field(factory=StreamOffset)


def read_state(table: DeltaTable) -> TableState:
    """Read the progress of a table at its loaded version.

    :raises PipelineError: if the log no longer contains the progress, or is damaged.
    """
    with reading(table):
        batch = table.transaction_version(APPLICATION)
    if batch is None:
        return TableState()
    for limit in _SEARCH_LIMITS:
        for commit in _commits(table, limit):
            # Ignore commits after the loaded version: another driver may be running.
            is_loaded = commit["version"] <= table.version()
            if (
                is_loaded
                and str(commit.get(_BATCH)) == str(batch)
                and _OFFSET in commit
            ):
                return TableState(batch, _offset_of(table, commit))
    raise PipelineError(
        f"the log of {table.table_uri} no longer contains the offset of batch {batch}: "
        "another program has cleaned the log; restore the table from a backup, or "
        "archive to a new location"
    )


@contextlib.contextmanager
def reading(table: DeltaTable) -> Iterator[None]:
    """Convert the errors of reading a table's log within the context.

    :raises PipelineError: if the log is damaged, or the store fails.
    """
    try:
        yield
    except (DeltaError, OSError) as error:
        raise PipelineError(
            f"the log of the table {table.table_uri} cannot be read: "
            f"{storage_error_text(error)}; restore its folder _delta_log from a "
            "backup, or run: synapse-replication pipeline archive --repair"
        ) from error


def _commits(table: DeltaTable, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the metadata of the newest commits, the last one first.

    :raises PipelineError: if a commit cannot be read.
    """
    with reading(table):
        return table.history(limit)


def _offset_of(table: DeltaTable, commit: Mapping[str, Any]) -> StreamOffset:
    """Return the offset in the metadata of a commit.

    :raises PipelineError: if it is damaged.
    """
    try:
        return StreamOffset.from_json(json.loads(commit[_OFFSET]))
    except (ValueError, TypeError, RecursionError, PipelineError) as error:
        raise PipelineError(
            f"commit {commit['version']} of {table.table_uri} has a damaged offset: "
            f"{excerpt(str(error))}; restore the table from a backup, or archive to a "
            "new location"
        ) from error


def offsets_around(
    table: DeltaTable, versions: Collection[int]
) -> tuple[StreamOffset, StreamOffset]:
    """Return the offsets before and after commits that were lost.

    :param versions: the versions of these commits. If no later commit has an offset,
        both offsets are equal: the archive job then archives the rows again.
    """
    offsets = {
        commit["version"]: _offset_of(table, commit)
        for commit in _commits(table)
        if _OFFSET in commit
    }
    before = max((v for v in offsets if v < min(versions)), default=None)
    after = min((v for v in offsets if v > max(versions)), default=None)
    start = StreamOffset() if before is None else offsets[before]
    return start, start if after is None else offsets[after]


def commit_properties(
    state: TableState,
    *,
    recordings: Mapping[str, int] | None = None,
    adds_batch: bool = False,
) -> CommitProperties:
    """Return the metadata of a commit: its origin, and the table's progress.

    :param state: the state after the commit.
    :param recordings: the names and sizes of the recordings that the commit adds.
    :param adds_batch: whether the commit adds the batch; false for maintenance, which
        repeats the number and the offset of the last batch.
    """
    transactions = [
        Transaction(f"{_RECORDING}{name}", size)
        for name, size in sorted((recordings or {}).items())
    ]
    if adds_batch:
        transactions.append(Transaction(APPLICATION, state.batch))
    return CommitProperties(
        custom_metadata={
            _OFFSET: json.dumps(to_builtins(state.offset), sort_keys=True),
            _BATCH: str(state.batch),
            _WRITTEN_BY: f"process {os.getpid()} on {socket.gethostname()}",
        },
        app_transactions=transactions or None,
    )


def committer_of(table: DeltaTable, batch: int) -> str:
    """Describe the process that committed a batch, with the time of the commit.

    Return ``another driver`` if the last 100 commits do not contain the batch.
    """
    found = [each for each in _commits(table, 100) if each.get(_BATCH) == str(batch)]
    if not found:
        return "another driver"
    # The newest commit comes first. Maintenance after the batch repeats its number.
    commit = found[-1]
    who = str(commit.get(_WRITTEN_BY, "another program"))
    try:
        when = datetime.datetime.fromtimestamp(
            commit["timestamp"] / 1000, datetime.timezone.utc
        )
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        # The commit of another program, without a time or with one out of range.
        return who
    return f"{who} at {when:%F %T} UTC"


def archived_size(table: DeltaTable, name: str) -> int | None:
    """Return the archived size of a recording; ``None`` if it is not archived."""
    with reading(table):
        return table.transaction_version(f"{_RECORDING}{name}")


# -- purges ------------------------------------------------------------------------


@attrs.frozen
class PurgedRange:
    """The range that contains all purged tokens of a writer of a stream.

    Rows with other tokens in the range may still be in the archive.

    :ivar first_token: the least purged token.
    :ivar last_token: the greatest purged token.
    """

    stream: str
    instance_name: str
    first_token: int
    last_token: int


def read_purged_ranges(table: DeltaTable, stream: str) -> list[PurgedRange]:
    """Return the range of purged tokens of each writer of a stream.

    :raises PipelineError: if the table property is damaged.
    """
    with reading(table):
        text = table.metadata().configuration.get(_PURGED)
    try:
        return [
            PurgedRange(stream, writer, int(first), int(last))
            for writer, (first, last) in sorted(json.loads(text or "{}").items())
        ]
    except (ValueError, TypeError, AttributeError) as error:
        raise PipelineError(
            f"the property {_PURGED} of {table.table_uri} is damaged: "
            f"{excerpt(str(error))}"
        ) from error


def purged_properties(ranges: list[PurgedRange]) -> dict[str, str]:
    """Return the table properties that record purged ranges, merged per writer."""
    ends: dict[str, list[int]] = {}
    for each in ranges:
        ends.setdefault(each.instance_name, []).append(each.first_token)
        ends[each.instance_name].append(each.last_token)
    merged = {writer: (min(tokens), max(tokens)) for writer, tokens in ends.items()}
    return {_PURGED: json.dumps(merged, sort_keys=True)}

"""What the commits of an archive's tables say besides their files.

A commit that adds rows of a stream carries the offset up to which the stream is
archived then, and an application transaction with the number of the batch: rows and
offset become visible together, or not at all. Delta Lake keeps the number in its
checkpoints, and refuses a second commit of a number. Maintenance repeats offset and
number, so that the newest commit always tells them, however often the log is cleaned.

Recordings are known by an application transaction each: the name is that of the
recording, the version its size in bytes.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from synapse_replication.errors import PipelineError, excerpt
from synapse_replication.pipeline.source.offsets import StreamOffset

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable

__all__ = [
    "APPLICATION",
    "PurgedRange",
    "TableState",
    "archived_size",
    "commit_properties",
    "purged_properties",
    "read_purged_ranges",
    "read_state",
    "recording_id",
    "who_committed",
]

#: The application whose transactions are the batches of a table.
APPLICATION: Final = "synapse_replication.archive"

_OFFSET: Final = "synapse_replication.offset"
_BATCH: Final = "synapse_replication.batch"
_WRITTEN_BY: Final = "synapse_replication.written_by"
_PURGED: Final = "synapse_replication.purged"

#: Commits of the log that are read at once, newest first.
_LOOK_BACK: Final = (1, 20, 1000, None)


@attrs.frozen
class TableState:
    """How far a table is.

    :ivar version: of the table.
    :ivar batch: the number of the last batch; 0 if there is none.
    :ivar offset: up to where the stream is archived.
    """

    version: int
    batch: int = 0
    offset: StreamOffset = attrs.field(factory=StreamOffset)


def read_state(table: DeltaTable) -> TableState:
    """Read how far a table is at the version that is loaded.

    :raises PipelineError: if the log does not tell.
    """
    batch = table.transaction_version(APPLICATION)
    if batch is None:
        return TableState(table.version())
    for commit in _commits(table):
        if str(commit.get(_BATCH)) == str(batch) and _OFFSET in commit:
            offset = StreamOffset.from_json(json.loads(commit[_OFFSET]))
            return TableState(table.version(), batch, offset)
    raise PipelineError(
        f"the log of {table.table_uri} no longer tells up to where batch {batch} goes: "
        "it was cleaned by another program; restore the table from a backup, or "
        "archive to a new place"
    )


def _commits(table: DeltaTable) -> Iterator[dict[str, Any]]:
    seen = 0
    for limit in _LOOK_BACK:
        found = table.history(limit)
        # Nothing newer than what is loaded: another driver may be at work.
        yield from (
            commit for commit in found[seen:] if commit["version"] <= table.version()
        )
        if limit is not None and len(found) < limit:
            return
        seen = len(found)


def commit_properties(
    state: TableState, *, recordings: Mapping[str, int] | None = None, new: bool
) -> CommitProperties:
    """Describe a commit: who made it, and how far the table is then.

    :param state: after the commit.
    :param recordings: names and sizes of those that the commit holds.
    :param new: the commit holds the batch; false for maintenance, which repeats it.
    """
    from deltalake import CommitProperties, Transaction

    transactions = [
        Transaction(recording_id(name), size)
        for name, size in sorted((recordings or {}).items())
    ]
    if new:
        transactions.append(Transaction(APPLICATION, state.batch))
    return CommitProperties(
        custom_metadata={
            _OFFSET: json.dumps(state.offset.to_json(), sort_keys=True),
            _BATCH: str(state.batch),
            _WRITTEN_BY: f"process {os.getpid()} on {socket.gethostname()}",
        },
        app_transactions=transactions or None,
    )


def who_committed(table: DeltaTable, batch: int) -> str:
    """Say who committed a batch, and when."""
    for commit in table.history(100):
        if commit.get(_BATCH) == str(batch):
            when = datetime.datetime.fromtimestamp(
                commit["timestamp"] / 1000, datetime.timezone.utc
            )
            return f"{commit.get(_WRITTEN_BY, 'another program')} at {when:%F %T} UTC"
    return "another driver"


def recording_id(name: str) -> str:
    """Return the application id of a recording's transaction."""
    return f"recording/{name}"


def archived_size(table: DeltaTable, name: str) -> int | None:
    """Return the size of a recording as archived; ``None`` if it is not archived."""
    return table.transaction_version(recording_id(name))


# -- purges ------------------------------------------------------------------------


@attrs.frozen
class PurgedRange:
    """Rows that an archive had and that were purged.

    :ivar first_token: the smallest of them; ``last_token`` the greatest.
    """

    stream: str
    instance_name: str
    first_token: int
    last_token: int


def read_purged_ranges(table: DeltaTable, stream: str) -> list[PurgedRange]:
    """Return which rows of a stream were purged, one range per writer.

    :raises PipelineError: if the record is damaged.
    """
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
    merged: dict[str, tuple[int, int]] = {}
    for each in ranges:
        first, last = merged.get(
            each.instance_name, (each.first_token, each.last_token)
        )
        merged[each.instance_name] = (
            min(first, each.first_token),
            max(last, each.last_token),
        )
    return {_PURGED: json.dumps(merged, sort_keys=True)}

"""The job that computes positions from the rows in the tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import attrs

from synapse_replication.errors import PipelineError
from synapse_replication.pipeline.bootstrap.plan import (
    Change,
    StreamHistory,
    check_histories,
    plan_positions,
)
from synapse_replication.pipeline.bootstrap.store import (
    check_no_writers,
    connected,
    read_farthest,
    read_histories,
    write_positions,
)
from synapse_replication.pipeline.progress import JobProgress
from synapse_replication.pipeline.settings import PipelineSettings


@attrs.frozen
class Bootstrap:
    """The state of the streams, and the plan for each position.

    :ivar without_writer: for each stream that has rows without a writer, in a table
        with a column for the writer, the greatest token of these rows.
    """

    histories: Sequence[StreamHistory]
    changes: Sequence[Change]
    without_writer: Mapping[str, int]


def run_bootstrap(settings: PipelineSettings) -> Bootstrap:
    """Compute the positions of all writers, and show the progress.

    :raises PipelineError: if :func:`read_bootstrap` raises it.
    """
    with JobProgress(sys.stderr, 1) as progress:
        progress.begin("find the last row of each writer")
        return read_bootstrap(settings)


def read_bootstrap(settings: PipelineSettings) -> Bootstrap:
    """Compute the positions of the writers of all streams.

    :raises PipelineError: if writers are active, a sequence is behind its tables or a
        stored position, ``stream_positions`` has two rows for a writer of a stream, or
        the database cannot be read or has no table of any stream. A writer that is
        running but idle is not detected.
    """
    with connected(settings.conninfo, readonly=True) as connection:
        # Each query has a new snapshot, so that active writers are detected.
        connection.autocommit = True
        with connection.cursor() as cursor:
            before = read_histories(cursor, settings)
            if not before:
                raise PipelineError(
                    "the database has no table of a homeserver's stream; is it the "
                    "homeserver's database?"
                )
            check_no_writers(cursor, before, before)
            found = list(read_farthest(cursor, before))
            now = read_histories(cursor, settings)
            check_no_writers(cursor, before, now)
    histories = [history.with_found(found) for history in now]
    check_histories(histories)
    columns = {(h.name, c.table): c.writer_column for h in now for c in h.tables}
    without_writer: dict[str, int] = {}
    for stream, table, writer, token in found:
        if writer is None and columns[stream, table] is not None:
            without_writer[stream] = max(token, without_writer.get(stream, 0))
    return Bootstrap(histories, plan_positions(histories), without_writer)


def write_bootstrap(settings: PipelineSettings, found: Bootstrap) -> None:
    """Write the changes in one transaction.

    :raises PipelineError: if writers are active, a position would decrease, or the
        database cannot be written. In each case, nothing is written. A writer that is
        running but idle is not detected.
    """
    with (
        connected(settings.conninfo, readonly=False) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        write_positions(cursor, settings, found.histories, found.changes)

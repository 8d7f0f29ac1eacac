"""The pipeline's settings of a deployment: its database and its streams.

They come from a ``dsn`` (a libpq connection string) or from the homeserver's
configuration. The Spark driver reads them and passes them to executors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from synapse_replication.config.deployment import load_deployment
from synapse_replication.errors import ConfigError, PipelineError
from synapse_replication.storage import queries
from synapse_replication.storage.consistency import ConsistencyReport, examine
from synapse_replication.storage.id_streams import exists, id_stream_of
from synapse_replication.streams.standard import registry
from synapse_replication.streams.table import TableStream

Stream = registry.StandardStream | TableStream


@attrs.frozen
class PipelineSettings:
    """The database and the streams of a deployment.

    :ivar conninfo: libpq's parameters by name. They may contain a password, so they
        must not be printed or logged.
    :ivar writers: the declared writers of each stream, by its name on the wire; empty
        for a stream that all instances may write. Without a configuration, the mapping
        is empty.
    :ivar declared: the streams that the configuration declares, in addition to the
        standard ones.
    """

    conninfo: Mapping[str, Any] = attrs.field(repr=False)
    writers: Mapping[str, tuple[str, ...]] = attrs.Factory(dict)
    declared: tuple[TableStream, ...] = ()

    @classmethod
    def of_dsn(cls, dsn: str) -> PipelineSettings:
        """Parse a libpq string: ``host=... dbname=...`` or ``postgresql://...``.

        :raises PipelineError: if the string cannot be parsed. The message does not
            contain the string.
        """
        import psycopg2
        from psycopg2.extensions import parse_dsn

        try:
            return cls(parse_dsn(dsn))
        except psycopg2.ProgrammingError:
            # libpq's message contains the string, which may have a password.
            raise PipelineError(
                "the dsn cannot be read; write it as 'host=... port=... dbname=... "
                "user=...' or as 'postgresql://user@host:port/dbname'"
            ) from None

    @classmethod
    def of_config(cls, paths: Sequence[str]) -> PipelineSettings:
        """Read the settings from a homeserver's configuration files.

        :raises PipelineError: if the configuration is invalid, or has no PostgreSQL
            database.
        """
        try:
            config = load_deployment(paths)
        except ConfigError as error:
            raise PipelineError(str(error)) from error
        if config.database is None:
            raise PipelineError(
                f"{', '.join(paths)}: no PostgreSQL database is configured; add the "
                "section 'database' with 'name: psycopg2'"
            )
        declared = tuple(s for s in config.streams if isinstance(s, TableStream))
        return cls(config.database.conninfo, dict(config.writers), declared)

    @property
    def streams(self) -> list[Stream]:
        """The standard streams, and those that the configuration declares."""
        return [*registry.STANDARD_STREAMS.values(), *self.declared]

    def read_states(self, txn: Any) -> ConsistencyReport:
        """Compare the sequences, tables and positions of all streams with ids.

        Without declared writers, every instance with a position is a writer.
        """
        stored: dict[str, list[str]] = {}
        if exists(txn, "stream_positions"):
            txn.execute(queries.SQL["all_positions"])
            for stream, writer, _ in sorted(txn.fetchall()):
                stored.setdefault(stream, []).append(writer)
        id_streams = {}
        for each in self.streams:
            if each.sequence is not None:
                known: Sequence[str] = ()
                if each.positions_name is not None:
                    found = stored.get(each.positions_name, [])
                    known = self.writers.get(each.name) or found
                id_streams[each.name] = id_stream_of(each, known)
        return examine(txn, id_streams)

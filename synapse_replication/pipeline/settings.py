"""Where the pipeline finds a deployment: its database and its streams.

Of a ``dsn`` (libpq's text) or of the homeserver's configuration. Read on the driver;
executors are given what comes of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from synapse_replication.config.deployment import load_deployment
from synapse_replication.errors import ConfigError, PipelineError
from synapse_replication.streams.table import TableStream

__all__ = ["PipelineSettings", "settings_of_config", "settings_of_dsn"]


@attrs.frozen
class PipelineSettings:
    """A deployment, as the pipeline sees it.

    :ivar conninfo: libpq's parameters by name. Never shown.
    :ivar writers: the declared writers of each stream, by its name on the wire;
        empty for a stream that anybody writes; empty altogether if only the
        database is known.
    :ivar declared: streams declared by a table of the user's own.
    """

    conninfo: Mapping[str, Any] = attrs.field(repr=False)
    writers: Mapping[str, tuple[str, ...]] = attrs.Factory(dict)
    declared: tuple[TableStream, ...] = ()


def settings_of_dsn(dsn: str) -> PipelineSettings:
    """Take libpq's text: ``host=... dbname=...`` or ``postgresql://...``.

    :raises PipelineError: if it is none; the text is not repeated.
    """
    import psycopg2
    from psycopg2.extensions import parse_dsn

    try:
        return PipelineSettings(parse_dsn(dsn))
    except psycopg2.ProgrammingError:
        # What libpq says repeats the text, and a password may be in it.
        raise PipelineError(
            "the dsn cannot be read; write it as 'host=... port=... dbname=... "
            "user=...' or as 'postgresql://user@host:port/dbname'"
        ) from None


def settings_of_config(paths: Sequence[str]) -> PipelineSettings:
    """Take the configuration of a homeserver, one file or several.

    :raises PipelineError: if it has a mistake, or no PostgreSQL database.
    """
    try:
        config = load_deployment(paths)
    except ConfigError as error:
        raise PipelineError(str(error)) from error
    if config.database is None:
        raise PipelineError(
            f"{', '.join(paths)}: there is no database; write one with name: psycopg2"
        )
    return PipelineSettings(
        config.database.conninfo,
        dict(config.writers),
        tuple(stream for stream in config.streams if isinstance(stream, TableStream)),
    )

"""The sources that a stand-alone host reads from: other processes and the database."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs

from synapse_replication.clock import ReactorClock
from synapse_replication.config.replication_options import ReplicationOptions
from synapse_replication.errors import CatchUpError
from synapse_replication.handlers.data_handler import LargestToken
from synapse_replication.http.client import HttpCatchUpClient
from synapse_replication.http.retry import with_retries
from synapse_replication.storage.database import Database
from synapse_replication.storage.id_streams import read_sequence
from synapse_replication.streams.stream import UpdateFunction


def _fail_without_client(name: str) -> UpdateFunction:
    raise CatchUpError(
        f"rows of {name} cannot be requested: this host has no HTTP client"
    )


@attrs.frozen
class HostSources:
    """The functions by which a host reads from writers and from the database.

    :ivar fetch_from_writer: returns, for the name of a stream held in memory, a
        function that requests its rows from their writers over HTTP, with retries;
        the default raises :class:`~synapse_replication.errors.CatchUpError`.
    :ivar largest_token: returns the largest token of a stream that any writer may
        have allocated. The attribute is ``None`` if the host has no database.
    """

    fetch_from_writer: Callable[[str], UpdateFunction] = _fail_without_client
    largest_token: LargestToken | None = None


def make_sources(
    options: ReplicationOptions,
    clock: ReactorClock,
    database: Database | None,
    client: HttpCatchUpClient,
) -> HostSources:
    """Return the sources of a process.

    :param database: ``None`` if the configuration needs none.
    :param client: requests the rows of streams in memory from their writers.
    """

    def fetch_from_writer(name: str) -> UpdateFunction:
        return with_retries(client.for_stream(name), clock, random.random)

    if database is None:
        return HostSources(fetch_from_writer)
    streams = options.id_streams

    async def largest_token(stream_name: str) -> int | None:
        """Return the last id that a stream's sequence allocated.

        :return: the first id minus one if the sequence has allocated none; ``None`` if
            the stream is not configured or has no sequence.
        """
        stream = streams.get(stream_name)
        if stream is None:
            return None
        return await database.transact(
            f"largest_token_{stream_name}",
            lambda txn: read_sequence(txn, stream.sequence),
            autocommit=True,
        )

    return HostSources(fetch_from_writer, largest_token)

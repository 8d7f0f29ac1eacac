"""Reads from the other processes and the database, for the host of a process."""

from __future__ import annotations

import random
from collections.abc import Callable

from synapse_replication.clock import ReactorClock
from synapse_replication.config.replication_options import ReplicationOptions
from synapse_replication.handlers.data_handler import LargestToken
from synapse_replication.http.client import HttpCatchUpClient
from synapse_replication.http.retry import with_retries
from synapse_replication.storage.database import Database
from synapse_replication.storage.id_streams import read_sequence
from synapse_replication.streams.stream import UpdateFunction


def fetch_with_retries(
    client: HttpCatchUpClient, clock: ReactorClock
) -> Callable[[str], UpdateFunction]:
    """Return a function that returns the request for the rows of a stream in memory."""
    return lambda name: with_retries(client.for_stream(name), clock, random.random)


def largest_token_of(
    options: ReplicationOptions, database: Database | None
) -> LargestToken | None:
    """Return a function that returns the last id that a stream's sequence allocated.

    Its result is the first id minus one if the sequence has allocated none, and
    ``None`` if the stream is not configured or has no sequence.

    :param database: ``None`` if the configuration needs none.
    :return: ``None`` without a database.
    """
    if database is None:
        return None
    streams = options.id_streams

    async def largest_token(stream_name: str) -> int | None:
        stream = streams.get(stream_name)
        if stream is None:
            return None
        return await database.transact(
            f"largest_token_{stream_name}",
            lambda txn: read_sequence(txn, stream.sequence),
            autocommit=True,
        )

    return largest_token

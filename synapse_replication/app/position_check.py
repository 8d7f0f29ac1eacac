"""Starts the comparison of stored positions with the announced ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.handler import ReplicationCommandHandler
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.storage.committed import row_ids_of
from synapse_replication.storage.stored_positions import StoredPositionCheck
from synapse_replication.storage.transactions import TransactionRunner
from synapse_replication.streams.standard.registry import StandardStream

if TYPE_CHECKING:
    from synapse_replication.handlers.interfaces import ReplicationHost
    from synapse_replication.streams.table import TableStream


def start_position_check(
    database: TransactionRunner,
    host: ReplicationHost,
    observer: ReplicationObserver,
    handler: ReplicationCommandHandler,
    epochs: PeerEpochs,
    streams: Mapping[str, StandardStream | TableStream],
    writers: Mapping[str, Sequence[str]],
    instances: Iterable[str],
    *,
    interval: float,
) -> StoredPositionCheck | None:
    """Start to read the stored positions of all writers but this process.

    :param streams: the streams in the database, by name.
    :param writers: the declared writers of each stream; none if every instance writes.
    :param instances: the instances of the deployment.
    :param interval: the mean time between two reads, in s; 0 for no reads.
    :return: ``None`` if nothing is read.
    """
    me = host.identity.instance_name
    stored = {
        (stream.positions_name or name, writer): name
        for name, stream in streams.items()
        for writer in writers[name]
        if writer != me
    }
    others = [name for name in instances if name != me]
    unstored = {name: others for name in streams if not writers[name]}
    if not interval or not (stored or unstored):
        return None
    clock = host.clock
    check = StoredPositionCheck(
        database,
        stored,
        {name: row_ids_of(streams[name]) for name in (*stored.values(), *unstored)},
        unstored,
        handler,
        lambda name: epochs.is_reporting(name, clock.seconds()),
        clock,
        observer,
        interval=interval,
    )
    check.start()
    return check

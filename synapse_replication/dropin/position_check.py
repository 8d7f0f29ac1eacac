"""Starts the comparison of the stored positions with the announced ones in a host."""

from __future__ import annotations

from typing import Any

from synapse_replication.dropin.host_streams import declared_writers, instances_of
from synapse_replication.dropin.id_generators import HostDatabase
from synapse_replication.dropin.observer import observer_of
from synapse_replication.dropin.settings import own_settings
from synapse_replication.dropin.synapse_host import SynapseHost
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.handler import ReplicationCommandHandler
from synapse_replication.storage.stored_positions import (
    StoredPositionCheck,
    start_position_check,
)
from synapse_replication.streams.standard.registry import STANDARD_STREAMS


def start_host_position_check(
    hs: Any,
    host: SynapseHost,
    handler: ReplicationCommandHandler,
    epochs: PeerEpochs,
) -> StoredPositionCheck | None:
    """Start to read the stored positions of the declared writers.

    :return: ``None`` if it is disabled, or if the database is not PostgreSQL.
    """
    database = HostDatabase(hs.get_datastores().main.db_pool, hs.hostname)
    if not database.is_postgres:
        return None
    worker = hs.config.worker
    streams = {
        name: known
        for name in host.streams.get_streams()
        if (known := STANDARD_STREAMS.get(name)) is not None
        and (known.positions_name is not None or known.any_instance_writes)
    }
    return start_position_check(
        database,
        host,
        observer_of(hs),
        handler,
        epochs,
        streams,
        {name: declared_writers(worker, name) for name in streams},
        instances_of(worker.instance_map),
        interval=own_settings().position_check_seconds,
    )

"""Starts the comparison of the stored positions with the announced ones in a host."""

from __future__ import annotations

import os
from typing import Any

from synapse_replication.dropin.adapter import SynapseHost
from synapse_replication.dropin.backlogs import instance_locations
from synapse_replication.dropin.id_generators import HostDatabase
from synapse_replication.dropin.observer import observer_of
from synapse_replication.dropin.settings import DropInSettings
from synapse_replication.dropin.streams import declared_writers
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.handler import ReplicationCommandHandler
from synapse_replication.storage.postgres_stream import ranges_of
from synapse_replication.storage.stored_positions import StoredPositionCheck
from synapse_replication.streams.standard.registry import STANDARD_STREAMS


def start_position_check(
    hs: Any,
    host: SynapseHost,
    handler: ReplicationCommandHandler,
    epochs: PeerEpochs,
) -> StoredPositionCheck | None:
    """Start to read the stored positions of the declared writers.

    :return: ``None`` if it is disabled, or if the database is not PostgreSQL.
    """
    interval = DropInSettings.from_environ(os.environ).position_check_seconds
    database = HostDatabase(hs.get_datastores().main.db_pool, hs.hostname)
    if not interval or not database.is_postgres:
        return None
    instance_name = hs.get_instance_name()
    writers = {
        (known.positions_name, writer): name
        for name in host.streams.get_streams()
        if (known := STANDARD_STREAMS.get(name)) is not None
        and known.positions_name is not None
        for writer in declared_writers(hs.config.worker, name)
        if writer != instance_name
    }
    others = [
        name
        for name in instance_locations(hs.config.worker.instance_map)
        if name != instance_name
    ]
    unstored = {
        name: others
        for name in host.streams.get_streams()
        if (known := STANDARD_STREAMS.get(name)) is not None
        and known.any_instance_writes
    }
    check = StoredPositionCheck(
        database,
        writers,
        {
            name: ranges_of(STANDARD_STREAMS[name])
            for name in (*writers.values(), *unstored)
        },
        unstored,
        handler,
        lambda name: epochs.is_reporting(name, host.clock.seconds()),
        host.clock,
        observer_of(hs),
        interval=interval,
    )
    check.start()
    return check

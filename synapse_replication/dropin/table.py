"""The names of Synapse that are replaced, with their signatures.

The names, and the parameters that ``inspect.signature`` returns, were read from
installed packages.
"""

from __future__ import annotations

from typing import Final

from synapse_replication.dropin.substitution import Substitution

#: The versions of matrix-synapse with which this table was tested.
PROVEN_VERSIONS: Final = ("1.153.0", "1.163.0", "1.163.1", "1.163.2")

#: The parts that an operator can select, each with its description.
PARTS: Final = {
    "commands": "the commands of the protocol",
    "protocol": "both ends of a direct TCP connection",
    "handler": "the command handler and the streamer",
    "notifier": "the notifications of changed streams within a process",
    "redis": "connections to Redis",
    "backlog": "recently sent rows, retained for readers that missed them",
    "external_cache": "the cache in Redis that all processes share",
    "ids": "ids and positions in the database",
}


def _replace(
    part: str,
    original: str,
    replacement: str,
    *shapes: str,
    extends: bool = False,
    **methods: str,
) -> Substitution:
    """Return a substitution; the names are relative to ``synapse`` and this package."""
    module, _, name = original.partition(":")
    return Substitution(
        part=part,
        module=f"synapse.{module}",
        name=name,
        replacement=f"synapse_replication.{replacement}",
        shapes=shapes,
        methods=methods,
        extends=extends,
    )


#: The classes of commands, with the shapes of their constructors.
_COMMANDS = {
    "ServerCommand": "(data)",
    "RdataCommand": "(stream_name, instance_name, token, row)",
    "PositionCommand": "(stream_name, instance_name, prev_token, new_token)",
    "ErrorCommand": "(data)",
    "PingCommand": "(data)",
    "NameCommand": "(data)",
    "ReplicateCommand": "()",
    "UserSyncCommand": "(instance_id, user_id, device_id, is_syncing, last_sync_ms)",
    "ClearUserSyncsCommand": "(instance_id)",
    "FederationAckCommand": "(instance_name, token)",
    "UserIpCommand": "(user_id, access_token, ip, user_agent, device_id, last_seen)",
    "RemoteServerUpCommand": "(data)",
    "LockReleasedCommand": "(instance_name, lock_name, lock_key)",
    "NewActiveTaskCommand": "(data)",
    "CancelTaskCommand": "(data)",
}

SUBSTITUTIONS: Final = (
    _replace(
        "commands",
        "replication.tcp.commands:Command",
        "wire.commands:Command",
        from_line="(line)",
        to_line="()",
        get_logcontext_id="()",
        redis_channel_name="(prefix)",
    ),
    *(
        _replace(
            "commands",
            f"replication.tcp.commands:{name}",
            f"wire.commands:{name}",
            shape,
            from_line="(line)",
            to_line="()",
        )
        for name, shape in _COMMANDS.items()
    ),
    _replace(
        "commands",
        "replication.tcp.commands:parse_command_from_line",
        "wire.commands:parse_command_from_line",
        "(line)",
    ),
    _replace(
        "protocol",
        "replication.tcp.protocol:ServerReplicationStreamProtocol",
        "dropin.tcp_ends:make_server_end",
        "(hs, server_name, clock, handler)",
        connectionMade="()",
        connectionLost="(reason)",
        close="()",
    ),
    _replace(
        "protocol",
        "replication.tcp.protocol:ClientReplicationStreamProtocol",
        "dropin.tcp_ends:make_client_end",
        "(hs, client_name, server_name, clock, command_handler)",
        connectionMade="()",
        connectionLost="(reason)",
        close="()",
    ),
    _replace(
        "handler",
        "replication.tcp.handler:ReplicationCommandHandler",
        "dropin.handler:DropInCommandHandler",
        "(hs)",
        start_replication="(hs)",
        get_streams="()",
        get_streams_to_replicate="()",
        connected="()",
        new_connection="(connection)",
        lost_connection="(connection)",
        send_command="(cmd)",
        send_federation_ack="(token)",
        send_user_sync="(instance_id, user_id, device_id, is_syncing, last_sync_ms)",
        send_user_ip="(user_id, access_token, ip, user_agent, device_id, last_seen)",
        send_remote_server_up="(server)",
        send_new_active_task="(task_id)",
        stream_update="(stream_name, token, data)",
        on_lock_released="(instance_name, lock_name, lock_key)",
        subscribe_to_channel="(channel_name)",
    ),
    _replace(
        "handler",
        "replication.tcp.resource:ReplicationStreamer",
        "dropin.resource:DropInStreamer",
        "(hs)",
        on_notifier_poke="()",
    ),
    _replace(
        "handler",
        "replication.tcp.resource:ReplicationStreamProtocolFactory",
        "dropin.resource:DropInProtocolFactory",
        "(hs)",
        buildProtocol="(addr)",
    ),
    _replace(
        "notifier",
        "notifier:ReplicationNotifier",
        "dropin.notifier:with_combining",
        "(replication_callbacks=)",
        extends=True,
        add_replication_callback="(cb)",
        notify_replication="()",
    ),
    _replace(
        "redis",
        "replication.tcp.redis:SynapseRedisFactory",
        "dropin.redis_factories:DropInRedisFactory",
        "(hs, uuid, dbid, poolsize, isLazy=, handler=, charset=, username=, "
        "password=, replyTimeout=, convertNumbers=)",
        "(hs, uuid, dbid, poolsize, isLazy=, handler=, charset=, password=, "
        "replyTimeout=, convertNumbers=)",
    ),
    _replace(
        "redis",
        "replication.tcp.redis:RedisDirectTcpReplicationClientFactory",
        "dropin.redis_factories:RedisDirectTcpReplicationClientFactory",
        "(hs, outbound_redis_connection, channel_names)",
    ),
    _replace(
        "redis",
        "replication.tcp.redis:lazyConnection",
        "dropin.redis_factories:lazyConnection",
        "(hs, host=, port=, dbid=, reconnect=, username=, password=, replyTimeout=)",
        "(hs, host=, port=, dbid=, reconnect=, password=, replyTimeout=)",
    ),
    _replace(
        "redis",
        "replication.tcp.redis:lazyUnixConnection",
        "dropin.redis_factories:lazyUnixConnection",
        "(hs, path=, dbid=, reconnect=, username=, password=, replyTimeout=)",
        "(hs, path=, dbid=, reconnect=, password=, replyTimeout=)",
    ),
    # The class that a host mounts on listeners with the resource ``replication``.
    _replace(
        "backlog",
        "replication.http:ReplicationRestResource",
        "dropin.backlogs:with_backlog",
        "(hs)",
        extends=True,
        render="(request)",
    ),
    _replace(
        "external_cache",
        "replication.tcp.external_cache:ExternalCache",
        "dropin.external_cache:DropInExternalCache",
        "(hs)",
        is_enabled="()",
        set="(cache_name, key, value, expiry_ms)",
        get="(cache_name, key)",
    ),
    _replace(
        "ids",
        "storage.util.id_generators:MultiWriterIdGenerator",
        "dropin.id_generators:DropInIdGenerator",
        "(*, db_conn, db, notifier, stream_name, server_name, instance_name, "
        "tables, sequence_name, writers, positive=)",
        get_next="()",
        get_next_mult="(n)",
        get_next_txn="(txn)",
        get_next_mult_txn="(txn, n)",
        get_current_token="()",
        get_current_token_for_writer="(instance_name)",
        get_minimal_local_current_token="()",
        get_positions="()",
        get_persisted_upto_position="()",
        get_max_allocated_token="()",
        advance="(instance_name, new_id)",
    ),
)

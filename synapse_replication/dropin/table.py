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

_TCP = "synapse.replication.tcp"
_OURS = "synapse_replication.dropin"
_WIRE = "synapse_replication.wire.commands"


def _command(name: str, shape: str) -> Substitution:
    return Substitution(
        part="commands",
        module=f"{_TCP}.commands",
        name=name,
        replacement=f"{_WIRE}:{name}",
        shapes=(shape,),
        methods={"from_line": "(line)", "to_line": "()"},
    )


_COMMANDS = (
    Substitution(
        part="commands",
        module=f"{_TCP}.commands",
        name="Command",
        replacement=f"{_WIRE}:Command",
        methods={
            "from_line": "(line)",
            "to_line": "()",
            "get_logcontext_id": "()",
            "redis_channel_name": "(prefix)",
        },
    ),
    _command("ServerCommand", "(data)"),
    _command("RdataCommand", "(stream_name, instance_name, token, row)"),
    _command("PositionCommand", "(stream_name, instance_name, prev_token, new_token)"),
    _command("ErrorCommand", "(data)"),
    _command("PingCommand", "(data)"),
    _command("NameCommand", "(data)"),
    _command("ReplicateCommand", "()"),
    _command(
        "UserSyncCommand",
        "(instance_id, user_id, device_id, is_syncing, last_sync_ms)",
    ),
    _command("ClearUserSyncsCommand", "(instance_id)"),
    _command("FederationAckCommand", "(instance_name, token)"),
    _command(
        "UserIpCommand",
        "(user_id, access_token, ip, user_agent, device_id, last_seen)",
    ),
    _command("RemoteServerUpCommand", "(data)"),
    _command("LockReleasedCommand", "(instance_name, lock_name, lock_key)"),
    _command("NewActiveTaskCommand", "(data)"),
    _command("CancelTaskCommand", "(data)"),
    Substitution(
        part="commands",
        module=f"{_TCP}.commands",
        name="parse_command_from_line",
        replacement=f"{_WIRE}:parse_command_from_line",
        shapes=("(line)",),
    ),
)

_PROTOCOL = (
    Substitution(
        part="protocol",
        module=f"{_TCP}.protocol",
        name="ServerReplicationStreamProtocol",
        replacement=f"{_OURS}.protocol:DropInServerProtocol",
        shapes=("(hs, server_name, clock, handler)",),
        methods={"connectionMade": "()", "connectionLost": "(reason)", "close": "()"},
    ),
    Substitution(
        part="protocol",
        module=f"{_TCP}.protocol",
        name="ClientReplicationStreamProtocol",
        replacement=f"{_OURS}.protocol:DropInClientProtocol",
        shapes=("(hs, client_name, server_name, clock, command_handler)",),
        methods={"connectionMade": "()", "connectionLost": "(reason)", "close": "()"},
    ),
)

_HANDLER = (
    Substitution(
        part="handler",
        module=f"{_TCP}.handler",
        name="ReplicationCommandHandler",
        replacement=f"{_OURS}.handler:DropInCommandHandler",
        shapes=("(hs)",),
        methods={
            "start_replication": "(hs)",
            "get_streams": "()",
            "get_streams_to_replicate": "()",
            "connected": "()",
            "new_connection": "(connection)",
            "lost_connection": "(connection)",
            "send_command": "(cmd)",
            "send_federation_ack": "(token)",
            "send_user_sync": (
                "(instance_id, user_id, device_id, is_syncing, last_sync_ms)"
            ),
            "send_user_ip": (
                "(user_id, access_token, ip, user_agent, device_id, last_seen)"
            ),
            "send_remote_server_up": "(server)",
            "send_new_active_task": "(task_id)",
            "stream_update": "(stream_name, token, data)",
            "on_lock_released": "(instance_name, lock_name, lock_key)",
            "subscribe_to_channel": "(channel_name)",
        },
    ),
    Substitution(
        part="handler",
        module=f"{_TCP}.resource",
        name="ReplicationStreamer",
        replacement=f"{_OURS}.resource:DropInStreamer",
        shapes=("(hs)",),
        methods={"on_notifier_poke": "()"},
    ),
    Substitution(
        part="handler",
        module=f"{_TCP}.resource",
        name="ReplicationStreamProtocolFactory",
        replacement=f"{_OURS}.resource:DropInProtocolFactory",
        shapes=("(hs)",),
        methods={"buildProtocol": "(addr)"},
    ),
)

_NOTIFIER = (
    Substitution(
        part="notifier",
        module="synapse.notifier",
        name="ReplicationNotifier",
        replacement=f"{_OURS}.notifier:with_combining",
        shapes=("(replication_callbacks=)",),
        methods={"add_replication_callback": "(cb)", "notify_replication": "()"},
        extends=True,
    ),
)

_REDIS = (
    Substitution(
        part="redis",
        module=f"{_TCP}.redis",
        name="SynapseRedisFactory",
        replacement=f"{_OURS}.redis:DropInRedisFactory",
        shapes=(
            "(hs, uuid, dbid, poolsize, isLazy=, handler=, charset=, username=, "
            "password=, replyTimeout=, convertNumbers=)",
            "(hs, uuid, dbid, poolsize, isLazy=, handler=, charset=, password=, "
            "replyTimeout=, convertNumbers=)",
        ),
    ),
    Substitution(
        part="redis",
        module=f"{_TCP}.redis",
        name="RedisDirectTcpReplicationClientFactory",
        replacement=f"{_OURS}.redis:RedisDirectTcpReplicationClientFactory",
        shapes=("(hs, outbound_redis_connection, channel_names)",),
    ),
    Substitution(
        part="redis",
        module=f"{_TCP}.redis",
        name="lazyConnection",
        replacement=f"{_OURS}.redis:lazyConnection",
        shapes=(
            "(hs, host=, port=, dbid=, reconnect=, username=, password=, "
            "replyTimeout=)",
            "(hs, host=, port=, dbid=, reconnect=, password=, replyTimeout=)",
        ),
    ),
    Substitution(
        part="redis",
        module=f"{_TCP}.redis",
        name="lazyUnixConnection",
        replacement=f"{_OURS}.redis:lazyUnixConnection",
        shapes=(
            "(hs, path=, dbid=, reconnect=, username=, password=, replyTimeout=)",
            "(hs, path=, dbid=, reconnect=, password=, replyTimeout=)",
        ),
    ),
)

_BACKLOG = (
    # The class that a host mounts on listeners with the resource ``replication``.
    Substitution(
        part="backlog",
        module="synapse.replication.http",
        name="ReplicationRestResource",
        replacement=f"{_OURS}.backlogs:with_backlog",
        shapes=("(hs)",),
        methods={"render": "(request)"},
        extends=True,
    ),
)

_EXTERNAL_CACHE = (
    Substitution(
        part="external_cache",
        module=f"{_TCP}.external_cache",
        name="ExternalCache",
        replacement=f"{_OURS}.external_cache:DropInExternalCache",
        shapes=("(hs)",),
        methods={
            "is_enabled": "()",
            "set": "(cache_name, key, value, expiry_ms)",
            "get": "(cache_name, key)",
        },
    ),
)

_IDS = (
    Substitution(
        part="ids",
        module="synapse.storage.util.id_generators",
        name="MultiWriterIdGenerator",
        replacement=f"{_OURS}.id_generators:DropInIdGenerator",
        shapes=(
            "(*, db_conn, db, notifier, stream_name, server_name, instance_name, "
            "tables, sequence_name, writers, positive=)",
        ),
        methods={
            "get_next": "()",
            "get_next_mult": "(n)",
            "get_next_txn": "(txn)",
            "get_next_mult_txn": "(txn, n)",
            "get_current_token": "()",
            "get_current_token_for_writer": "(instance_name)",
            "get_minimal_local_current_token": "()",
            "get_positions": "()",
            "get_persisted_upto_position": "()",
            "get_max_allocated_token": "()",
            "advance": "(instance_name, new_id)",
        },
    ),
)

SUBSTITUTIONS: Final = (
    *_COMMANDS,
    *_PROTOCOL,
    *_HANDLER,
    *_NOTIFIER,
    *_REDIS,
    *_BACKLOG,
    *_EXTERNAL_CACHE,
    *_IDS,
)

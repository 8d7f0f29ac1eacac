"""The names of Synapse that this package replaces, and what differs.

A replacement has every public name of the original, with the same signature. A
:class:`Difference` lists the names that it has not, with the reason why nobody needs
them. ``tests/external/synapse/test_callers.py`` finds every access to a replaced object
in the installed Synapse, and fails if it is to one of these names.

Import this module only after ``synapse``, which chooses the reactor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

from synapse_replication.dropin.backlogs import with_backlog
from synapse_replication.dropin.command_handler import DropInCommandHandler
from synapse_replication.dropin.external_cache import DropInExternalCache
from synapse_replication.dropin.id_generators import DropInIdGenerator
from synapse_replication.dropin.redis_factories import (
    DropInRedisFactory,
    RedisDirectTcpReplicationClientFactory,
    lazyConnection,
    lazyUnixConnection,
)
from synapse_replication.dropin.streamer import DropInStreamer, with_combining
from synapse_replication.dropin.substitution import (
    Difference,
    Part,
    Substitution,
    substitute,
)
from synapse_replication.dropin.tcp_ends import (
    DropInClientProtocol,
    DropInProtocolFactory,
    DropInServerProtocol,
)
from synapse_replication.wire import commands

_REPLICATION: Final = "synapse.replication"
_TCP: Final = f"{_REPLICATION}.tcp"

_COMMANDS: Final = (
    commands.Command,
    commands.ServerCommand,
    commands.RdataCommand,
    commands.PositionCommand,
    commands.ErrorCommand,
    commands.PingCommand,
    commands.NameCommand,
    commands.ReplicateCommand,
    commands.UserSyncCommand,
    commands.ClearUserSyncsCommand,
    commands.FederationAckCommand,
    commands.UserIpCommand,
    commands.RemoteServerUpCommand,
    commands.LockReleasedCommand,
    commands.NewActiveTaskCommand,
    commands.CancelTaskCommand,
)

#: What only the methods of the replaced protocols use: the base class of both ends.
_OF_PROTOCOLS: Final = (
    Difference(
        "MAX_LENGTH delimiter lineLengthExceeded lineReceived sendLine",
        "The base class LineOnlyReceiver is an implementation detail: lines are found "
        "by LineConnection.",
    ),
    Difference(
        "VALID_INBOUND_COMMANDS VALID_OUTBOUND_COMMANDS clock client_name "
        "command_handler conn_id handle_command hs id last_received_command "
        "last_sent_command max_line_buffer on_connection_closed pending_commands "
        "received_ping replicate send_error send_ping state time_we_closed",
        "Only the methods of the replaced class use them.",
    ),
    Difference(
        "on_ERROR on_NAME on_PING on_SERVER",
        "The replaced class calls them for the lines that it receives.",
    ),
)

SUBSTITUTIONS: Final = (
    *(
        Substitution("commands", f"{_TCP}.commands", command.__name__, command)
        for command in _COMMANDS
    ),
    Substitution(
        "commands",
        f"{_TCP}.commands",
        "parse_command_from_line",
        commands.parse_command_from_line,
    ),
    Substitution(
        "protocol",
        f"{_TCP}.protocol",
        "ServerReplicationStreamProtocol",
        DropInServerProtocol,
        differences=_OF_PROTOCOLS,
    ),
    Substitution(
        "protocol",
        f"{_TCP}.protocol",
        "ClientReplicationStreamProtocol",
        DropInClientProtocol,
        differences=_OF_PROTOCOLS,
    ),
    Substitution(
        "handler",
        f"{_TCP}.handler",
        "ReplicationCommandHandler",
        DropInCommandHandler,
    ),
    Substitution(
        "handler",
        f"{_TCP}.resource",
        "ReplicationStreamer",
        DropInStreamer,
        differences=(
            Difference(
                "clock command_handler hs is_looping notifier pending_updates "
                "server_name store streams",
                "The state of the loop of the replaced class, which nothing else uses.",
            ),
        ),
    ),
    Substitution(
        "handler",
        f"{_TCP}.resource",
        "ReplicationStreamProtocolFactory",
        DropInProtocolFactory,
        differences=(
            Difference(
                "clock command_handler hs server_name",
                "Arguments of the protocols, which the factory stores for itself.",
            ),
        ),
    ),
    Substitution(
        "notifier",
        "synapse.notifier",
        "ReplicationNotifier",
        with_combining,
        extends=True,
    ),
    Substitution(
        "redis",
        f"{_TCP}.redis",
        "SynapseRedisFactory",
        DropInRedisFactory,
        differences=(
            Difference(
                "hs server_name", "Used only by the ping of the replaced class."
            ),
        ),
    ),
    Substitution(
        "redis",
        f"{_TCP}.redis",
        "RedisDirectTcpReplicationClientFactory",
        RedisDirectTcpReplicationClientFactory,
        differences=(
            Difference(
                "hs server_name synapse_channel_names synapse_handler "
                "synapse_outbound_redis_connection synapse_stream_prefix",
                "Arguments of the subscriber, which the factory stores for itself.",
            ),
        ),
    ),
    Substitution("redis", f"{_TCP}.redis", "lazyConnection", lazyConnection),
    Substitution("redis", f"{_TCP}.redis", "lazyUnixConnection", lazyUnixConnection),
    Substitution(
        "backlog",
        f"{_REPLICATION}.http",
        "ReplicationRestResource",
        with_backlog,
        extends=True,
    ),
    Substitution(
        "external_cache",
        f"{_TCP}.external_cache",
        "ExternalCache",
        DropInExternalCache,
        differences=(
            Difference(
                "server_name", "A label of metrics, which the class sets itself."
            ),
        ),
    ),
    Substitution(
        "ids",
        "synapse.storage.util.id_generators",
        "MultiWriterIdGenerator",
        DropInIdGenerator,
        differences=(
            Difference(
                "server_name", "A label of metrics, which the class sets itself."
            ),
        ),
    ),
)

_LOGGER: Final = Difference("logger", "The logger of the replaced code.")
_TYPES: Final = Difference(
    "T V SC UpdateRow UpdateToken", "Types in the annotations of the replaced code."
)

#: The modules whose public names are all replaced, and the names that are not.
MODULES: Final[Mapping[str, Collection[Difference]]] = MappingProxyType(
    {
        f"{_TCP}.commands": (
            _LOGGER,
            _TYPES,
            Difference(
                "COMMAND_MAP", "Only parse_command_from_line(), which is replaced."
            ),
            Difference(
                "VALID_CLIENT_COMMANDS VALID_SERVER_COMMANDS",
                "The names of commands, which only the replaced protocols use.",
            ),
        ),
        f"{_TCP}.protocol": (
            _LOGGER,
            Difference(
                "IReplicationConnection",
                "The interface of the host's own and of its tests' connections.",
            ),
            Difference(
                "BaseReplicationStreamProtocol ConnectionStates PING_TIME "
                "PING_TIMEOUT_MS PING_TIMEOUT_MULTIPLIER connected_connections "
                "transport_buffer_size transport_kernel_read_buffer_size",
                "The base of the replaced protocols, and what its methods use.",
            ),
            Difference(
                "connection_close_counter pending_commands "
                "tcp_inbound_commands_counter tcp_outbound_commands_counter "
                "tcp_transport_kernel_read_buffer tcp_transport_kernel_send_buffer "
                "transport_send_buffer",
                "Metrics, which the observer of this package updates in place.",
            ),
        ),
        f"{_TCP}.handler": (
            _LOGGER,
            _TYPES,
            Difference(
                "federation_ack_counter inbound_rdata_count remove_pusher_counter "
                "tcp_command_queue_gauge tcp_resource_total_connections_gauge "
                "user_ip_cache_counter user_sync_counter",
                "Metrics, which the observer of this package updates in place.",
            ),
        ),
        f"{_TCP}.resource": (
            _LOGGER,
            Difference(
                "stream_updates_counter",
                "A metric, which the observer of this package updates in place.",
            ),
        ),
        f"{_TCP}.redis": (
            _LOGGER,
            _TYPES,
            Difference(
                "ConstantProperty RedisSubscriber format_address",
                "Used only by the replaced factories and functions.",
            ),
        ),
        f"{_TCP}.external_cache": (
            _LOGGER,
            Difference(
                "get_counter response_timer set_counter",
                "Metrics, which the observer of this package updates in place.",
            ),
        ),
    }
)


def substitutions_of(parts: Collection[str]) -> tuple[Substitution, ...]:
    """Return the substitutions of some parts, in the order of the table."""
    return tuple(known for known in SUBSTITUTIONS if known.part in parts)


def replace_parts(parts: Collection[Part]) -> None:
    """Compare the installed Synapse with the substitutions of parts, and apply them.

    :raises SubstitutionError: if the installed Synapse differs; nothing is changed.
    """
    substitute(substitutions_of(parts), MODULES)

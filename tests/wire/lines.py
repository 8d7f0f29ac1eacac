"""One line of each form, with the command that it encodes."""

from __future__ import annotations

from synapse_replication.wire.commands import (
    CancelTaskCommand,
    ClearUserSyncsCommand,
    Command,
    ErrorCommand,
    FederationAckCommand,
    InvalidateCacheCommand,
    LockReleasedCommand,
    NameCommand,
    NewActiveTaskCommand,
    PingCommand,
    PositionCommand,
    RdataCommand,
    RemoteServerUpCommand,
    RemovePusherCommand,
    ReplicateCommand,
    ServerCommand,
    UserIpCommand,
    UserSyncCommand,
)

#: One line of each form that a real deployment sends or the protocol defines, with the
#: command that it encodes.
LINES: dict[str, Command] = {
    "SERVER repl.test": ServerCommand("repl.test"),
    "NAME worker1": NameCommand("worker1"),
    "REPLICATE ": ReplicateCommand(),
    "POSITION typing stream_writer1 0 0": PositionCommand(
        "typing", "stream_writer1", 0, 0
    ),
    "POSITION events event_persister1 1847 1848": PositionCommand(
        "events", "event_persister1", 1847, 1848
    ),
    'RDATA caches master 4 ["get_user_by_id",["@a1:repl.test"],1795207344959]': (
        RdataCommand(
            "caches", "master", 4, ["get_user_by_id", ["@a1:repl.test"], 1795207344959]
        )
    ),
    'RDATA caches master 5742 ["user_last_seen_monthly_active",null,1]': RdataCommand(
        "caches", "master", 5742, ["user_last_seen_monthly_active", None, 1]
    ),
    'RDATA to_device stream_writer1 batch ["@a:repl.test"]': RdataCommand(
        "to_device", "stream_writer1", None, ["@a:repl.test"]
    ),
    "RDATA backfill event_persister1 -7 []": RdataCommand(
        "backfill", "event_persister1", -7, []
    ),
    "PING 1795207344959": PingCommand("1795207344959"),
    "ERROR Failed to keep up": ErrorCommand("Failed to keep up"),
    "USER_SYNC ssIOK @a1:repl.test DEV0 start 1795207379498": UserSyncCommand(
        "ssIOK", "@a1:repl.test", "DEV0", True, 1795207379498
    ),
    "USER_SYNC ssIOK @a1:repl.test None end 5": UserSyncCommand(
        "ssIOK", "@a1:repl.test", None, False, 5
    ),
    "CLEAR_USER_SYNC ssIOK": ClearUserSyncsCommand("ssIOK"),
    "FEDERATION_ACK sync_worker1 0": FederationAckCommand("sync_worker1", 0),
    "FEDERATION_ACK 12": FederationAckCommand(None, 12),
    'USER_IP @a0:repl.test ["syt_secret","10.1.0.1","drive/1.0 (x; y)","DEV0",17]': (
        UserIpCommand(
            "@a0:repl.test", "syt_secret", "10.1.0.1", "drive/1.0 (x; y)", "DEV0", 17
        )
    ),
    'USER_IP @a0:repl.test ["syt_secret","10.1.0.1","",null,17]': UserIpCommand(
        "@a0:repl.test", "syt_secret", "10.1.0.1", "", None, 17
    ),
    "REMOTE_SERVER_UP remote.test": RemoteServerUpCommand("remote.test"),
    'LOCK_RELEASED ["master","one_time_key_upload_lock","@s1:repl.test_DEV0"]': (
        LockReleasedCommand("master", "one_time_key_upload_lock", "@s1:repl.test_DEV0")
    ),
    "NEW_ACTIVE_TASK uoJkBImDpsLsFRJZ": NewActiveTaskCommand("uoJkBImDpsLsFRJZ"),
    "CANCEL_TASK qTIeZOCZncJGvyNc": CancelTaskCommand("qTIeZOCZncJGvyNc"),
    "REMOVE_PUSHER m.http a push key @a:repl.test": RemovePusherCommand(
        "m.http", "a push key", "@a:repl.test"
    ),
    'INVALIDATE_CACHE get_user ["@a:repl.test",1]': InvalidateCacheCommand(
        "get_user", ["@a:repl.test", 1]
    ),
    "INVALIDATE_CACHE get_user null": InvalidateCacheCommand("get_user", None),
}

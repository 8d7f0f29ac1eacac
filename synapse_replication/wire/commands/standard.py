"""The commands of the protocol, and their lines.

A line is a command's name, a space, and the rest, which each class reads in
:meth:`Command.from_line` and writes in :meth:`Command.to_line`; the two are
inverse. Names of classes and fields are those that the field knows.

What a line cannot tell apart:

* in USER_SYNC the device id stands between two fields that have no spaces, so
  it may have spaces itself; a user id may not. A device id of ``None`` (the
  text) reads as no device id at all.
* the older USER_SYNC without a device id and the newer one are told apart by the
  number of words; both write the newer form.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar, Final

import attrs
import msgspec
from typing_extensions import override

from synapse_replication.errors import UnknownCommandError
from synapse_replication.streams.rows import decode_json, encode_json
from synapse_replication.wire.commands.base import (
    Command,
    decode_fields,
    encode_text,
    parse_token,
)
from synapse_replication.wire.commands.legacy import (
    InvalidateCacheCommand,
    RemovePusherCommand,
)

__all__ = [
    "COMMANDS",
    "VALID_CLIENT_COMMANDS",
    "VALID_SERVER_COMMANDS",
    "CancelTaskCommand",
    "ClearUserSyncsCommand",
    "Command",
    "ErrorCommand",
    "FederationAckCommand",
    "InvalidateCacheCommand",
    "LockReleasedCommand",
    "NameCommand",
    "NewActiveTaskCommand",
    "PingCommand",
    "PositionCommand",
    "RdataCommand",
    "RemoteServerUpCommand",
    "RemovePusherCommand",
    "ReplicateCommand",
    "ServerCommand",
    "UserIpCommand",
    "UserSyncCommand",
    "encode_command",
    "parse_command_from_line",
    "parse_token",
]

#: What stands in the place of the token in all but the last row of a batch.
BATCH: Final = "batch"
#: Fewer digits than the greatest 64-bit integer has: no need to compare.
_SAFE_DIGITS: Final = 18


@attrs.frozen
class _TextCommand(Command):
    """A command that is one text to the end of the line."""

    data: str

    @classmethod
    def from_line(cls, line: str) -> _TextCommand:
        return cls(line)

    def to_line(self) -> str:
        return self.data


class _WordCommand(_TextCommand):
    """A command that is one word."""

    __slots__ = ()

    @classmethod
    def from_line(cls, line: str) -> _WordCommand:
        return cls(cls._name(line))


class ServerCommand(_WordCommand):
    """The server's name: the first line of a TCP connection.

    :ivar data: the homeserver's name.
    """

    __slots__ = ()
    NAME = "SERVER"


class NameCommand(_TextCommand):
    """A name for the connection, for people.

    :ivar data: the name.
    """

    __slots__ = ()
    NAME = "NAME"


class PingCommand(_TextCommand):
    """Keep-alive.

    :ivar data: anything; usually ms since the epoch.
    """

    __slots__ = ()
    NAME = "PING"


class ErrorCommand(_TextCommand):
    """What the peer did wrong; the sender closes next.

    :ivar data: a text for people.
    """

    __slots__ = ()
    NAME = "ERROR"


class RemoteServerUpCommand(_WordCommand):
    """A remote homeserver can be reached again.

    :ivar data: its name.
    """

    __slots__ = ()
    NAME = "REMOTE_SERVER_UP"


class NewActiveTaskCommand(_WordCommand):
    """A scheduled task may be run now.

    :ivar data: its id.
    """

    __slots__ = ()
    NAME = "NEW_ACTIVE_TASK"


class CancelTaskCommand(_WordCommand):
    """A scheduled task is to be stopped.

    :ivar data: its id.
    """

    __slots__ = ()
    NAME = "CANCEL_TASK"


@attrs.frozen
class ReplicateCommand(Command):
    """Every instance is asked for the positions of the streams that it writes."""

    NAME: ClassVar[str] = "REPLICATE"

    @classmethod
    def from_line(cls, line: str) -> ReplicateCommand:
        """Read the line; older peers put arguments there, which mean nothing now."""
        return cls()

    @override
    def to_line(self) -> str:
        return ""


@attrs.frozen
class PositionCommand(Command):
    """A writer moved on and wrote nothing in ``(prev_token, new_token]``.

    :ivar instance_name: the writer, not the peer that relayed the line.
    :ivar prev_token: the last token that this writer announced.
    :ivar new_token: where it is now. Equal in a first announcement.
    """

    NAME: ClassVar[str] = "POSITION"
    stream_name: str
    instance_name: str
    prev_token: int
    new_token: int

    @classmethod
    @override
    def from_line(cls, line: str) -> PositionCommand:
        stream_name, instance_name, prev_token, new_token = cls._words(line, 4)
        return cls(
            cls._name(stream_name),
            cls._name(instance_name),
            cls._integer(prev_token),
            cls._integer(new_token),
        )

    @override
    def to_line(self) -> str:
        return (
            f"{self.stream_name} {self.instance_name} "
            f"{self.prev_token} {self.new_token}"
        )


# Not frozen: a frozen class takes as long to set its fields as the row to decode, and
# this is the command that comes by the million.
@attrs.define
class RdataCommand(Command):
    """One row of a stream.

    Many rows at a time go through :mod:`synapse_replication.wire.rdata`.

    :ivar instance_name: the writer.
    :ivar token: ``None`` if more rows of the same token follow.
    :ivar row: a JSON value, usually a list.
    """

    NAME: ClassVar[str] = "RDATA"
    stream_name: str
    instance_name: str
    token: int | None
    row: Any

    @classmethod
    @override
    def from_line(cls, line: str) -> RdataCommand:
        stream_name, instance_name, token, text = cls._words(line, 4)
        try:
            row = decode_json(text)
        except ValueError as error:
            cls._refuse(error)
        return cls(
            cls._name(stream_name),
            cls._name(instance_name),
            None if token == BATCH else cls._integer(token),
            row,
        )

    @override
    def to_line(self) -> str:
        token = BATCH if self.token is None else self.token
        return f"{self.stream_name} {self.instance_name} {token} {self._json(self.row)}"

    @override
    def encode(self) -> bytes:
        head = _rdata_head(self.stream_name, self.instance_name)
        try:
            text = encode_json(self.row)
        except ValueError as error:
            self._refuse_to_send(error)
        if self.token is None:
            return b"%bbatch %b" % (head, text)
        return b"%b%d %b" % (head, self.token, text)


@lru_cache(maxsize=1024)
def _rdata_head(stream_name: str, instance_name: str) -> bytes:
    """Write what the rows of a writer begin with. JSON text cannot end a line."""
    return encode_text(RdataCommand.NAME, f"RDATA {stream_name} {instance_name} ")


@attrs.frozen
class UserSyncCommand(Command):
    """A user began or ended to sync with a process.

    :ivar instance_id: the process, by the random id of its start.
    :ivar user_id: has no spaces.
    :ivar device_id: may have spaces. ``None`` if not known.
    :ivar last_sync_ms: when the user was last seen there, ms since the epoch.
    """

    NAME: ClassVar[str] = "USER_SYNC"
    instance_id: str
    user_id: str
    device_id: str | None
    is_syncing: bool
    last_sync_ms: int

    @classmethod
    @override
    def from_line(cls, line: str) -> UserSyncCommand:
        # From both ends: a device id may have spaces.
        ends = line.rsplit(" ", 2)
        if len(ends) != 3:
            cls._refuse("it has fewer than 4 fields")
        front, state, last_sync_ms = ends
        if state not in ("start", "end"):
            cls._refuse("the last field but one is neither start nor end")
        who = front.split(" ", 2)
        if len(who) < 2 or "" in who[:2]:
            cls._refuse("it has fewer than 4 fields")
        device_id = who[2] if len(who) == 3 else "None"
        return cls(
            cls._id(who[0]),
            cls._id(who[1]),
            None if device_id == "None" else cls._id(device_id),
            state == "start",
            cls._integer(last_sync_ms),
        )

    @override
    def to_line(self) -> str:
        device_id = "None" if self.device_id is None else self.device_id
        state = "start" if self.is_syncing else "end"
        return (
            f"{self.instance_id} {self.user_id} {device_id} {state} {self.last_sync_ms}"
        )


@attrs.frozen
class ClearUserSyncsCommand(Command):
    """A process tells that nobody syncs with it any more.

    :ivar instance_id: the process, by the random id of its start.
    """

    NAME: ClassVar[str] = "CLEAR_USER_SYNC"
    instance_id: str

    @classmethod
    @override
    def from_line(cls, line: str) -> ClearUserSyncsCommand:
        return cls(cls._id(cls._word(line)))

    @override
    def to_line(self) -> str:
        return self.instance_id


@attrs.frozen
class FederationAckCommand(Command):
    """A federation sender has handled the ``federation`` stream up to a token.

    :ivar instance_name: the sender; ``None`` in the older form.
    """

    NAME: ClassVar[str] = "FEDERATION_ACK"
    instance_name: str | None
    token: int

    @classmethod
    @override
    def from_line(cls, line: str) -> FederationAckCommand:
        instance_name, space, token = line.rpartition(" ")
        return cls(cls._name(instance_name) if space else None, cls._integer(token))

    @override
    def to_line(self) -> str:
        if self.instance_name is None:
            return str(self.token)
        return f"{self.instance_name} {self.token}"


@attrs.frozen
class UserIpCommand(Command):
    """A request of a user came in. Published on a Redis channel of its own.

    :ivar user_id: has no spaces.
    :ivar access_token: secret, so it is left out of the ``repr``.
    :ivar last_seen: ms since the epoch.
    """

    NAME: ClassVar[str] = "USER_IP"
    user_id: str
    access_token: str = attrs.field(repr=lambda _: "<secret>")
    ip: str
    user_agent: str
    device_id: str | None
    last_seen: int

    @classmethod
    @override
    def from_line(cls, line: str) -> UserIpCommand:
        user_id, text = cls._words(line, 2)
        return cls(user_id, *decode_fields(cls, _USER_IP_FIELDS, text))

    @override
    def to_line(self) -> str:
        fields = (
            self.access_token,
            self.ip,
            self.user_agent,
            self.device_id,
            self.last_seen,
        )
        return f"{self.user_id} {self._json(fields)}"

    @classmethod
    @override
    def redis_channel_name(cls, prefix: str) -> str:
        return f"{prefix}/USER_IP"


@attrs.frozen
class LockReleasedCommand(Command):
    """A lock was given back, so that those who wait for it may try.

    :ivar instance_name: the process that held it.
    """

    NAME: ClassVar[str] = "LOCK_RELEASED"
    instance_name: str
    lock_name: str
    lock_key: str

    @classmethod
    @override
    def from_line(cls, line: str) -> LockReleasedCommand:
        instance_name, *lock = decode_fields(cls, _LOCK_FIELDS, line)
        return cls(cls._name(instance_name), *map(cls._id, lock))

    @override
    def to_line(self) -> str:
        return self._json((self.instance_name, self.lock_name, self.lock_key))


_USER_IP_FIELDS = msgspec.json.Decoder(tuple[str, str, str, str | None, int])
_LOCK_FIELDS = msgspec.json.Decoder(tuple[str, str, str])


_CLASSES: tuple[type[Command], ...] = (
    ServerCommand,
    NameCommand,
    ReplicateCommand,
    PositionCommand,
    RdataCommand,
    PingCommand,
    ErrorCommand,
    UserSyncCommand,
    ClearUserSyncsCommand,
    FederationAckCommand,
    UserIpCommand,
    RemoteServerUpCommand,
    LockReleasedCommand,
    NewActiveTaskCommand,
    CancelTaskCommand,
    RemovePusherCommand,
    InvalidateCacheCommand,
)

#: Every command, by name.
COMMANDS: Final[dict[str, type[Command]]] = {cls.NAME: cls for cls in _CLASSES}

_FROM_BOTH = frozenset(
    {
        "POSITION",
        "RDATA",
        "PING",
        "ERROR",
        "REMOTE_SERVER_UP",
        "LOCK_RELEASED",
        "NEW_ACTIVE_TASK",
        "CANCEL_TASK",
    }
)

#: The names of what a server may send to a client.
VALID_SERVER_COMMANDS: Final = _FROM_BOTH | {"SERVER"}

#: The names of what a client may send to a server: all, but the server's own.
VALID_CLIENT_COMMANDS: Final = frozenset(COMMANDS) - {"SERVER"}


def parse_command_from_line(line: str) -> Command:
    """Read a line.

    :param line: without its end.
    :raises UnknownCommandError: if its first word is no command that we know.
    :raises UnparsableLineError: if it is not of its command's form.
    """
    words = line.split(" ", 4)
    if len(words) == 5 and words[0] == "RDATA":
        # The usual one, without a detour. What is unusual or wrong is found below.
        # Names are checked once a chunk by read_lines(), which reads received rows.
        _, stream_name, instance_name, token, text = words
        if (
            stream_name
            and instance_name
            and len(token) <= _SAFE_DIGITS
            and token.isdigit()
            and token.isascii()
        ):
            try:
                return RdataCommand(
                    stream_name, instance_name, int(token), decode_json(text)
                )
            except ValueError:
                pass
    name, _, rest = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise UnknownCommandError(name)
    return command.from_line(rest)


def encode_command(command: Command) -> bytes:
    """Write a line, without its end; see :meth:`Command.encode`."""
    return command.encode()

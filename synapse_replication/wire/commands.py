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

Spec, section 2.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Final, NoReturn

import attrs
import msgspec

from synapse_replication.errors import (
    LocalProtocolError,
    UnknownCommandError,
    UnparsableLineError,
)
from synapse_replication.streams.rows import decode_json, encode_json

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
_INT64_DIGITS: Final = 19
_INT64_MAX: Final = 2**63 - 1
_INT64_MIN: Final = -(2**63)


def parse_token(text: str) -> int:
    """Read a token: ``-?[0-9]+`` in ASCII, within a signed 64-bit integer.

    :raises ValueError: it is none. The message does not repeat the text.
    """
    digits = text[1:] if text[:1] == "-" else text
    # isdigit() alone takes the digits of other scripts. The length is checked
    # before int(), whose work grows with the square of it.
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError("a token is a decimal number")
    if (
        len(digits) > _INT64_DIGITS
        or not _INT64_MIN <= (token := int(text)) <= _INT64_MAX
    ):
        raise ValueError("a token fits 64 bits")
    return token


class Command(abc.ABC):
    """What one line says."""

    __slots__ = ()

    #: The first word of the line.
    NAME: ClassVar[str]

    @classmethod
    @abc.abstractmethod
    def from_line(cls, line: str) -> Command:
        """Read what follows the name and the space.

        :raises UnparsableLineError: it is not of this command's form.
        """

    @abc.abstractmethod
    def to_line(self) -> str:
        """Write what follows the name and the space.

        :raises LocalProtocolError: a field holds what a line cannot say.
        """

    @classmethod
    def redis_channel_name(cls, prefix: str) -> str:
        """Name the Redis channel that the command is published on.

        :param prefix: the homeserver's name.
        """
        return prefix

    def get_logcontext_id(self) -> str:
        """Name what handling the command is about, for a host's log context."""
        return self.NAME

    @classmethod
    def _refuse(cls, reason: object) -> NoReturn:
        raise UnparsableLineError(cls.NAME, str(reason)) from None

    @classmethod
    def _words(cls, line: str, count: int) -> list[str]:
        """Split into ``count`` words, of which the last takes what is left."""
        words = line.split(" ", count - 1)
        if len(words) != count:
            cls._refuse(f"it has {len(words)} fields, not {count}")
        if "" in words:
            cls._refuse("a field is empty")
        return words

    @classmethod
    def _word(cls, text: str) -> str:
        """Take what must be one word: an id or a server's name."""
        if not text or " " in text:
            cls._refuse("it is not one word")
        return text

    @classmethod
    def _integer(cls, text: str) -> int:
        try:
            return parse_token(text)
        except ValueError as error:
            cls._refuse(error)

    @classmethod
    def _json(cls, value: Any) -> str:
        try:
            return encode_json(value).decode()
        except ValueError as error:
            raise LocalProtocolError(f"{cls.NAME} cannot be sent: {error}") from None


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
        return cls(cls._word(line))


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
    def from_line(cls, line: str) -> PositionCommand:
        stream_name, instance_name, prev_token, new_token = cls._words(line, 4)
        return cls(
            stream_name,
            instance_name,
            cls._integer(prev_token),
            cls._integer(new_token),
        )

    def to_line(self) -> str:
        return (
            f"{self.stream_name} {self.instance_name} "
            f"{self.prev_token} {self.new_token}"
        )


@attrs.frozen
class RdataCommand(Command):
    """One row of a stream.

    Many rows at a time go through :mod:`synapse_replication.wire.batching`.

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
    def from_line(cls, line: str) -> RdataCommand:
        stream_name, instance_name, token, text = cls._words(line, 4)
        try:
            row = decode_json(text)
        except ValueError as error:
            cls._refuse(error)
        return cls(
            stream_name,
            instance_name,
            None if token == BATCH else cls._integer(token),
            row,
        )

    def to_line(self) -> str:
        token = BATCH if self.token is None else self.token
        return f"{self.stream_name} {self.instance_name} {token} {self._json(self.row)}"


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
            who[0],
            who[1],
            None if device_id == "None" else device_id,
            state == "start",
            cls._integer(last_sync_ms),
        )

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
    def from_line(cls, line: str) -> ClearUserSyncsCommand:
        return cls(cls._word(line))

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
    def from_line(cls, line: str) -> FederationAckCommand:
        instance_name, space, token = line.rpartition(" ")
        return cls(cls._word(instance_name) if space else None, cls._integer(token))

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
    def from_line(cls, line: str) -> UserIpCommand:
        user_id, text = cls._words(line, 2)
        return cls(user_id, *_decode_fields(cls, _USER_IP_FIELDS, text))

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
    def from_line(cls, line: str) -> LockReleasedCommand:
        return cls(*_decode_fields(cls, _LOCK_FIELDS, line))

    def to_line(self) -> str:
        return self._json((self.instance_name, self.lock_name, self.lock_key))


@attrs.frozen
class RemovePusherCommand(Command):
    """A pusher is to be removed. Sent by older peers only.

    :ivar app_id: has no spaces.
    :ivar push_key: may have spaces.
    :ivar user_id: has no spaces.
    """

    NAME: ClassVar[str] = "REMOVE_PUSHER"
    app_id: str
    push_key: str
    user_id: str

    @classmethod
    def from_line(cls, line: str) -> RemovePusherCommand:
        app_id, rest = cls._words(line, 2)
        push_key, space, user_id = rest.rpartition(" ")
        if not space:
            cls._refuse("it has 2 fields, not 3")
        return cls(app_id, push_key, user_id)

    def to_line(self) -> str:
        return f"{self.app_id} {self.push_key} {self.user_id}"


@attrs.frozen
class InvalidateCacheCommand(Command):
    """An entry of a cache is stale. Sent by older peers only.

    :ivar keys: JSON values; ``None`` for the whole cache.
    """

    NAME: ClassVar[str] = "INVALIDATE_CACHE"
    cache_func: str
    keys: list[Any] | None

    @classmethod
    def from_line(cls, line: str) -> InvalidateCacheCommand:
        cache_func, text = cls._words(line, 2)
        return cls(cache_func, _decode_fields(cls, _CACHE_KEYS, text))

    def to_line(self) -> str:
        return f"{self.cache_func} {self._json(self.keys)}"


_USER_IP_FIELDS = msgspec.json.Decoder(tuple[str, str, str, str | None, int])
_LOCK_FIELDS = msgspec.json.Decoder(tuple[str, str, str])
_CACHE_KEYS = msgspec.json.Decoder(list[Any] | None)


def _decode_fields(
    command: type[Command], decoder: msgspec.json.Decoder[Any], text: str
) -> Any:
    # The fields may be secret: a decoder's message names places, never values.
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise UnparsableLineError(command.NAME, str(error)) from None


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
    :raises UnknownCommandError: its first word is no command that we know.
    :raises UnparsableLineError: it is not of its command's form.
    """
    name, _, rest = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise UnknownCommandError(name)
    return command.from_line(rest)


def encode_command(command: Command) -> bytes:
    """Write a line, without its end.

    :raises LocalProtocolError: a field holds what a line cannot say, for
        instance a line's end.
    """
    line = f"{command.NAME} {command.to_line()}"
    if "\n" in line:
        raise LocalProtocolError(
            f"{command.NAME} cannot be sent: a field holds the end of a line"
        )
    try:
        return line.encode()
    except UnicodeEncodeError:
        raise LocalProtocolError(
            f"{command.NAME} cannot be sent: a field is not Unicode text"
        ) from None

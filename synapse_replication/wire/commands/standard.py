"""The commands of the protocol, and their lines.

A line consists of a command's name, a space, and the command's fields, which each class
parses in :meth:`Command.from_line` and encodes in :meth:`Command.to_line`.
Classes and fields have the names that Synapse uses.
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
from synapse_replication.wire.commands.users import (
    ClearUserSyncsCommand,
    UserIpCommand,
    UserSyncCommand,
)

#: The word that replaces the token in all but the last row of a batch.
BATCH: Final = "batch"
#: The writer of every stream before lines named their writers: the main process.
OLDER_WRITER: Final = "master"
#: Tokens of at most this many digits need no range check: the largest 64-bit integer
#: has one more.
_SAFE_DIGITS: Final = 18


@attrs.frozen
class _TextCommand(Command):
    """A command with one field, the remainder of the line."""

    data: str

    @classmethod
    def from_line(cls, line: str) -> _TextCommand:
        return cls(line)

    def to_line(self) -> str:
        return self.data


class _WordCommand(_TextCommand):
    """A command with one field without spaces."""

    __slots__ = ()

    @classmethod
    def from_line(cls, line: str) -> _WordCommand:
        return cls(cls._name(line))


class ServerCommand(_WordCommand):
    """The homeserver's name: the first line that the server's end of a TCP link sends.

    :ivar data: the homeserver's name.
    """

    __slots__ = ()
    NAME = "SERVER"


class NameCommand(_TextCommand):
    """The client's name, a label for the connection; the server requires it.

    :ivar data: the name of the client's instance, or another label.
    """

    __slots__ = ()
    NAME = "NAME"


class PingCommand(_TextCommand):
    """Keep-alive.

    :ivar data: arbitrary; usually the time in ms since 1970. An instance that speaks
        the extension may append :data:`~synapse_replication.wire.extension.PING_MARK`.
    """

    __slots__ = ()
    NAME = "PING"


class ErrorCommand(_TextCommand):
    """Report of an error, such as a violation of the protocol or a timeout.

    The sender then closes the connection.

    :ivar data: a text for display.
    """

    __slots__ = ()
    NAME = "ERROR"


class RemoteServerUpCommand(_WordCommand):
    """Notice that a remote homeserver can be reached again.

    :ivar data: the remote homeserver's name.
    """

    __slots__ = ()
    NAME = "REMOTE_SERVER_UP"


class NewActiveTaskCommand(_WordCommand):
    """Request to run a scheduled task.

    :ivar data: the task's id.
    """

    __slots__ = ()
    NAME = "NEW_ACTIVE_TASK"


class CancelTaskCommand(_WordCommand):
    """Request to stop a scheduled task.

    :ivar data: the task's id.
    """

    __slots__ = ()
    NAME = "CANCEL_TASK"


@attrs.frozen
class ReplicateCommand(Command):
    """Request for the positions of the streams that the receiving instance writes.

    Over Redis, every instance receives it; over direct TCP, only the server.
    """

    NAME: ClassVar[str] = "REPLICATE"

    @classmethod
    def from_line(cls, line: str) -> ReplicateCommand:
        """Ignore any fields: older peers send obsolete arguments."""
        return cls()

    @override
    def to_line(self) -> str:
        return ""


@attrs.frozen
class PositionCommand(Command):
    """Notice that a writer advanced without rows in ``(prev_token, new_token]``.

    Older peers omit the previous token, or also the writer.

    :ivar instance_name: the writer, not the peer that relayed the line.
    :ivar prev_token: the token above which the writer has no rows up to ``new_token``;
        in an answer to REPLICATE, ``new_token`` itself.
    :ivar new_token: the writer's current token.
    """

    NAME: ClassVar[str] = "POSITION"
    stream_name: str
    instance_name: str
    prev_token: int
    new_token: int

    @classmethod
    @override
    def from_line(cls, line: str) -> PositionCommand:
        words = line.split(" ")
        if not 2 <= len(words) <= 4:
            cls._raise_unparsable(f"it has {len(words)} fields, not 4")
        instance_name = words[1] if len(words) > 2 else OLDER_WRITER
        return cls(
            cls._name(words[0]),
            cls._name(instance_name),
            cls._integer(words[-2] if len(words) == 4 else words[-1]),
            cls._integer(words[-1]),
        )

    @override
    def to_line(self) -> str:
        return (
            f"{self.stream_name} {self.instance_name} "
            f"{self.prev_token} {self.new_token}"
        )


# Not frozen: setting the fields of a frozen class takes as long as decoding the row,
# and this is by far the most frequent command.
@attrs.define
class RdataCommand(Command):
    """One row of a stream.

    Received rows are parsed in bulk by :mod:`synapse_replication.wire.rdata` instead.

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
        stream_name, instance_name, token, text = older_row(line) or cls._words(line, 4)
        try:
            row = decode_json(text)
        except ValueError as error:
            cls._raise_unparsable(error)
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
            self._raise_unsendable(error)
        if self.token is None:
            return b"%bbatch %b" % (head, text)
        return b"%b%d %b" % (head, self.token, text)


def older_row(line: str) -> tuple[str, str, str, str] | None:
    """Return the four fields of an RDATA line without the writer, as older peers send.

    :param line: the part of the line after the command's name.
    :return: ``None`` if the line has another form.
    """
    words = line.split(" ", 3)
    if len(words) < 3 or not _is_token(words[1]):
        return None
    if len(words) == 4 and _is_token(words[2]):
        return None  # The writer has such a name.
    stream_name, token, text = line.split(" ", 2)
    return stream_name, OLDER_WRITER, token, text


def _is_token(text: str) -> bool:
    if text == BATCH:
        return True
    try:
        parse_token(text)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=1024)
def _rdata_head(stream_name: str, instance_name: str) -> bytes:
    """Return the start that the lines of a stream's writer have in common."""
    return encode_text(RdataCommand.NAME, f"RDATA {stream_name} {instance_name} ")


@attrs.frozen
class FederationAckCommand(Command):
    """A federation sender's acknowledgement of rows of the ``federation`` stream.

    :ivar instance_name: the federation sender; ``None`` in the older form.
    :ivar token: the token up to which it has handled all rows.
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
class LockReleasedCommand(Command):
    """Notice that a lock was released: instances waiting for it may try to acquire it.

    :ivar instance_name: the instance that held it.
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

#: The names of the commands that a server may send to a client.
VALID_SERVER_COMMANDS: Final = _FROM_BOTH | {"SERVER"}

#: The names of the commands that a client may send to a server: all but SERVER.
VALID_CLIENT_COMMANDS: Final = frozenset(COMMANDS) - {"SERVER"}


def parse_command_from_line(line: str) -> Command:
    """Parse a line.

    :param line: without its end.
    :raises UnknownCommandError: if its first word is not a known command.
    :raises UnparsableLineError: if its fields are not valid for the command.
    """
    words = line.split(" ", 4)
    if len(words) == 5 and words[0] == "RDATA":
        # The fast path; other forms of RDATA and invalid lines are handled below. Names
        # are not checked here: received rows are parsed by read_lines(), which checks
        # them.
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
    """Return a command's line, without its end; see :meth:`Command.encode`."""
    return command.encode()

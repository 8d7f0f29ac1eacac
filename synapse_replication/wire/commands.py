"""The commands of the protocol, and their lines.

A line consists of a command's name, a space, and the command's fields, which each class
parses in :meth:`Command.from_line` and encodes in :meth:`Command.to_line`.
Classes and fields have the names that Synapse uses.

Notes on the format of USER_SYNC:

* Only the device id may contain spaces, so the line is split from both ends. The text
  ``None`` as a device id means that there is no device id.
* Older peers send a form without a device id, which is also parsed. Only the form with
  a device id is sent.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar, Final, NoReturn

import msgspec
from msgspec import Struct
from msgspec.structs import astuple
from typing_extensions import override

from synapse_replication.errors import (
    LocalProtocolError,
    UnknownCommandError,
    UnparsableLineError,
)
from synapse_replication.streams.rows import decode_json, encode_json
from synapse_replication.streams.tokens import MAX_TOKEN, MIN_TOKEN

#: The longest name of a stream, an instance, a server or a task, in bytes.
MAX_NAME_LENGTH: Final = 255
#: The longest id that users may influence (user, device, lock key), in bytes.
MAX_ID_LENGTH: Final = 4096

_INT64_DIGITS: Final = 19


def parse_token(text: str) -> int:
    """Parse a token: ``-?[0-9]+`` in ASCII, in the range of a signed 64-bit integer.

    :raises ValueError: if the text is not a token. The message does not quote it.
    """
    digits = text[1:] if text[:1] == "-" else text
    # isdigit() alone accepts the digits of other scripts. The length is checked before
    # int() is called, because int() takes quadratic time.
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError("the token is not a decimal number")
    if (
        len(digits) > _INT64_DIGITS
        or not MIN_TOKEN <= (token := int(text)) <= MAX_TOKEN
    ):
        raise ValueError("the token does not fit in 64 bits")
    return token


def parse_name(name: str) -> str:
    """Return the name if it is safe to store, display and log.

    :raises ValueError: if it is empty, too long or not printable. The message does
        not quote it.
    """
    if not name:
        raise ValueError("a field is empty")
    if len(name.encode("utf-8", "replace")) > MAX_NAME_LENGTH:
        raise ValueError(f"a name has more than {MAX_NAME_LENGTH} bytes")
    if not name.isprintable():
        raise ValueError("a name is not printable")
    return name


class Command(Struct, frozen=True):
    """A command: the parsed form of one line."""

    #: The first word of the line.
    NAME: ClassVar[str]

    @classmethod
    def from_line(cls, line: str) -> Command:
        """Parse the part of a line after the command's name and the space.

        :raises UnparsableLineError: if the line is not valid for this command.
        """
        raise NotImplementedError

    def to_line(self) -> str:
        """Return the part of the line after the command's name and the space.

        By default, these are the fields, separated by spaces.

        :raises LocalProtocolError: if a field cannot be encoded as JSON.
        """
        return " ".join(map(str, astuple(self)))

    def encode(self) -> bytes:
        """Return the whole line, without its end.

        :raises LocalProtocolError: if a field cannot be represented in a line, for
            instance because it contains a newline.
        """
        return encode_text(self.NAME, f"{self.NAME} {self.to_line()}")

    @classmethod
    def redis_channel_name(cls, prefix: str) -> str:
        """Return the Redis channel on which the command is published.

        :param prefix: the homeserver's name.
        """
        return prefix

    def get_logcontext_id(self) -> str:
        """Return a label for the host's log context while the command is handled."""
        return self.NAME

    @classmethod
    def _raise_unparsable(cls, reason: object) -> NoReturn:
        raise UnparsableLineError(cls.NAME, str(reason)) from None

    @classmethod
    def _words(cls, line: str, count: int) -> list[str]:
        """Split a line into ``count`` words; the last one is the rest of the line."""
        words = line.split(" ", count - 1)
        if len(words) != count:
            cls._raise_unparsable(f"it has {len(words)} fields, not {count}")
        if "" in words:
            cls._raise_unparsable("a field is empty")
        return words

    @classmethod
    def _word(cls, text: str) -> str:
        """Return the text if it is one word, such as an id or a server name."""
        if not text or " " in text:
            cls._raise_unparsable("it is not one word")
        return text

    @classmethod
    def _name(cls, text: str) -> str:
        """Return the text if it is a valid name of one word."""
        try:
            return parse_name(cls._word(text))
        except ValueError as error:
            cls._raise_unparsable(error)

    @classmethod
    def _id(cls, text: str) -> str:
        """Return an id that users may influence: only its length is checked."""
        if len(text.encode("utf-8", "replace")) > MAX_ID_LENGTH:
            cls._raise_unparsable(f"an id has more than {MAX_ID_LENGTH} bytes")
        return text

    @classmethod
    def _integer(cls, text: str) -> int:
        try:
            return parse_token(text)
        except ValueError as error:
            cls._raise_unparsable(error)

    @classmethod
    def _decode(cls, decoder: msgspec.json.Decoder[Any], text: str) -> Any:
        # The fields may be secret; the decoder's message contains paths but no values.
        try:
            return decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            cls._raise_unparsable(error)

    @classmethod
    def _json(cls, value: Any) -> bytes:
        try:
            return encode_json(value)
        except ValueError as error:
            raise LocalProtocolError(f"{cls.NAME} cannot be sent: {error}") from None


def encode_text(name: str, text: str) -> bytes:
    """Encode the text of one line.

    :param name: the command's name, for the error.
    :raises LocalProtocolError: if the text contains a newline or cannot be encoded
        as UTF-8.
    """
    if "\n" in text:
        raise LocalProtocolError(f"{name} cannot be sent: a field contains a newline")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise LocalProtocolError(
            f"{name} cannot be sent: a field cannot be encoded as UTF-8"
        ) from None


#: The word that replaces the token in all but the last row of a batch.
BATCH: Final = "batch"
#: The writer of every stream before lines named their writers: the main process.
OLDER_WRITER: Final = "master"
#: Tokens of at most this many digits need no range check: the largest 64-bit integer
#: has one more.
SAFE_DIGITS: Final = 18


class _TextCommand(Command, frozen=True):
    """A command with one field, the remainder of the line."""

    data: str

    @classmethod
    def from_line(cls, line: str) -> _TextCommand:
        return cls(line)


class _WordCommand(_TextCommand, frozen=True):
    """A command with one field without spaces."""

    @classmethod
    def from_line(cls, line: str) -> _WordCommand:
        return cls(cls._name(line))


class ServerCommand(_WordCommand, frozen=True):
    """The homeserver's name: the first line that the server's end of a TCP link sends.

    :ivar data: the homeserver's name.
    """

    NAME = "SERVER"


class NameCommand(_TextCommand, frozen=True):
    """The client's name, a label for the connection; the server requires it.

    :ivar data: the name of the client's instance, or another label.
    """

    NAME = "NAME"


class PingCommand(_TextCommand, frozen=True):
    """Keep-alive.

    :ivar data: arbitrary; usually the time in ms since 1970. An instance that speaks
        the extension may append :data:`~synapse_replication.wire.extension.PING_MARK`.
    """

    NAME = "PING"


class ErrorCommand(_TextCommand, frozen=True):
    """Report of an error, such as a violation of the protocol or a timeout.

    The sender then closes the connection.

    :ivar data: a text for display.
    """

    NAME = "ERROR"


class RemoteServerUpCommand(_WordCommand, frozen=True):
    """Notice that a remote homeserver can be reached again.

    :ivar data: the remote homeserver's name.
    """

    NAME = "REMOTE_SERVER_UP"


class NewActiveTaskCommand(_WordCommand, frozen=True):
    """Request to run a scheduled task.

    :ivar data: the task's id.
    """

    NAME = "NEW_ACTIVE_TASK"


class CancelTaskCommand(_WordCommand, frozen=True):
    """Request to stop a scheduled task.

    :ivar data: the task's id.
    """

    NAME = "CANCEL_TASK"


class ReplicateCommand(Command, frozen=True):
    """Request for the positions of the streams that the receiving instance writes.

    Over Redis, every instance receives it; over direct TCP, only the server.
    """

    NAME: ClassVar[str] = "REPLICATE"

    @classmethod
    def from_line(cls, line: str) -> ReplicateCommand:
        """Ignore any fields: older peers send obsolete arguments."""
        return cls()


class PositionCommand(Command, frozen=True):
    """Notice that a writer advanced without rows in ``(prev_token, new_token]``.

    Older peers omit the previous token, or also the writer.

    :ivar instance_name: the writer, not the peer that relayed the line.
    :ivar prev_token: the token above which the writer has no rows up to ``new_token``;
        ``new_token`` itself if the writer says nothing of earlier rows.
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


class RdataCommand(Command, frozen=True):
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
        text = self._json(self.row).decode()
        return f"{self.stream_name} {self.instance_name} {token} {text}"

    @override
    def encode(self) -> bytes:
        head = _rdata_head(self.stream_name, self.instance_name)
        text = self._json(self.row)
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


class FederationAckCommand(Command, frozen=True):
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


class LockReleasedCommand(Command, frozen=True):
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
        instance_name, *lock = cls._decode(_LOCK_FIELDS, line)
        return cls(cls._name(instance_name), *map(cls._id, lock))

    @override
    def to_line(self) -> str:
        return self._json(astuple(self)).decode()


_LOCK_FIELDS = msgspec.json.Decoder(tuple[str, str, str])


# -- commands about users ---------------------------------------------------------

_USER_IP_FIELDS = msgspec.json.Decoder(tuple[str, str, str, str | None, int])


class UserSyncCommand(Command, frozen=True):
    """Notice that a user started, continues or stopped syncing with an instance.

    :ivar instance_id: the random id of the instance's epoch.
    :ivar user_id: contains no spaces.
    :ivar device_id: may contain spaces; ``None`` if the line has no device id.
    :ivar last_sync_ms: when the user last synced with the instance, in ms since 1970.
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
        # Split from both ends, because a device id may contain spaces.
        ends = line.rsplit(" ", 2)
        if len(ends) != 3:
            cls._raise_unparsable("it has fewer than 4 fields")
        front, state, last_sync_ms = ends
        if state not in ("start", "end"):
            cls._raise_unparsable("the syncing state is neither start nor end")
        ids = front.split(" ", 2)
        if len(ids) < 2:
            cls._raise_unparsable("it has fewer than 4 fields")
        if "" in ids[:2]:
            cls._raise_unparsable("the instance id or the user id is empty")
        device_id = ids[2] if len(ids) == 3 else "None"
        return cls(
            cls._id(ids[0]),
            cls._id(ids[1]),
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


class ClearUserSyncsCommand(Command, frozen=True):
    """Notice that no user syncs with an instance any more.

    :ivar instance_id: the random id of the instance's epoch.
    """

    NAME: ClassVar[str] = "CLEAR_USER_SYNC"
    instance_id: str

    @classmethod
    @override
    def from_line(cls, line: str) -> ClearUserSyncsCommand:
        return cls(cls._id(cls._word(line)))


class UserIpCommand(Command, frozen=True):
    """Notice of a user's request. Over Redis, it is sent on a channel of its own.

    :ivar user_id: contains no spaces.
    :ivar access_token: secret, and therefore masked in the ``repr``.
    :ivar last_seen: the time of the request, in ms since 1970.
    """

    NAME: ClassVar[str] = "USER_IP"
    user_id: str
    access_token: str
    ip: str
    user_agent: str
    device_id: str | None
    last_seen: int

    @classmethod
    @override
    def from_line(cls, line: str) -> UserIpCommand:
        user_id, text = cls._words(line, 2)
        return cls(user_id, *cls._decode(_USER_IP_FIELDS, text))

    @override
    def __rich_repr__(self) -> list[tuple[str, Any]]:
        names = [name for name in self.__struct_fields__ if name != "access_token"]
        return [(name, getattr(self, name)) for name in names]

    @override
    def __repr__(self) -> str:
        shown = {name: repr(getattr(self, name)) for name in self.__struct_fields__}
        shown["access_token"] = "<secret>"
        fields = ", ".join(f"{name}={value}" for name, value in shown.items())
        return f"UserIpCommand({fields})"

    @override
    def to_line(self) -> str:
        user_id, *fields = astuple(self)
        return f"{user_id} {self._json(fields).decode()}"

    @classmethod
    @override
    def redis_channel_name(cls, prefix: str) -> str:
        return f"{prefix}/USER_IP"


# -- commands that only older peers send -------------------------------------------

_CACHE_KEYS = msgspec.json.Decoder(list[Any] | None)


class RemovePusherCommand(Command, frozen=True):
    """Request to remove a pusher; only older peers send it.

    :ivar app_id: contains no spaces.
    :ivar push_key: may contain spaces.
    :ivar user_id: contains no spaces.
    """

    NAME: ClassVar[str] = "REMOVE_PUSHER"
    app_id: str
    push_key: str
    user_id: str

    @classmethod
    @override
    def from_line(cls, line: str) -> RemovePusherCommand:
        app_id, rest = cls._words(line, 2)
        push_key, space, user_id = rest.rpartition(" ")
        if not space:
            cls._raise_unparsable("it has 2 fields, not 3")
        return cls(app_id, push_key, user_id)


class InvalidateCacheCommand(Command, frozen=True):
    """Notice that an entry of a cache, or the whole cache, is stale.

    Only older peers send it.

    :ivar cache_func: the name of the cached function.
    :ivar keys: the entry's key, as JSON values; ``None`` for the whole cache.
    """

    NAME: ClassVar[str] = "INVALIDATE_CACHE"
    cache_func: str
    keys: list[Any] | None

    @classmethod
    @override
    def from_line(cls, line: str) -> InvalidateCacheCommand:
        cache_func, text = cls._words(line, 2)
        return cls(cache_func, cls._decode(_CACHE_KEYS, text))

    @override
    def to_line(self) -> str:
        return f"{self.cache_func} {self._json(self.keys).decode()}"


#: Every command, by name.
COMMANDS: Final[dict[str, type[Command]]] = {
    value.NAME: value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, Command) and "NAME" in vars(value)
}

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

#: The names of the commands for all instances, which are relayed over direct TCP.
RELAYED: Final = frozenset({"LOCK_RELEASED", "REMOTE_SERVER_UP"})


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
            and len(token) <= SAFE_DIGITS
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

"""Messages of the extension, which only instances that run this package exchange.

Theory of operation: on the Redis channel ``<server_name>/replication_ext`` each
instance publishes its *epoch* (random, chosen at each start) and, for each stream that
it writes, the token up to which it has sent all rows or announced its position. It
publishes these messages on the same connection as its rows and positions, so all of
them arrive in order. A reader that has handled all rows and positions before a message,
and is still behind the token in the message, has missed rows.

A message is a JSON object of at most :data:`MAX_LENGTH` bytes::

    {"v": 1, "type": "heartbeat", "instance": "event_persister1",
     "epoch": "Vn3x...", "where": "host7:4711", "version": "0.1.0",
     "time": 1700000000000,
     "positions": {"events": [1847, 1699999999000]}}

``positions`` contains, for each stream, a token and the time at which the writer
reached it, in ms since 1970. The types are:

``hello``
    The instance started, or reconnected to the channel.
``heartbeat``
    The instance is alive. It sends this every second while a stream advances, and
    otherwise at the interval ``every``.
``goodbye``
    The instance is shutting down cleanly; its positions are final.
``rows``
    Rows follow on the main channel. ``positions`` contains only their stream, with its
    token before these rows.
``watch``
    Only to a few instances, on their own channels: the sender asks them to report
    to all others if it falls silent.
``silent``
    ``silent`` has the name of an instance that the sender watches, its epoch, and for
    how many s it has been silent.
``command``
    Only over direct TCP: ``line`` is a command for all instances, and ``reached`` lists
    those to which it was sent. The receiver relays it to its other peers.

A writer answers a ``hello`` with a heartbeat. If the hello has ``"reply": true``, the
answer may be published on the asking instance's own channel,
``<server_name>/replication_ext/<instance>``. A hello and a heartbeat state the interval
``every``, in s, of the instance's heartbeats while no stream advances; without the
field, it is 5 s. ``answers`` states whether the instance answers each hello; an
instance that states it can also watch others. ``"replicates": true`` in a hello states
that a REPLICATE follows, which needs no answer from an instance that answers the hello.

Three more fields may be present: ``prev`` states, by stream, a token before that of
``positions`` if the instance has no rows between the two; ``backlog`` is false if it
does not serve its recent rows from memory; ``streams``, in a ``hello`` over direct TCP,
contains the names of the streams whose rows the instance needs; without the field, it
needs all rows.

Over direct TCP, a message is a line, ``REPLICATION_EXT <json>``. It is sent only after
both ends have declared that they speak the extension; see
:mod:`synapse_replication.wire.connection`.

Unknown fields, and messages of another version or an unknown type, are counted and
skipped: a newer peer may send them.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import Annotated, Final, NoReturn, TypeAlias

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from synapse_replication.errors import ExtensionMessageError, UnknownExtensionError
from synapse_replication.streams.rows import decode_json, encode_json
from synapse_replication.streams.tokens import MAX_TOKEN, MIN_TOKEN

#: The part of the channel's name after ``<server_name>/``.
CHANNEL: Final = "replication_ext"
VERSION: Final = 1
#: The mark that follows the time in a PING: it declares that the sender speaks this
#: version of the extension or a later version.
PING_MARK: Final = f"{CHANNEL}/{VERSION}"
#: The start of a message's line over direct TCP.
LINE_PREFIX: Final = b"REPLICATION_EXT "
#: The name under which messages are counted among the commands.
COUNTED_AS: Final = "EXTENSION"
#: The longest message, in bytes.
MAX_LENGTH: Final = 64 * 1024
#: The longest instance name, epoch, stream name or location, in characters.
MAX_NAME_LENGTH: Final = 255
#: The longest interval of heartbeats that an instance may state, in s.
MAX_INTERVAL: Final = 3600
#: The largest number of streams in one message.
MAX_STREAMS: Final = 500

#: A token, or another signed 64-bit integer.
Int64: TypeAlias = Annotated[int, Meta(ge=MIN_TOKEN, le=MAX_TOKEN)]
_Text: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]
_Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
_Names: TypeAlias = Annotated[frozenset[_Name], Meta(max_length=MAX_STREAMS)]
_encode = msgspec.json.Encoder().encode
#: Also sorts the names in sets, and the positions.
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode


class MessageType(enum.Enum):
    """Type of a message; the module's docstring explains each type."""

    HELLO = "hello"
    HEARTBEAT = "heartbeat"
    GOODBYE = "goodbye"
    ROWS = "rows"
    WATCH = "watch"
    SILENT = "silent"
    COMMAND = "command"


_TYPES: Final = frozenset(kind.value for kind in MessageType)

#: A message of type ``rows``, exactly as :func:`encode_message` encodes it, with names
#: in ASCII.
_ROWS: Final = re.compile(
    rb'\{"v":1,"type":"rows","instance":"(%(name)b+)","epoch":"(%(name)b+)",'
    rb'"where":"%(name)b*","version":"%(name)b*","time":%(number)b,'
    rb'"positions":\{"(%(name)b+)":\[(%(number)b),%(number)b\]\}'
    rb'(?:,"backlog":false)?\}'
    % {b"name": rb"[!#-\[\]-~]", b"number": b"-?(?:0|[1-9][0-9]{0,17})"}
)
#: The longest message that is matched with ``_ROWS``, in bytes. The names in such a
#: message are shorter, so their lengths need no check.
_MAX_ROWS_LENGTH: Final = MAX_NAME_LENGTH


class ExtensionLine(Struct, frozen=True):
    """A message that was received over direct TCP and is not parsed yet."""

    payload: bytes


class StreamPosition(Struct, frozen=True, array_like=True):
    """The position of a writer in one of its streams.

    :ivar token: the token up to which all rows were sent, or announced by a POSITION.
    :ivar time_ms: when the writer reached the token, in ms since 1970.
    """

    token: Int64
    time_ms: Int64


class Silence(Struct, frozen=True, array_like=True):
    """An instance that a peer watches, and that has fallen silent.

    :ivar seconds: how long nothing had arrived from the instance, in s.
    """

    instance_name: _Name
    epoch: _Name
    seconds: Annotated[int, Meta(ge=0, le=2**63 - 1)]


#: The fields of a message that have other names than its attributes.
_RENAMED: Final = {
    "instance_name": "instance",
    "time_ms": "time",
    "has_backlog": "backlog",
    "has_channel": "reply",
    "silence": "silent",
    "follows": "streams",
    "prev_tokens": "prev",
    "heartbeat_interval": "every",
}


class ExtensionMessage(
    Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename=_RENAMED,
    tag_field="v",
    tag=VERSION,
):
    """One message, with its fields in the order in which they are encoded.

    :ivar epoch: the epoch of the sending instance: random, chosen at each start.
    :ivar where: the location of the instance, for display; empty if not stated.
    :ivar version: the version of this package on the instance; empty if not stated.
    :ivar time_ms: when the message was created, in ms since 1970.
    :ivar positions: positions of the streams that the instance writes, by stream name.
    :ivar prev_tokens: by stream name, a token before that of ``positions``, if the
        instance has no rows between the two.
    :ivar has_backlog: whether the instance serves its recent rows from a backlog. The
        encoded message contains the field only if it is false.
    :ivar follows: in a ``hello`` over direct TCP, the streams whose rows the instance
        needs; ``None`` if not stated, which means all.
    :ivar heartbeat_interval: the interval of the instance's heartbeats while its
        positions do not advance, in s; ``None`` if not stated, which means 5 s, and
        that the instance expects the same of its peers.
    :ivar has_channel: in a ``hello``, whether answers may be sent to the instance's own
        channel.
    :ivar answers: whether the instance answers each hello; ``None`` if not stated: it
        cannot watch others, and expects usual heartbeats.
    :ivar replicates: in a ``hello``, whether a REPLICATE follows.
    :ivar silence: in a ``silent``, the instance that fell silent.
    :ivar unknown_fields: the number of fields that were skipped.
    :ivar line: in a ``command``, its line; otherwise empty.
    :ivar reached: in a ``command``, the instances to which it was sent.
    """

    type: MessageType
    instance_name: _Name
    epoch: _Name
    # With a factory, fields are encoded even if they have their defaults.
    where: _Text = field(default_factory=str)
    version: _Text = field(default_factory=str)
    time_ms: Int64
    positions: Annotated[dict[_Name, StreamPosition], Meta(max_length=MAX_STREAMS)]
    prev_tokens: Annotated[dict[_Name, Int64], Meta(max_length=MAX_STREAMS)] = {}
    has_backlog: bool = True
    heartbeat_interval: Annotated[int, Meta(gt=0, le=MAX_INTERVAL)] | None = None
    has_channel: bool = False
    answers: bool | None = None
    replicates: bool = False
    silence: Silence | None = None
    follows: _Names | None = None
    line: Annotated[str, Meta(pattern=r"\A[^\n]*\Z")] = ""
    reached: _Names = frozenset()
    unknown_fields: int = 0


_FIELDS: Final = {"v", *ExtensionMessage.__struct_encode_fields__} - {"unknown_fields"}
#: Fields that count as absent unless their values are booleans.
_FLAGS: Final = frozenset({"backlog", "reply", "answers", "replicates"})


def encode_message(message: ExtensionMessage) -> bytes:
    """Encode a message as JSON, with its positions in their order."""
    if message.follows or message.reached:
        return _encode_sorted(message)
    return _encode(message)


def make_rows_encoder(
    message: ExtensionMessage,
) -> Callable[[int, str, StreamPosition], bytes]:
    """Return a function that encodes messages of type ``rows`` of one instance.

    The parameters of the function are the time in ms since 1970, the name of the stream
    and its position. The function needs a third of the time of :func:`encode_message`.

    :param message: any message of the instance; its times and positions are not used.
    """
    template = encode_message(
        replace(message, type=MessageType.ROWS, positions={}, time_ms=0)
    )
    head, _, tail = template.partition(b'"time":0,"positions":{}')

    def encode(time_ms: int, stream_name: str, position: StreamPosition) -> bytes:
        return b'%b"time":%d,"positions":{%b:[%d,%d]}%b' % (
            head,
            time_ms,
            encode_json(stream_name),
            position.token,
            position.time_ms,
            tail,
        )

    return encode


def parse_message(payload: bytes) -> ExtensionMessage:
    """Parse a message.

    :raises UnknownExtensionError: if its version or type is unknown, which is not a
        violation of the protocol.
    :raises ExtensionMessageError: if it is not a valid message. The error's text does
        not quote the message.
    """
    if len(payload) > MAX_LENGTH:
        _raise_invalid(f"it has {len(payload)} bytes; {MAX_LENGTH} are allowed")
    try:
        value = decode_json(payload)
    except ValueError:
        _raise_invalid("it is not JSON")
    if not isinstance(value, dict):
        _raise_invalid("it is not a JSON object")
    version, kind = value.get("v"), value.get("type")
    if type(version) is not int:
        _raise_invalid("v is not an integer")
    if version != VERSION:
        raise UnknownExtensionError(f"version {version}")
    if isinstance(kind, str) and kind not in _TYPES:
        raise UnknownExtensionError(f"type {kind}")
    fields = {
        name: each
        for name, each in value.items()
        if name in _FIELDS and (name not in _FLAGS or type(each) is bool)
    }
    if None in fields.values():
        _raise_invalid("a field is null")
    fields["unknown_fields"] = len(value.keys() - _FIELDS)
    try:
        message = msgspec.convert(fields, ExtensionMessage)
    except msgspec.ValidationError as error:
        _raise_invalid(str(error))
    _check_names(message)
    return message


def parse_rows_message(payload: bytes) -> tuple[str, str, str, int] | None:
    """Parse a message of type ``rows``, the most frequent type.

    This function needs a third of the time of :func:`parse_message`.

    :return: the name of the instance, its epoch, the name of the stream and the token;
        ``None`` if :func:`parse_message` is needed.
    """
    match = _ROWS.fullmatch(payload) if len(payload) <= _MAX_ROWS_LENGTH else None
    if match is None:
        return None
    instance_name, epoch, stream_name, token = match.groups()
    return instance_name.decode(), epoch.decode(), stream_name.decode(), int(token)


def _check_names(message: ExtensionMessage) -> None:
    names = [message.instance_name, message.epoch, message.where, message.version]
    names += [
        *message.positions,
        *message.prev_tokens,
        *(message.follows or ()),
        *message.reached,
    ]
    if message.silence is not None:
        names += [message.silence.instance_name, message.silence.epoch]
    text = "".join(names)
    if " " in text or not text.isprintable():
        _raise_invalid("a name is not one printable word")


def _raise_invalid(reason: str) -> NoReturn:
    raise ExtensionMessageError(reason)

"""What processes of this package tell one another, and stock peers never see.

Theory of operation: on the Redis channel ``<server_name>/replication_ext`` each
process says who it is (its *epoch*, random, made anew at each start) and how far
it has told the others about each stream that it writes. It says so in order with
its rows and positions on the main channel, through the same connection: a reader
that has handled what came before such a message, and is behind it, missed something.

One message is one JSON object of at most :data:`MAX_LENGTH` bytes::

    {"v": 1, "type": "heartbeat", "instance": "event_persister1",
     "epoch": "Vn3x...", "where": "host7:4711", "version": "0.1.0",
     "time": 1700000000000,
     "positions": {"events": [1847, 1699999999000]}}

``positions`` has a token and the time at which it was reached (ms since the epoch of
1970) of each stream. The types:

``hello``
    The process came, or came back to the channel.
``heartbeat``
    It is there. Sent each second while something moves, else every few seconds.
``goodbye``
    It goes, in order; its positions are final.
``rows``
    Rows of the one stream in ``positions`` follow on the main channel; before them,
    it stood there.

Over direct TCP, a message is a line, ``REPLICATION_EXT <json>``, between peers that
both showed that they speak it; see :mod:`synapse_replication.wire.connection`.

Fields that are not known here are counted and skipped, and so are messages of
another version or type: a newer peer may send them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import attrs

from synapse_replication.errors import ExtensionMessageError, UnknownExtensionError
from synapse_replication.streams.rows import decode_json, encode_json

__all__ = [
    "CHANNEL",
    "COUNTED_AS",
    "LINE_PREFIX",
    "MAX_LENGTH",
    "PING_MARK",
    "VERSION",
    "ExtensionLine",
    "ExtensionMessage",
    "MessageType",
    "StreamPosition",
    "encode_message",
    "parse_message",
]

#: What follows ``<server_name>/`` in the name of the channel.
CHANNEL: Final = "replication_ext"
VERSION: Final = 1
#: A word of a PING, after its time: who says it speaks this version, or a later one.
PING_MARK: Final = f"{CHANNEL}/{VERSION}"
#: How a message's line begins over direct TCP.
LINE_PREFIX: Final = b"REPLICATION_EXT "
#: The name under which messages are counted among the commands.
COUNTED_AS: Final = "EXTENSION"
#: The longest message, in bytes.
MAX_LENGTH: Final = 64 * 1024
#: The longest name of an instance, an epoch, a stream or a place, in characters.
MAX_NAME_LENGTH: Final = 255
#: The streams in one message.
MAX_STREAMS: Final = 500

_INT64: Final = 2**63
_FIELDS: Final = frozenset(
    {
        "v",
        "type",
        "instance",
        "epoch",
        "where",
        "version",
        "time",
        "positions",
        "backlog",
        "streams",
    }
)


class MessageType(enum.Enum):
    """What a message says; see the module."""

    HELLO = "hello"
    HEARTBEAT = "heartbeat"
    GOODBYE = "goodbye"
    ROWS = "rows"


_TYPES: Final = {kind.value: kind for kind in MessageType}


@attrs.frozen
class ExtensionLine:
    """A message that came over direct TCP; it may not parse."""

    payload: bytes


@attrs.frozen
class StreamPosition:
    """How far a writer told the others about a stream.

    :ivar token: all rows up to it were sent, or announced by a POSITION.
    :ivar time_ms: when it got there, ms since the epoch.
    """

    token: int
    time_ms: int


@attrs.frozen
class ExtensionMessage:
    """One message.

    :ivar epoch: of the process: random, made anew at each start.
    :ivar where: for people: where the process runs; empty if it does not say.
    :ivar version: of the software; empty if it does not say.
    :ivar time_ms: when the message was made, ms since the epoch.
    :ivar positions: of the streams that the process writes, by name.
    :ivar has_backlog: the process can be asked for what it sent last. Said only if not.
    :ivar follows: in a ``hello`` over direct TCP: the streams that the process follows;
        ``None`` if it does not say, and then it follows all.
    :ivar unknown_fields: how many fields were skipped.
    """

    type: MessageType
    instance_name: str
    epoch: str
    time_ms: int
    positions: Mapping[str, StreamPosition]
    where: str = ""
    version: str = ""
    has_backlog: bool = True
    unknown_fields: int = 0
    follows: frozenset[str] | None = None


def encode_message(message: ExtensionMessage) -> bytes:
    """Write a message as it is published."""
    value: dict[str, Any] = {
        "v": VERSION,
        "type": message.type.value,
        "instance": message.instance_name,
        "epoch": message.epoch,
        "where": message.where,
        "version": message.version,
        "time": message.time_ms,
        "positions": {
            name: [position.token, position.time_ms]
            for name, position in message.positions.items()
        },
    }
    if not message.has_backlog:
        value["backlog"] = False
    if message.follows is not None:
        value["streams"] = sorted(message.follows)
    return encode_json(value)


def parse_message(payload: bytes) -> ExtensionMessage:
    """Read a message.

    :raises UnknownExtensionError: if it is of another version or type; no fault.
    :raises ExtensionMessageError: if it is no message. The text repeats nothing of it.
    """
    if len(payload) > MAX_LENGTH:
        _refuse(f"it has {len(payload)} bytes; {MAX_LENGTH} are allowed")
    try:
        value = decode_json(payload)
    except ValueError:
        _refuse("it is not JSON")
    if not isinstance(value, dict):
        _refuse("it is no JSON object")
    version = _integer(value.get("v"), "v")
    if version != VERSION:
        raise UnknownExtensionError(f"version {version}")
    kind = _TYPES.get(_name(value.get("type"), "type"))
    if kind is None:
        raise UnknownExtensionError(f"type {value['type']}")
    return ExtensionMessage(
        kind,
        _name(value.get("instance"), "instance"),
        _name(value.get("epoch"), "epoch"),
        _integer(value.get("time"), "time"),
        _positions(value.get("positions")),
        _name(value["where"], "where") if value.get("where") else "",
        _name(value["version"], "version") if value.get("version") else "",
        value.get("backlog") is not False,
        sum(field not in _FIELDS for field in value),
        _streams(value["streams"]) if "streams" in value else None,
    )


def _positions(value: Any) -> dict[str, StreamPosition]:
    if not isinstance(value, dict) or len(value) > MAX_STREAMS:
        _refuse(f"positions is no object of at most {MAX_STREAMS} streams")
    positions = {}
    for name, position in value.items():
        if not isinstance(position, list) or len(position) < 2:
            _refuse("a position is not a token and a time")
        positions[_name(name, "a stream")] = StreamPosition(
            _integer(position[0], "a token"), _integer(position[1], "a time")
        )
    return positions


def _streams(value: Any) -> frozenset[str]:
    if not isinstance(value, list) or len(value) > MAX_STREAMS:
        _refuse(f"streams is no list of at most {MAX_STREAMS} names")
    return frozenset(_name(name, "a stream") for name in value)


def _name(value: Any, what: str) -> str:
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= MAX_NAME_LENGTH
        or not value.isprintable()
        or " " in value
    ):
        _refuse(f"{what} is not one word of at most {MAX_NAME_LENGTH} characters")
    return value


def _integer(value: Any, what: str) -> int:
    # True is an int, too.
    if type(value) is not int or not -_INT64 <= value < _INT64:
        _refuse(f"{what} is no whole number of 64 bits")
    return value


def _refuse(reason: str) -> NoReturn:
    raise ExtensionMessageError(reason)

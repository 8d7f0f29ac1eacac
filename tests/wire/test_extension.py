"""Tests of the messages of the extension."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings, strategies as st
from msgspec.structs import replace
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import (
    ExtensionMessageError,
    RemoteProtocolError,
    UnknownExtensionError,
)
from synapse_replication.wire.extension import (
    MAX_LENGTH,
    MAX_STREAMS,
    ExtensionMessage,
    MessageType,
    Silence,
    StreamPosition,
    encode_message,
    make_rows_encoder,
    parse_message,
    parse_rows_message,
)

_INT64 = st.integers(-(2**63), 2**63 - 1)
_TOKEN = st.text(min_size=1, max_size=255).filter(
    lambda text: text.isprintable() and " " not in text
)
_MESSAGES = st.builds(
    ExtensionMessage,
    type=st.sampled_from(MessageType),
    instance_name=_TOKEN,
    epoch=_TOKEN,
    where=st.just("") | _TOKEN,
    version=st.just("") | _TOKEN,
    time_ms=_INT64,
    positions=st.dictionaries(
        _TOKEN, st.builds(StreamPosition, _INT64, _INT64), max_size=5
    ),
    has_backlog=st.booleans(),
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)

GOOD: dict[str, Any] = {
    "v": 1,
    "type": "heartbeat",
    "instance": "w1",
    "epoch": "abc",
    "where": "host7:4711",
    "version": "0.1.0",
    "time": 1_700_000_000_000,
    "positions": {"events": [1847, 1_699_999_999_000]},
}


def with_fields(**fields: Any) -> bytes:
    """Encode the good message with other fields; ``...`` omits a field."""
    value = {**GOOD, **fields}
    return json.dumps({k: v for k, v in value.items() if v is not ...}).encode()


class ExtensionMessageTests(SynchronousTestCase):
    """Tests for :func:`parse_message` and :func:`encode_message`."""

    def test_form(self) -> None:
        """A message is encoded as the JSON object in the protocol's description."""
        message = ExtensionMessage(
            type=MessageType.HEARTBEAT,
            instance_name="w1",
            epoch="abc",
            where="host7:4711",
            version="0.1.0",
            time_ms=1_700_000_000_000,
            positions={"events": StreamPosition(1847, 1_699_999_999_000)},
        )
        self.assertEqual(json.loads(encode_message(message)), GOOD)
        self.assertEqual(parse_message(with_fields()), message)

    def test_backlog(self) -> None:
        """Only ``false`` in the field ``backlog`` means that there is none."""
        message = parse_message(with_fields(backlog=False))
        self.assertFalse(message.has_backlog)
        self.assertEqual(json.loads(encode_message(message))["backlog"], False)
        for value in (True, None, 0, "no"):
            self.assertTrue(parse_message(with_fields(backlog=value)).has_backlog)

    def test_followed_streams(self) -> None:
        """
        A hello may list the streams to follow; without the list, all are followed.
        """
        message = parse_message(with_fields(streams=["typing", "events"]))
        self.assertEqual(message.follows, frozenset({"events", "typing"}))
        self.assertEqual(message.unknown_fields, 0)
        self.assertEqual(
            json.loads(encode_message(message))["streams"], ["events", "typing"]
        )
        self.assertIsNone(parse_message(with_fields()).follows)
        self.assertEqual(parse_message(with_fields(streams=[])).follows, frozenset())

    def test_command(self) -> None:
        """A command message has a line, and the instances that it has reached."""
        names = frozenset({"w1", "w2"})
        message = replace(
            parse_message(with_fields()),
            type=MessageType.COMMAND,
            line="REMOTE_SERVER_UP a.example",
            reached=names,
        )
        self.assertEqual(parse_message(encode_message(message)), message)
        for fields in ({"line": 1}, {"line": "a\nb"}, {"reached": ["a b"]}):
            self.assertRaises(
                ExtensionMessageError, parse_message, with_fields(**fields)
            )
        invalid: list[Any] = [None, "typing", {}, [7], ["two words"], ["x"] * 501]
        for wrong in invalid:
            with self.assertRaises(ExtensionMessageError):
                parse_message(with_fields(streams=wrong))

    def test_silence(self) -> None:
        """A message of silence has a name, an epoch and a time that has passed."""
        valid = ["w", "w-epoch", 15]
        message = parse_message(with_fields(type="silent", silent=valid))
        self.assertEqual(message.silence, Silence("w", "w-epoch", 15))
        self.assertEqual(parse_message(encode_message(message)), message)
        invalid: list[Any] = [None, {}, valid[:2], ["w", "w-epoch", "15"]]
        for wrong in [*invalid, ["w", "w-epoch", -1], ["a b", "w-epoch", 15]]:
            with self.subTest(wrong=wrong), self.assertRaises(ExtensionMessageError):
                parse_message(with_fields(type="silent", silent=wrong))

    @settings(derandomize=True, deadline=None)
    @given(_MESSAGES)
    def test_round_trip(self, message: ExtensionMessage) -> None:
        """An encoded message is decoded to the same message."""
        self.assertEqual(parse_message(encode_message(message)), message)

    @settings(derandomize=True, deadline=None)
    @given(_MESSAGES)
    def test_rows_message(self, message: ExtensionMessage) -> None:
        """The short way to parse a message of type ``rows`` has the same result."""
        rows = parse_rows_message(encode_message(message))
        if rows is None:
            return
        self.assertIs(message.type, MessageType.ROWS)
        ((stream_name, position),) = message.positions.items()
        self.assertEqual(
            rows, (message.instance_name, message.epoch, stream_name, position.token)
        )

    def test_usual_rows_message(self) -> None:
        """The short way applies to a message as a writer sends it, and to no other."""
        message = parse_message(with_fields(type="rows"))
        self.assertEqual(
            parse_rows_message(encode_message(message)), ("w1", "abc", "events", 1847)
        )
        for wrong in (
            with_fields(type="rows"),
            encode_message(parse_message(with_fields())),
            encode_message(parse_message(with_fields(type="rows", where="h\u00e9"))),
            encode_message(parse_message(with_fields(type="rows", positions={}))),
            encode_message(message).replace(b"1847", b"01847"),
            encode_message(message).replace(b"1847", b"1" * 19),
            encode_message(message).replace(b"w1", b""),
            encode_message(message).replace(b"w1", b"a b"),
            encode_message(message).replace(b"w1", b"x" * 256),
            encode_message(message) + b" ",
        ):
            self.assertIsNone(parse_rows_message(wrong))

    @settings(derandomize=True, deadline=None)
    @given(_MESSAGES, _INT64, _TOKEN, st.builds(StreamPosition, _INT64, _INT64))
    def test_rows_encoder(
        self,
        message: ExtensionMessage,
        time_ms: int,
        stream_name: str,
        position: StreamPosition,
    ) -> None:
        """The encoder of messages of type ``rows`` has the same result."""
        expected = replace(
            message,
            type=MessageType.ROWS,
            time_ms=time_ms,
            positions={stream_name: position},
        )
        self.assertEqual(
            make_rows_encoder(message)(time_ms, stream_name, position),
            encode_message(expected),
        )

    def test_newer_peer(self) -> None:
        """Another version or type raises its own error; unknown fields are counted."""
        for payload in (
            with_fields(v=2),
            with_fields(v=2, instance=...),
            with_fields(type="x"),
        ):
            self.assertRaises(UnknownExtensionError, parse_message, payload)
        message = parse_message(
            with_fields(a=1, b=None, positions={"events": [5, 6, 7]})
        )
        self.assertEqual(message.unknown_fields, 2)
        self.assertEqual(message.positions, {"events": StreamPosition(5, 6)})

    def test_optional_location(self) -> None:
        """The field ``where`` is optional."""
        self.assertEqual(parse_message(with_fields(where=...)).where, "")

    def test_refused(self) -> None:
        """
        A malformed message raises a short error that does not repeat its contents.
        """
        for payload in (
            b"",
            b"[]",
            b"null",
            b"\xff",
            b"[" * 60_000,
            b'{"v": NaN}',
            b'{"a": "' + b"x" * MAX_LENGTH + b'"}',
            with_fields(v=True),
            with_fields(v="1"),
            with_fields(instance=""),
            with_fields(instance="two words"),
            with_fields(instance="line\nbreak"),
            with_fields(instance="nul\0"),
            with_fields(epoch="x" * 256),
            with_fields(epoch=None),
            with_fields(where="a b"),
            with_fields(time=2**63),
            with_fields(time=1.5),
            with_fields(positions=...),
            with_fields(positions=[]),
            with_fields(positions={"events": 5}),
            with_fields(positions={"events": [5]}),
            with_fields(positions={"events": [5, True]}),
            with_fields(positions={"events": [-(2**63) - 1, 0]}),
            with_fields(positions={"": [5, 0]}),
            with_fields(positions={str(n): [0, 0] for n in range(MAX_STREAMS + 1)}),
        ):
            error = self.assertRaises(ExtensionMessageError, parse_message, payload)
            self.assertNotIn("xxx", str(error))
            self.assertLess(len(str(error)), 200)

    @settings(derandomize=True, deadline=None, max_examples=200)
    @given(st.binary(max_size=200) | _JSON.map(lambda v: json.dumps(v).encode()))
    def test_any_bytes(self, payload: bytes) -> None:
        """Any bytes are either decoded or raise an error of the protocol."""
        self.read(payload)

    @settings(derandomize=True, deadline=None, max_examples=200)
    @given(st.sampled_from(sorted(GOOD)), _JSON)
    def test_any_field(self, field: str, value: Any) -> None:
        """
        Any value of one field is either accepted or raises an error of the protocol.
        """
        self.read(with_fields(**{field: value}))

    def read(self, payload: bytes) -> None:
        try:
            message = parse_message(payload)
        except RemoteProtocolError:
            return
        self.assertEqual(
            parse_message(encode_message(message)).positions, message.positions
        )

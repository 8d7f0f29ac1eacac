"""Tests for :mod:`synapse_replication.streams.standard.row_types`."""

from __future__ import annotations

import json
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import LocalProtocolError, RowDecodeError
from synapse_replication.streams.standard.row_types import (
    EventsRowCodec,
    EventsStreamAllStateRow,
    EventsStreamCurrentStateRow,
    EventsStreamEventRow,
    EventsStreamRow,
    UnknownEventsStreamRow,
)

EVENT: list[Any] = [
    "$e",
    "!r",
    "m.room.member",
    "@u:x",
    None,
    None,
    "join",
    False,
    True,
]


class EventsRowCodecTests(SynchronousTestCase):
    """Tests for rows of the form ``[type, data]``."""

    codec = EventsRowCodec("events")

    def test_new_rows(self) -> None:
        """A row that readers would not receive as it is is refused."""
        (row,) = self.codec.decode([b'["ev",["$e","!r","t",null,null,null]]']).rows
        self.assertEqual(self.codec.encode_new(row), self.codec.encode(row))
        data: Any = row.data
        wrong = attrs.evolve(row, data=attrs.evolve(data, event_id=1))
        with self.assertRaisesRegex(LocalProtocolError, "cannot be written"):
            self.codec.encode_new(wrong)

    def decode(self, *values: Any) -> list[EventsStreamRow]:
        return self.codec.decode([json.dumps(value).encode() for value in values]).rows

    def test_each_type_has_a_class(self) -> None:
        """The type of a row determines the class of its data."""
        self.assertEqual(
            self.decode(
                ["ev", EVENT],
                ["state", ["!r", "m.room.name", "", None]],
                ["state-all", ["!r"]],
            ),
            [
                EventsStreamRow(
                    "ev",
                    EventsStreamEventRow(
                        "$e",
                        "!r",
                        "m.room.member",
                        "@u:x",
                        None,
                        None,
                        "join",
                        False,
                        True,
                    ),
                ),
                EventsStreamRow(
                    "state", EventsStreamCurrentStateRow("!r", "m.room.name", "", None)
                ),
                EventsStreamRow("state-all", EventsStreamAllStateRow("!r")),
            ],
        )

    def test_round_trip(self) -> None:
        """A decoded row is encoded as the same JSON."""
        for value in (["ev", EVENT], ["state-all", ["!r"]], ["new", {"a": [1]}]):
            row = self.codec.from_json(value)
            self.assertEqual(json.loads(self.codec.encode(row)), value)
            self.assertEqual(self.decode(value), [row])

    def test_unknown_type_is_counted(self) -> None:
        """A row of an unknown type is decoded with raw data, and counted."""
        decoded = self.codec.decode([b'["new",{"a":1}]', b'["state-all",["!r"]]'])

        self.assertEqual(
            [row.data for row in decoded.rows],
            [UnknownEventsStreamRow({"a": 1}), EventsStreamAllStateRow("!r")],
        )
        self.assertEqual(decoded.with_extra_fields, 1)

    def test_extra_fields_are_counted(self) -> None:
        """Extra fields of a newer peer are removed and counted."""
        decoded = self.codec.decode(
            [json.dumps(["ev", [*EVENT, "new"]]).encode(), b'["state-all",["!r"],1]']
        )

        self.assertEqual(decoded.with_extra_fields, 2)
        self.assertEqual(len(decoded.rows), 2)

    def test_row_of_an_older_peer(self) -> None:
        """Fields that an older peer does not send have their defaults."""
        [row] = self.decode(["ev", EVENT[:6]])

        self.assertEqual(
            row.data,
            EventsStreamEventRow("$e", "!r", "m.room.member", "@u:x", None, None),
        )

    def test_row_of_before_the_types(self) -> None:
        """A row of a very old peer is the data of an event, without a type."""
        decoded = self.codec.decode([json.dumps(EVENT[:5]).encode()])

        event = EventsStreamEventRow("$e", "!r", "m.room.member", "@u:x", None)
        self.assertEqual(list(decoded.rows), [EventsStreamRow("ev", event)])
        self.assertEqual(decoded.with_extra_fields, 0)

    def test_wrong_rows_are_refused(self) -> None:
        """An invalid row raises an error that names its stream and index."""
        good = b'["state-all",["!r"]]'
        for text in (
            b"[]",
            b'["ev"]',
            b"{}",
            b"[1,[]]",
            b'["ev",["$e"]]',
            b'["state",["!r","t","",7]]',
            b'["ev",',
            b'["\xff",[]]',
            b'["ev",' + b"[" * 100_000,
        ):
            with self.subTest(text=text[:40]):
                error = self.assertRaises(
                    RowDecodeError, self.codec.decode, [good, text]
                )
                self.assertEqual((error.stream_name, error.index), ("events", 1))
        self.assertRaises(RowDecodeError, self.codec.from_json, "x")

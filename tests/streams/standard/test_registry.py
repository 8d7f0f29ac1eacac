"""Tests for :mod:`synapse_replication.streams.standard.registry`."""

from __future__ import annotations

import json
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import RowDecodeError
from synapse_replication.streams.id_column import IdColumn
from synapse_replication.streams.standard.registry import (
    DEFAULT_STREAMS,
    STANDARD_STREAMS,
)

NAMES = [
    "events",
    "backfill",
    "presence",
    "presence_federation",
    "typing",
    "receipts",
    "push_rules",
    "pushers",
    "caches",
    "device_lists",
    "to_device",
    "federation",
    "account_data",
    "tag_account_data",
    "profile_updates",
    "sticky_events",
    "thread_subscriptions",
    "un_partial_stated_room",
    "un_partial_stated_event",
    "quarantined_media",
]

#: Rows as a real deployment sends them; for the five streams without recorded rows,
#: rows that were constructed from their fields.
ROWS: dict[str, list[Any]] = {
    "events": [["state", ["!r", "m.room.create", "", None]]],
    "backfill": [["$e", "!r", "m.room.message", None, None, "$other"]],
    "presence": [
        ["@a:x", "online", 1795207379411, 1795207379447, 0, None, True],
        ["@a:x", "unavailable", 0, 1, 2, "st \u2615 a b\nc", False],
    ],
    "presence_federation": [["remote.example", "@a:x"]],
    "typing": [["!r:x", ["@a0:x"]], ["!r:x", []]],
    "receipts": [
        ["!r:x", "m.read", "@a:x", "$e", None, {"ts": 1795207381916}],
        ["!r:x", "m.read.private", "@a:x", "$e", "main", {"ts": 1}],
    ],
    "push_rules": [["@a:x"]],
    "pushers": [["@a:x", "t.bed", "pk 1", False]],
    "caches": [
        ["get_user_by_id", ["@a1:x"], 1795207344959],
        ["ignored_by", None, 1795207569825],
        ["get_monthly_active_count", [], None],
    ],
    "device_lists": [["@a0:x", False, False]],
    "to_device": [["@a3:x"], ["remote.example"]],
    "federation": [["k", {"key": {"a": 1}}]],
    "account_data": [["@a:x", None, "t.bed"], ["@a:x", "!r", "m.fully_read"]],
    "tag_account_data": [["@a:x", "!r", '{"m.favourite":{}}'], ["@a:x", "!r", {}]],
    "profile_updates": [
        ["@a:x", "joined_room", None],
        ["@a:x", "update", ["displayname"]],
    ],
    "sticky_events": [["!r", "$e"]],
    "thread_subscriptions": [["@a:x", "!r", "$e"]],
    "un_partial_stated_room": [["!r"]],
    "un_partial_stated_event": [["$e", True]],
    "quarantined_media": [[None, "IWcsxTOn", True], ["remote.example", "m", False]],
}

#: The attributes of the row classes of matrix-synapse 1.163.2; those of ``events``
#: depend on the type of the row.
STOCK_ATTRIBUTES = {
    "backfill": "event_id room_id type state_key redacts relates_to",
    "presence": "user_id state last_active_ts last_federation_update_ts "
    "last_user_sync_ts status_msg currently_active",
    "presence_federation": "destination user_id",
    "typing": "room_id user_ids",
    "receipts": "room_id receipt_type user_id event_id thread_id data",
    "push_rules": "user_id",
    "pushers": "user_id app_id pushkey deleted",
    "caches": "cache_func keys invalidation_ts",
    "device_lists": "user_id is_signature hosts_calculated",
    "to_device": "entity",
    "federation": "type data",
    "account_data": "user_id room_id data_type",
    "profile_updates": "user_id action affected_fields",
    "sticky_events": "room_id event_id",
    "thread_subscriptions": "user_id room_id event_id",
    "un_partial_stated_room": "room_id",
    "un_partial_stated_event": "event_id rejection_status_changed",
    "quarantined_media": "origin media_id quarantined",
}


class StandardStreamsTests(SynchronousTestCase):
    """Tests for the table of standard streams."""

    def test_every_standard_stream(self) -> None:
        """All 20 streams exist under their names on the wire."""
        self.assertEqual(list(STANDARD_STREAMS), NAMES)
        for name, stream in STANDARD_STREAMS.items():
            self.assertEqual(name, stream.description.name)

    def test_streams_of_older_peers(self) -> None:
        """A stream that no current peer writes must be configured by name."""
        self.assertEqual(
            DEFAULT_STREAMS, tuple(name for name in NAMES if name != "tag_account_data")
        )

    def test_rows_survive_the_round_trip(self) -> None:
        """Each stream's rows are decoded to typed rows and encoded unchanged."""
        self.assertEqual(list(ROWS), NAMES)
        for name, values in ROWS.items():
            with self.subTest(stream=name):
                codec = STANDARD_STREAMS[name].description.codec
                decoded = codec.decode([json.dumps(value).encode() for value in values])
                self.assertEqual(decoded.with_extra_fields, 0)
                self.assertEqual([codec.to_json(row) for row in decoded.rows], values)
                self.assertFalse(hasattr(decoded.rows[0], "__dict__"))

    def test_stock_attribute_names(self) -> None:
        """Rows have the attribute names of the stock row classes, in order."""
        for name, attributes in STOCK_ATTRIBUTES.items():
            with self.subTest(stream=name):
                codec = STANDARD_STREAMS[name].description.codec
                row = codec.from_json(ROWS[name][0])
                values = [getattr(row, attribute) for attribute in attributes.split()]
                self.assertEqual(json.loads(json.dumps(values)), ROWS[name][0])

    def test_types_are_checked(self) -> None:
        """A row with a value of the wrong type is refused."""
        codec = STANDARD_STREAMS["typing"].description.codec

        self.assertRaises(RowDecodeError, codec.decode, [b'["!r","@a:x"]'])

    def test_properties_of_caches(self) -> None:
        """
        Only ``caches`` is idempotent, is announced only if this instance advances it,
        and is written by any instance.
        """
        for name, stream in STANDARD_STREAMS.items():
            facts = stream.description
            self.assertEqual(facts.idempotent, name == "caches", name)
            self.assertEqual(facts.announce_own_moves_only, name == "caches", name)
            self.assertEqual(stream.any_instance_writes, name == "caches", name)

    def test_streams_held_in_memory(self) -> None:
        """
        Exactly four streams have no table; those of which the tokens begin again and
        ``caches`` are resettable.
        """
        in_memory = {
            name
            for name, stream in STANDARD_STREAMS.items()
            if stream.description.held_in_memory
        }

        beginning_again = {"typing", "federation", "presence_federation"}
        self.assertEqual(in_memory, {*beginning_again, "tag_account_data"})
        for name, stream in STANDARD_STREAMS.items():
            facts = stream.description
            self.assertEqual(
                facts.resettable, name in beginning_again | {"caches"}, name
            )
            self.assertEqual(stream.sequence is None, name in in_memory, name)
            self.assertEqual(stream.id_columns == (), name in in_memory, name)
            self.assertEqual(
                stream.positions_name is None, name in in_memory | {"caches"}, name
            )

    def test_rows_that_replace_older_ones(self) -> None:
        """Three streams have rows that replace older ones of a key."""
        keys = {n: s.key for n, s in STANDARD_STREAMS.items() if s.key is not None}

        self.assertEqual(
            keys.keys(), {"typing", "presence_federation", "tag_account_data"}
        )
        row = STANDARD_STREAMS["typing"].description.codec.from_json(["!r", ["@a:x"]])
        self.assertEqual(keys["typing"](row), "!r")

    def test_names_in_stream_positions(self) -> None:
        """Five streams have another name in ``stream_positions``."""
        others = {
            name: stream.positions_name
            for name, stream in STANDARD_STREAMS.items()
            if stream.positions_name not in (None, name)
        }

        self.assertEqual(
            others,
            {
                "presence": "presence_stream",
                "push_rules": "push_rules_stream",
                "device_lists": "device_lists_stream",
                "un_partial_stated_room": "un_partial_stated_room_stream",
                "un_partial_stated_event": "un_partial_stated_event_stream",
            },
        )

    def test_backfill_counts_down(self) -> None:
        """``backfill`` shares the table of ``events``, with negative ids."""
        backfill = STANDARD_STREAMS["backfill"]

        self.assertTrue(backfill.negative)
        self.assertEqual(
            backfill.id_columns[0],
            IdColumn("events", "stream_ordering", "instance_name"),
        )

"""A few tables of a Synapse database with made-up rows, and these rows on the wire.

Columns and indexes that none of our queries uses are left out.
"""

from __future__ import annotations

from typing import Any

SCHEMA = """
CREATE TABLE events (
    stream_ordering bigint UNIQUE, event_id text NOT NULL UNIQUE, room_id text NOT NULL,
    type text NOT NULL, outlier boolean NOT NULL, instance_name text);
CREATE TABLE state_events (event_id text UNIQUE, state_key text NOT NULL);
CREATE TABLE redactions (event_id text UNIQUE, redacts text NOT NULL);
CREATE TABLE event_relations (event_id text UNIQUE, relates_to_id text NOT NULL);
CREATE TABLE room_memberships (event_id text UNIQUE, membership text NOT NULL);
CREATE TABLE rejections (event_id text UNIQUE, reason text NOT NULL);
CREATE TABLE ex_outlier_stream (
    event_stream_ordering bigint PRIMARY KEY, event_id text NOT NULL,
    instance_name text);
CREATE TABLE current_state_delta_stream (
    stream_id bigint NOT NULL, room_id text NOT NULL, type text NOT NULL,
    state_key text NOT NULL, event_id text, instance_name text);
CREATE INDEX current_state_delta_stream_idx ON current_state_delta_stream (stream_id);
CREATE TABLE presence_stream (
    stream_id bigint, user_id text, state text, last_active_ts bigint,
    last_federation_update_ts bigint, last_user_sync_ts bigint, status_msg text,
    currently_active boolean, instance_name text);
CREATE INDEX presence_stream_id ON presence_stream (stream_id, user_id);
CREATE TABLE receipts_linearized (
    stream_id bigint NOT NULL, room_id text NOT NULL, receipt_type text NOT NULL,
    user_id text NOT NULL, event_id text NOT NULL, data text NOT NULL,
    instance_name text, thread_id text);
CREATE INDEX receipts_linearized_id ON receipts_linearized (stream_id);
CREATE TABLE push_rules_stream (
    stream_id bigint NOT NULL, user_id text NOT NULL, rule_id text NOT NULL,
    instance_name text);
CREATE INDEX push_rules_stream_id ON push_rules_stream (stream_id);
CREATE TABLE pushers (
    id bigint PRIMARY KEY, user_name text NOT NULL, app_id text NOT NULL,
    pushkey text NOT NULL, instance_name text);
CREATE TABLE deleted_pushers (
    stream_id bigint NOT NULL, app_id text NOT NULL, pushkey text NOT NULL,
    user_id text NOT NULL, instance_name text);
CREATE INDEX deleted_pushers_stream_id ON deleted_pushers (stream_id);
CREATE TABLE cache_invalidation_stream_by_instance (
    stream_id bigint NOT NULL UNIQUE, instance_name text NOT NULL,
    cache_func text NOT NULL, keys text[], invalidation_ts bigint);
CREATE INDEX cache_invalidation_stream_by_instance_instance_index
    ON cache_invalidation_stream_by_instance (instance_name, stream_id);
CREATE TABLE device_lists_stream (
    stream_id bigint NOT NULL, user_id text NOT NULL, device_id text NOT NULL,
    instance_name text);
CREATE INDEX device_lists_stream_id ON device_lists_stream (stream_id, user_id);
CREATE TABLE device_lists_changes_in_room (
    stream_id bigint NOT NULL, user_id text NOT NULL, device_id text NOT NULL,
    room_id text NOT NULL, instance_name text, UNIQUE (stream_id, room_id));
CREATE TABLE user_signature_stream (
    stream_id bigint NOT NULL UNIQUE, from_user_id text NOT NULL, instance_name text);
CREATE TABLE device_lists_outbound_pokes (
    stream_id bigint NOT NULL, destination text NOT NULL, user_id text NOT NULL,
    device_id text NOT NULL, instance_name text);
CREATE INDEX device_lists_outbound_pokes_stream
    ON device_lists_outbound_pokes (stream_id);
CREATE TABLE device_inbox (
    stream_id bigint NOT NULL, user_id text NOT NULL, device_id text NOT NULL,
    instance_name text);
CREATE INDEX device_inbox_stream_id_user_id ON device_inbox (stream_id, user_id);
CREATE TABLE device_federation_outbox (
    stream_id bigint NOT NULL, destination text NOT NULL, instance_name text);
CREATE INDEX device_federation_outbox_id ON device_federation_outbox (stream_id);
CREATE TABLE account_data (
    stream_id bigint NOT NULL, user_id text NOT NULL, account_data_type text NOT NULL,
    instance_name text);
CREATE TABLE room_account_data (
    stream_id bigint NOT NULL, user_id text NOT NULL, room_id text NOT NULL,
    account_data_type text NOT NULL, instance_name text);
CREATE TABLE room_tags_revisions (
    stream_id bigint NOT NULL, user_id text NOT NULL, room_id text NOT NULL,
    instance_name text);
CREATE TABLE profile_updates (
    stream_id bigint PRIMARY KEY, instance_name text NOT NULL, user_id text NOT NULL,
    action text NOT NULL, affected_fields jsonb);
CREATE TABLE sticky_events (
    stream_id integer PRIMARY KEY, instance_name text NOT NULL, event_id text NOT NULL,
    room_id text NOT NULL);
CREATE TABLE thread_subscriptions (
    stream_id integer PRIMARY KEY, instance_name text NOT NULL, room_id text NOT NULL,
    event_id text NOT NULL, user_id text NOT NULL);
CREATE TABLE un_partial_stated_room_stream (
    stream_id bigint PRIMARY KEY, instance_name text NOT NULL, room_id text NOT NULL);
CREATE TABLE un_partial_stated_event_stream (
    stream_id bigint PRIMARY KEY, instance_name text NOT NULL, event_id text NOT NULL,
    rejection_status_changed boolean NOT NULL);
CREATE TABLE quarantined_media_changes (
    stream_id integer PRIMARY KEY, instance_name text NOT NULL, origin text,
    media_id text NOT NULL, quarantined boolean NOT NULL);
"""

ROWS = """
INSERT INTO events (stream_ordering, event_id, room_id, type, outlier, instance_name)
VALUES (2, '$create', '!r', 'm.room.create', FALSE, 'p1'),
       (3, '$join', '!r', 'm.room.member', FALSE, 'p1'),
       (4, '$other', '!s', 'm.room.message', FALSE, 'p2'),
       (5, '$react', '!r', 'm.reaction', FALSE, 'p1'),
       (6, '$redact', '!r', 'm.room.redaction', FALSE, 'p1'),
       (7, '$bad', '!r', 'm.room.message', TRUE, 'p1'),
       (-2, '$old', '!r', 'm.room.message', FALSE, 'p1'),
       (-3, '$older', '!r', 'm.room.topic', FALSE, 'p1'),
       (-4, '$oldest', '!r', 'm.room.message', FALSE, 'p2');
INSERT INTO state_events (event_id, state_key)
VALUES ('$create', ''), ('$join', '@a:x'), ('$older', '');
INSERT INTO room_memberships (event_id, membership) VALUES ('$join', 'join');
INSERT INTO event_relations (event_id, relates_to_id)
VALUES ('$react', '$join'), ('$old', '$older');
INSERT INTO redactions (event_id, redacts) VALUES ('$redact', '$react');
INSERT INTO rejections (event_id, reason) VALUES ('$bad', 'auth');
INSERT INTO ex_outlier_stream (event_stream_ordering, event_id, instance_name)
VALUES (8, '$bad', 'p1'), (-5, '$old', 'p1');
INSERT INTO current_state_delta_stream
    (stream_id, room_id, type, state_key, event_id, instance_name)
VALUES (2, '!r', 'm.room.create', '', '$create', 'p1'),
       (3, '!r', 'm.room.member', '@a:x', '$join', 'p1'),
       (3, '!r', 'm.room.member', '@b:x', NULL, 'p1'),
       (4, '!s', 'm.room.name', '', '$name', 'p2');
INSERT INTO presence_stream VALUES
    (2, '@a:x', 'online', 1, 2, 3, NULL, TRUE, 'master'),
    (5, '@b:x', 'unavailable', 0, 2, 3, 'tea', FALSE, 'master');
INSERT INTO receipts_linearized VALUES
    (2, '!r', 'm.read', '@a:x', '$join', '{"ts": 1795207381916}', 'w', NULL),
    (3, '!r', 'm.read', '@b:x', '$join', '{}', 'w', 'main'),
    (4, '!r', 'm.read', '@c:x', '$join', '{}', 'another', NULL);
INSERT INTO push_rules_stream VALUES
    (2, '@a:x', 'one', 'master'), (2, '@a:x', 'two', 'master'),
    (3, '@a:x', 'one', 'master');
INSERT INTO pushers VALUES (4, '@a:x', 'app', 'key 1', 'master');
INSERT INTO deleted_pushers VALUES (3, 'app', 'key 2', '@b:x', 'master');
INSERT INTO cache_invalidation_stream_by_instance VALUES
    (2, 'master', 'get_user_by_id', '{@a:x}', 7), (3, 'p1', 'f', '{a,b}', 8),
    (4, 'master', 'ignored_by', NULL, 9), (5, 'master', 'g', '{}', NULL);
INSERT INTO device_lists_stream VALUES
    (3, '@a:x', 'D1', 'master'), (4, '@a:x', 'D1', 'master'), (4, '@a:x', 'D2',
    'master');
INSERT INTO device_lists_changes_in_room VALUES
    (2, '@a:x', 'D1', '!r', 'master'), (2, '@a:x', 'D1', '!s', 'master'),
    (3, '@a:x', 'D1', '!r', 'master');
INSERT INTO user_signature_stream VALUES (5, '@b:x', 'master');
INSERT INTO device_lists_outbound_pokes VALUES
    (6, 'one.example', '@a:x', 'D1', 'master'),
    (6, 'two.example', '@a:x', 'D1', 'master');
INSERT INTO device_inbox VALUES
    (2, '@b:x', 'D1', 'w'), (2, '@a:x', 'D1', 'w'), (2, '@a:x', 'D2', 'w');
INSERT INTO device_federation_outbox VALUES
    (2, 'remote.example', 'w'), (3, 'remote.example', 'w');
INSERT INTO account_data VALUES (2, '@a:x', 't.bed', NULL);
INSERT INTO room_account_data VALUES (4, '@a:x', '!r', 'm.fully_read', NULL);
INSERT INTO room_tags_revisions VALUES (3, '@a:x', '!r', NULL);
INSERT INTO profile_updates VALUES
    (2, 'p1', '@a:x', 'joined_room', NULL),
    (3, 'p2', '@a:x', 'update', '["displayname"]');
INSERT INTO sticky_events VALUES (2, 'p1', '$sticky', '!r');
INSERT INTO thread_subscriptions VALUES (2, 'master', '!r', '$root', '@a:x');
INSERT INTO un_partial_stated_room_stream VALUES (2, 'master', '!r');
INSERT INTO un_partial_stated_event_stream VALUES (2, 'master', '$e', TRUE);
INSERT INTO quarantined_media_changes VALUES
    (2, 'master', NULL, 'm1', TRUE), (3, 'master', 'remote.example', 'm2', FALSE);
"""

#: Maps (stream, writer) to the tokens and rows as the writer would have sent them.
ON_THE_WIRE: dict[tuple[str, str], list[tuple[int, Any]]] = {
    ("events", "p1"): [
        (
            2,
            [
                "ev",
                ["$create", "!r", "m.room.create", "", None, None, None, False, False],
            ],
        ),
        (2, ["state", ["!r", "m.room.create", "", "$create"]]),
        (
            3,
            [
                "ev",
                [
                    "$join",
                    "!r",
                    "m.room.member",
                    "@a:x",
                    None,
                    None,
                    "join",
                    False,
                    False,
                ],
            ],
        ),
        (3, ["state", ["!r", "m.room.member", "@a:x", "$join"]]),
        (3, ["state", ["!r", "m.room.member", "@b:x", None]]),
        (
            5,
            [
                "ev",
                ["$react", "!r", "m.reaction", None, None, "$join", None, False, False],
            ],
        ),
        (
            6,
            [
                "ev",
                [
                    "$redact",
                    "!r",
                    "m.room.redaction",
                    None,
                    "$react",
                    None,
                    None,
                    False,
                    False,
                ],
            ],
        ),
        (
            7,
            [
                "ev",
                ["$bad", "!r", "m.room.message", None, None, None, None, True, True],
            ],
        ),
        (
            8,
            [
                "ev",
                ["$bad", "!r", "m.room.message", None, None, None, None, True, True],
            ],
        ),
    ],
    ("events", "p2"): [
        (
            4,
            [
                "ev",
                [
                    "$other",
                    "!s",
                    "m.room.message",
                    None,
                    None,
                    None,
                    None,
                    False,
                    False,
                ],
            ],
        ),
        (4, ["state", ["!s", "m.room.name", "", "$name"]]),
    ],
    ("backfill", "p1"): [
        (2, ["$old", "!r", "m.room.message", None, None, "$older"]),
        (3, ["$older", "!r", "m.room.topic", "", None, None]),
        (5, ["$old", "!r", "m.room.message", None, None, "$older"]),
    ],
    ("backfill", "p2"): [(4, ["$oldest", "!r", "m.room.message", None, None, None])],
    ("presence", "master"): [
        (2, ["@a:x", "online", 1, 2, 3, None, True]),
        (5, ["@b:x", "unavailable", 0, 2, 3, "tea", False]),
    ],
    ("receipts", "w"): [
        (2, ["!r", "m.read", "@a:x", "$join", None, {"ts": 1795207381916}]),
        (3, ["!r", "m.read", "@b:x", "$join", "main", {}]),
    ],
    ("push_rules", "master"): [(2, ["@a:x"]), (3, ["@a:x"])],
    ("pushers", "master"): [
        (3, ["@b:x", "app", "key 2", True]),
        (4, ["@a:x", "app", "key 1", False]),
    ],
    ("caches", "master"): [
        (2, ["get_user_by_id", ["@a:x"], 7]),
        (4, ["ignored_by", None, 9]),
        (5, ["g", [], None]),
    ],
    ("caches", "p1"): [(3, ["f", ["a", "b"], 8])],
    ("device_lists", "master"): [
        (2, ["@a:x", False, False]),
        (3, ["@a:x", False, False]),
        (4, ["@a:x", False, False]),
        (5, ["@b:x", True, False]),
        (6, ["@a:x", False, True]),
    ],
    ("to_device", "w"): [
        (2, ["@a:x"]),
        (2, ["@b:x"]),
        (2, ["remote.example"]),
        (3, ["remote.example"]),
    ],
    ("account_data", "master"): [
        (2, ["@a:x", None, "t.bed"]),
        (3, ["@a:x", "!r", "m.tag"]),
        (4, ["@a:x", "!r", "m.fully_read"]),
    ],
    ("profile_updates", "p1"): [(2, ["@a:x", "joined_room", None])],
    ("profile_updates", "p2"): [(3, ["@a:x", "update", ["displayname"]])],
    ("sticky_events", "p1"): [(2, ["!r", "$sticky"])],
    ("thread_subscriptions", "master"): [(2, ["@a:x", "!r", "$root"])],
    ("un_partial_stated_room", "master"): [(2, ["!r"])],
    ("un_partial_stated_event", "master"): [(2, ["$e", True])],
    ("quarantined_media", "master"): [
        (2, [None, "m1", True]),
        (3, ["remote.example", "m2", False]),
    ],
}

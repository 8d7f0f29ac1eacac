"""Tests for :mod:`synapse_replication.cli.follow`."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.cli.follow import (
    Filters,
    Follow,
    make_follower,
    make_printer,
    parse_line,
)
from synapse_replication.config.process import load_config
from synapse_replication.errors import ReplicationError
from tests.support.config_files import FilesMixin

USER_IP = b'USER_IP @u:s ["syt_secret","1.2.3.4","agent","DEV",1700000000000]'


class FollowTests(SynchronousTestCase):
    def follow(self, *lines: bytes, as_json: bool, filters: Filters) -> str:
        out = io.StringIO()
        self.now = 10.0
        self.subject = Follow(make_printer(out, as_json), filters, lambda: self.now)
        for line in lines:
            self.subject.receive("s", line)
            self.now += 0.25
        return out.getvalue()

    def as_json(
        self, *lines: bytes, filters: Filters | None = None
    ) -> list[dict[str, Any]]:
        text = self.follow(*lines, as_json=True, filters=filters or Filters())
        return [json.loads(line) for line in text.splitlines()]

    def as_text(self, *lines: bytes) -> str:
        return self.follow(*lines, as_json=False, filters=Filters())

    def test_json_is_a_recording_with_fields(self) -> None:
        """A JSON entry has the fields of a recording and the fields of the command."""
        row, position = self.as_json(
            b'RDATA events w1 7 ["ev",["a"]]', b"POSITION events w2 3 9"
        )
        self.assertEqual(
            row,
            {
                "t": 10.0,
                "channel": "s",
                "line": 'RDATA events w1 7 ["ev",["a"]]',
                "command": "RDATA",
                "stream_name": "events",
                "instance_name": "w1",
                "token": 7,
                "row": ["ev", ["a"]],
            },
        )
        self.assertEqual(position["t"], 10.25)
        self.assertEqual((position["prev_token"], position["new_token"]), (3, 9))

    def test_line_is_exact(self) -> None:
        """The recorded line is exactly the received one, including spaces."""
        lines = [b"REPLICATE ", b'RDATA caches m batch ["f", ["x"],  1]']
        seen = self.as_json(*lines)
        self.assertEqual([entry["line"].encode() for entry in seen], lines)

    def test_access_token_is_masked(self) -> None:
        """An access token is masked in JSON and in text."""
        (entry,) = self.as_json(USER_IP)
        self.assertNotIn("syt_secret", json.dumps(entry))
        self.assertEqual(entry["access_token"], "***")
        self.assertIn('["***","1.2.3.4"', entry["line"])
        self.assertNotIn("syt_secret", self.as_text(USER_IP))

    def test_access_token_of_a_bad_line_is_masked(self) -> None:
        """The content of an invalid USER_IP line is masked completely."""
        line = b'USER_IP @u:s ["syt_secret"]'
        (entry,) = self.as_json(line)
        self.assertEqual(entry["line"], "USER_IP ***")
        self.assertNotIn("syt_secret", json.dumps(entry) + self.as_text(line))

    def test_unreadable_line(self) -> None:
        """An invalid line is shown with the error."""
        (entry,) = self.as_json(b"POSITION events w1 x 7")
        self.assertEqual(entry["command"], "POSITION")
        self.assertIn("cannot parse POSITION", entry["error"])
        self.assertIn("unknown command NEWER", self.as_text(b"NEWER thing"))

    def test_text(self) -> None:
        """
        A text line shows the time since the first line, then the parts of the command.
        """
        text = self.as_text(
            b'RDATA events w1 batch ["x"]', b"POSITION typing w2 0 4", b"PING 17"
        )
        self.assertEqual(
            [" ".join(line.split()) for line in text.splitlines()],
            [
                '0.000 RDATA events of w1 batch ["x"]',
                "0.250 POSITION typing of w2 0 -> 4",
                "0.500 PING 17",
            ],
        )

    def test_colours(self) -> None:
        """On a terminal the command is highlighted."""

        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        old = {name: os.environ.pop(name, None) for name in ("NO_COLOR", "TERM")}
        self.addCleanup(
            lambda: os.environ.update({k: v for k, v in old.items() if v is not None})
        )
        os.environ["TERM"] = "xterm"
        out = Terminal()
        make_printer(out, as_json=False)(parse_line(1.0, "x", b"PING 17"))
        self.assertIn("\x1b[1;36mPING", out.getvalue())

    def test_long_line_is_one_line(self) -> None:
        """A long line is not wrapped, so that grep can find all of its text."""
        text = self.as_text(b'RDATA events w1 7 ["' + b"x" * 500 + b'"]')
        self.assertEqual(len(text.splitlines()), 1)

    def test_terminal_is_not_commanded(self) -> None:
        """Control characters in received lines are escaped."""
        text = self.as_text("ERROR \x1b[31mred\x9b2J".encode())
        self.assertIn("\\x1b[31mred\\x9b2J", text)

    def test_markup_is_not_obeyed(self) -> None:
        """Markup of the printing library in a line is printed literally."""
        self.assertIn("[bold]x[/bold]", self.as_text(b"PING [bold]x[/bold]"))

    def test_filters(self) -> None:
        """
        Each filter admits the lines that it names, and a line must match all filters.
        """
        lines = [
            b"POSITION events w1 1 2",
            b"POSITION events w2 1 2",
            b"POSITION typing w1 1 2",
            b"PING 1",
            b'LOCK_RELEASED ["w1","a","b"]',
        ]

        def admitted(**filters: frozenset[str]) -> list[str]:
            seen = self.as_json(*lines, filters=Filters(**filters))
            return [" ".join(entry["line"].split()[:3]) for entry in seen]

        self.assertEqual(
            admitted(streams=frozenset({"events"})),
            ["POSITION events w1", "POSITION events w2"],
        )
        self.assertEqual(
            admitted(writers=frozenset({"w1"})),
            [
                "POSITION events w1",
                "POSITION typing w1",
                'LOCK_RELEASED ["w1","a","b"]',
            ],
        )
        self.assertEqual(admitted(commands=frozenset({"PING"})), ["PING 1"])
        self.assertEqual(
            admitted(streams=frozenset({"events"}), writers=frozenset({"w2"})),
            ["POSITION events w2"],
        )

    def test_positions_of_writer(self) -> None:
        """
        The reported positions are restricted to the streams and writers of the filters.
        """
        self.as_json(
            b"POSITION typing w 3 9",
            b"POSITION typing other 0 4",
            b"POSITION caches other 0 5",
            filters=Filters(
                writers=frozenset({"other"}), streams=frozenset({"typing"})
            ),
        )
        self.assertEqual(self.subject.positions(), [("typing", "other", 4)])

    def test_positions(self) -> None:
        """
        The last position of each writer is reported, also if its lines are not printed.
        """
        self.as_json(
            b"POSITION typing w 3 9",
            b"POSITION typing w 0 0",
            b'RDATA caches w batch ["f",null,1]',
            b'RDATA caches w 9 ["f",null,1]',
            b'RDATA caches w 7 ["f",null,1]',
            filters=Filters(commands=frozenset({"PING"})),
        )
        self.assertEqual(
            self.subject.positions(), [("caches", "w", 9), ("typing", "w", 0)]
        )


class MakeFollowerTests(FilesMixin):
    def test_reason_is_reported(self) -> None:
        """If the output cannot be written, the follower fails with the reason."""
        config = load_config(
            [
                self.write(
                    "hs.yaml",
                    "server_name: x.test\nworker_replication_port: 9092\n",
                )
            ],
            "follow",
        )
        reactor: Any = MemoryReactorClock()
        with Path("/dev/full").open("w", buffering=1) as out:
            follower = make_follower(
                config,
                reactor,
                filters=Filters(),
                as_json=True,
                with_positions=False,
                out=out,
            )
            follower.startService()
            protocol = reactor.tcpClients[0][2].buildProtocol(None)
            assert protocol is not None
            protocol.makeConnection(StringTransport())
            protocol.dataReceived(b"SERVER x.test\n")
            reactor.advance(0)
        error = self.failureResultOf(follower.started, ReplicationError)
        self.assertIn("cannot write: No space left", str(error.value))

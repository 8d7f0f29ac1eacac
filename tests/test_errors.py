"""Tests for the tree of errors."""

from __future__ import annotations

import inspect
import re

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication import errors
from synapse_replication.errors import (
    ConfigError,
    ConfigProblem,
    HttpCatchUpError,
    LineTooLongError,
    ReplicationError,
    RowDecodeError,
    SequenceBehindError,
    TokenError,
    UnknownCommandError,
    UnparsableLineError,
    WaitTimeoutError,
    excerpt,
)


def drawn_tree() -> dict[str, str]:
    """Return the tree drawn in the module's docstring, as parent by child."""
    assert errors.__doc__ is not None
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"    ((?:[|+ ] {0,2}-*\s*)*)(\w+(?:Error))", line)
        if match is not None:
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            if depth:
                parents[match[2]] = path[depth - 1]
    return parents


class TreeTests(SynchronousTestCase):
    """Tests for the inheritance of the errors."""

    def test_tree(self) -> None:
        """The tree drawn in the docstring matches the classes."""
        classes = {
            name: value
            for name, value in vars(errors).items()
            if inspect.isclass(value) and issubclass(value, ReplicationError)
        }
        self.assertEqual(
            drawn_tree(),
            {
                name: value.__bases__[0].__name__
                for name, value in classes.items()
                if value is not ReplicationError
            },
        )


class MessageTests(SynchronousTestCase):
    """Tests for the messages and attributes of the errors."""

    def test_excerpt(self) -> None:
        """Foreign text in a message is short and printable."""
        self.assertEqual(excerpt("a\n\x1b[31m\u202e"), r"a\n\x1b[31m\u202e")
        self.assertEqual(excerpt(b"a\xff"), r"a\ufffd")
        self.assertEqual(excerpt("x" * 121), "x" * 120 + "...")
        self.assertEqual(excerpt("x" * 120), "x" * 120)

    def test_wire(self) -> None:
        """Errors about lines name the command, and have the numbers as attributes."""
        too_long = LineTooLongError("RDATA", 20000, 16384)
        self.assertEqual((too_long.length, too_long.limit), (20000, 16384))
        self.assertIn("RDATA line of 20000 bytes", str(too_long))
        self.assertEqual(
            str(UnknownCommandError("WHAT_ELSE")), "unknown command WHAT_ELSE"
        )
        for word in ("a\nb", "syt_dG9rZW4", '["syt_dG9rZW4"', "A" * 41, ""):
            text = str(UnknownCommandError(word))
            self.assertEqual(
                text,
                f"unknown command (a word of {len(word)} characters, not shown)",
            )
        self.assertEqual(
            str(UnparsableLineError("POSITION", "no token")),
            "cannot parse POSITION line: no token",
        )
        self.assertIn("row of events: why", str(RowDecodeError("events", 3, "why")))
        self.assertEqual(str(TokenError("m1~", "why")), "m1~ is not a token: why")

    def test_config(self) -> None:
        """All problems of a configuration are reported together."""
        problems = [
            ConfigProblem("a.yaml", "redis.port", "it is no number", "write 6379"),
            ConfigProblem("b.yaml", "server_name", "it is missing", "add it"),
        ]
        error = ConfigError(problems)
        self.assertEqual(error.problems, tuple(problems))
        self.assertEqual(
            str(error),
            "a.yaml: redis.port: it is no number; write 6379\n"
            "b.yaml: server_name: it is missing; add it",
        )
        self.assertIn("redis.port", repr(problems[0]))

    def test_http(self) -> None:
        """A failed request is reported with its status, as unanswered, or as unsent."""
        refused = HttpCatchUpError("GET", "http://x/y", 401, "no", "set the secret")
        self.assertEqual(
            str(refused), "GET http://x/y answered 401: no; set the secret"
        )
        silent = HttpCatchUpError("GET", "http://x/y", None, "timed out")
        self.assertEqual(str(silent), "GET http://x/y did not answer: timed out")
        unsent = HttpCatchUpError(
            "GET", "events of w1", None, "no address", "add w1", was_sent=False
        )
        self.assertEqual(
            str(unsent), "GET events of w1 was not sent: no address; add w1"
        )

    def test_storage(self) -> None:
        """A sequence that is behind is reported with the SQL that repairs it."""
        error = SequenceBehindError("events_stream_seq", "table events", 5, 9)
        self.assertEqual(error.hint, "SELECT setval('events_stream_seq', 9, true);")
        for part in (
            "events_stream_seq is at 5",
            "table events has 9",
            error.hint,
        ):
            self.assertIn(part, str(error))
        far = SequenceBehindError("seq", "table t", 5, 2**62, suspect="look at row 1")
        self.assertEqual(far.hint, "")
        self.assertIn("leave the sequence as it is: look at row 1", str(far))

    def test_wait(self) -> None:
        """A wait that timed out reports the position of the writer."""
        error = WaitTimeoutError("events", "w1", 9, 5)
        self.assertEqual((error.position, error.current), (9, 5))
        self.assertIn("events of w1 is at 5 and did not reach 9", str(error))

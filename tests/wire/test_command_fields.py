"""Tests of the helpers that all commands share."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import LocalProtocolError
from synapse_replication.wire.commands import encode_text, parse_token

TOKENS = st.integers(-(2**63), 2**63 - 1)


class TokenTests(SynchronousTestCase):
    """Tokens are decimal 64-bit integers."""

    @settings(derandomize=True, deadline=None)
    @given(TOKENS)
    def test_all_are_read(self, token: int) -> None:
        """Every 64-bit integer is a token."""
        self.assertEqual(parse_token(str(token)), token)

    def test_other_texts_are_refused(self) -> None:
        """Any other text, even if ``int`` accepts it, is refused."""
        for text in (
            "",
            "-",
            "+1",
            " 1",
            "1 ",
            "1_0",
            "--1",
            "0x1",
            "1.0",
            "\u0661",
            "\u00b2",
            str(2**63),
            str(-(2**63) - 1),
            "9" * 10_000,
        ):
            self.assertRaises(ValueError, parse_token, text)


class TextTests(SynchronousTestCase):
    """Text within one line."""

    def test_text(self) -> None:
        """Text is encoded as UTF-8."""
        self.assertEqual(encode_text("PING", "PING \u00e4\r"), b"PING \xc3\xa4\r")

    def test_no_line(self) -> None:
        """
        A line end or a lone surrogate is refused by an error that names the command.
        """
        for text in ("a\nb", "\ud800"):
            with self.assertRaisesRegex(LocalProtocolError, "PING cannot be sent"):
                encode_text("PING", text)

"""Tests of removing secrets from the host's errors."""

from __future__ import annotations

import traceback

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import HostError
from synapse_replication.handlers.redaction import without_secrets
from synapse_replication.wire.commands import (
    Command,
    InvalidateCacheCommand,
    RemoteServerUpCommand,
    UserIpCommand,
)

USER_IP = UserIpCommand("@a:b", "syt_secret", "192.0.2.1", "x", None, 1)


def failing(text: str) -> None:
    raise ValueError(text)


class WithoutSecretsTests(SynchronousTestCase):
    """Tests for without_secrets."""

    def shown(
        self, text: str, command: Command, *, as_cause: bool = False
    ) -> Exception:
        """Raise an error with a text; return what may be logged of it."""
        try:
            try:
                failing(text)
            except ValueError as error:
                if as_cause:
                    raise KeyError("no text") from error
                raise
        except Exception as error:  # noqa: BLE001 -- as the handler does
            return without_secrets(error, command)
        raise AssertionError

    def test_token_is_cut_out(self) -> None:
        """
        The token is removed from the message and the traceback; their other text
        remains.
        """
        error = self.shown("Key (token)=(syt_secret) is there", USER_IP)
        self.assertIsInstance(error, HostError)
        self.assertEqual(str(error), "ValueError: Key (token)=(***) is there")
        printed = "".join(traceback.format_exception(error))
        self.assertNotIn("syt_secret", printed)
        self.assertIn("in failing", printed)

    def test_cause_is_redacted(self) -> None:
        """A token in the cause of an error is removed as well."""
        error = self.shown("syt_secret", USER_IP, as_cause=True)
        self.assertNotIn("syt_secret", "".join(traceback.format_exception(error)))

    def test_nothing_secret(self) -> None:
        """An error that contains no secret is returned unchanged."""
        self.assertIsInstance(self.shown("no disk", USER_IP), ValueError)
        command = RemoteServerUpCommand("syt_secret")
        self.assertIsInstance(self.shown("syt_secret", command), ValueError)

    def test_keys_of_caches(self) -> None:
        """Keys of an INVALIDATE_CACHE may be tokens, so they are removed."""
        command = InvalidateCacheCommand("get_user", ["syt_secret", 5])
        self.assertEqual(
            str(self.shown("no syt_secret here", command)), "ValueError: no *** here"
        )
        self.assertIsInstance(
            self.shown("x", InvalidateCacheCommand("f", None)), ValueError
        )

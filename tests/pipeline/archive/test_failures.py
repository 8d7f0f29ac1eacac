"""Tests for :mod:`synapse_replication.pipeline.archive.failures`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.archive.failures import reason_of

_CHAIN = (
    "Kernel error -> Generic S3 error\n \x1b[31m\u21b3\x1b[0m Error performing GET "
    "http://127.0.0.1:9/bucket in 2 s\n  \x1b[31m\u21b3\x1b[0m {}\n"
)


class ReasonTests(SynchronousTestCase):
    """Tests for the cause and the hint of an error."""

    def test_answer(self) -> None:
        """The answer of an S3 server is the cause."""
        answer = (
            '404 Not Found <?xml version="1.0"?>\n<Error><Code>NoSuchBucket</Code>'
            "<Message>The specified bucket does not exist</Message></Error>"
        )
        self.assertEqual(
            reason_of(_CHAIN.format(answer)),
            "NoSuchBucket: The specified bucket does not exist; create the bucket, or "
            "correct --archive",
        )

    def test_end_of_chain(self) -> None:
        """The last elements of a chain are the cause, in one line."""
        reason = reason_of(_CHAIN.format("error sending request\n \u21b3 refused"))
        self.assertEqual(
            reason,
            "Error performing GET http://127.0.0.1:9/bucket in 2 s: error sending "
            "request: refused; check AWS_ENDPOINT_URL, or Amazon's default, and the "
            "network",
        )

    def test_hints(self) -> None:
        """Typical causes have a hint."""
        for text, hint in {
            "SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY",
            "AccessDenied": "rights of these credentials",
            "PUT http://169.254.169.254/latest/api/token": "no credentials",
            "PermanentRedirect": "AWS_REGION",
            "[Errno 13] Permission denied: '/srv'": "rights of this user",
            "[Errno 28] No space left on device": "free some space",
        }.items():
            self.assertIn(hint, reason_of(text))

    def test_long(self) -> None:
        """The end of a long cause is shown."""
        reason = reason_of("a" * 5000 + " the cause")
        self.assertTrue(reason.endswith(" the cause"))
        self.assertLess(len(reason), 400)

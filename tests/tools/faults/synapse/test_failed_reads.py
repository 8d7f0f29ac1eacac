"""Tests for :mod:`scripts.tools.faults.synapse.failed_reads`."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from scripts.tools.faults.synapse.failed_reads import users_of_failed_reads

TIMESTAMP = "2026-11-22 16:32:38,635 - "


def failed(
    request: str, transaction: str = "_get_linearized_receipts_for_rooms"
) -> str:
    return (
        f"{TIMESTAMP}synapse.storage.txn - 840 - WARNING - {request} - [TXN OPERROR] "
        f"{{{transaction}-155}} server closed the connection unexpectedly"
    )


def answered(request: str, user: str, status: int = 200, path: str = "sync") -> str:
    return (
        f"{TIMESTAMP}synapse.access.http.45653 - 643 - INFO - {request} - "
        f"127.0.0.1 - 45653 - "
        f"{{{user}}} Processed request: 2.002sec/0.005sec ru=(0.003sec, 0.000sec) "
        f"db=(0.002sec/0.001sec/1) 139B {status} "
        f'"GET /_matrix/client/v3/{path}?timeout=2000 HTTP/1.1" "-" [0 dbevts]'
    )


class UsersOfFailedReadsTests(SynchronousTestCase):
    def test_response_with_failed_read(self) -> None:
        """
        A user whose request succeeded although it failed to read receipts is named.
        """
        lines = [
            failed("GET-3"),
            answered("GET-2", "@a:b"),
            answered("GET-3", "@bob:b"),
        ]
        self.assertEqual(users_of_failed_reads(lines), {"@bob:b"})

    def test_other_requests(self) -> None:
        """
        An error, another request and another transaction do not count as failed reads.
        """
        for lines in (
            [failed("GET-3"), answered("GET-3", "@bob:b", status=500)],
            [failed("GET-3"), answered("GET-3", "@bob:b", path="notifications")],
            [failed("GET-3", "get_if_user"), answered("GET-3", "@bob:b")],
            [answered("GET-3", "@bob:b"), failed("GET-3")],
        ):
            self.assertEqual(users_of_failed_reads(lines), set(), lines)

"""Tests of requesting rows from a writer before the database."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import HttpCatchUpError
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.receiving.partial_resync import (
    BACKLOG_PAUSE,
    PartialResync,
)
from synapse_replication.streams.stream import StreamUpdateResult
from tests.support.recording_observer import RecordingHost

_PAGE = StreamUpdateResult([(2, ["x"])], 2, False)


class PartialResyncTests(SynchronousTestCase):
    """Tests for :class:`PartialResync`."""

    def setUp(self) -> None:
        self.host = RecordingHost()
        self.epochs = PeerEpochs()
        self.backlog_requests: list[tuple[str, str, str, int, int]] = []
        self.answer: StreamUpdateResult | HttpCatchUpError = _PAGE
        self.partial = PartialResync(
            self.epochs, self.request_backlog, self.host.clock, self.host.observer
        )

    async def request_backlog(
        self, stream: str, instance: str, epoch: str, from_token: int, upto_token: int
    ) -> StreamUpdateResult:
        self.backlog_requests.append((stream, instance, epoch, from_token, upto_token))
        if isinstance(self.answer, HttpCatchUpError):
            raise self.answer
        return self.answer

    def fetch(self) -> StreamUpdateResult | None:
        return self.successResultOf(
            Deferred.fromCoroutine(self.partial.get_updates_since("s", "w", 1, 2))
        )

    def refuse(self, status: int | None) -> None:
        self.answer = HttpCatchUpError("GET", "url", status, "no")

    def test_stock_writer(self) -> None:
        """No backlog is requested from a writer that does not speak the extension."""
        self.assertIsNone(self.fetch())
        self.assertEqual(self.backlog_requests, [])

    def test_writer_without_backlog(self) -> None:
        """
        No backlog is requested from a writer that has the extension but no backlog.
        """
        self.epochs.record_message("w", "abc", 0, has_backlog=False)
        self.assertIsNone(self.fetch())
        self.assertEqual(self.backlog_requests, [])
        self.epochs.record_message("w", "abc", 1)
        self.assertEqual(self.fetch(), _PAGE)

    def test_rows(self) -> None:
        """A request to a writer contains its epoch, and the returned rows are used."""
        self.epochs.record_message("w", "abc", 0)
        self.assertEqual(self.fetch(), _PAGE)
        self.assertEqual(self.backlog_requests, [("s", "w", "abc", 1, 2)])

    def test_no_progress(self) -> None:
        """An answer that does not advance the position is ignored."""
        self.epochs.record_message("w", "abc", 0)
        self.answer = StreamUpdateResult([], 1, True)
        self.assertIsNone(self.fetch())

    def test_refusals(self) -> None:
        """
        After 409 or 410, the next request is sent to the writer again; after any other
        failure, no request is sent to it for a while.
        """
        self.epochs.record_message("w", "abc", 0)
        statuses: tuple[int | None, ...] = (409, 410)
        for status in statuses:
            self.refuse(status)
            self.assertIsNone(self.fetch())
        self.assertEqual(len(self.backlog_requests), 2)
        statuses = (None, 401, 404, 500)
        for status in statuses:
            del self.backlog_requests[:]
            self.refuse(status)
            self.assertIsNone(self.fetch())
            self.assertIsNone(self.fetch())
            self.assertEqual(len(self.backlog_requests), 1)
            self.host.reactor.advance(BACKLOG_PAUSE)
        self.answer = _PAGE
        self.assertEqual(self.fetch(), _PAGE)
        self.assertEqual(len(self.host.observer.backlog_answers), 7)

"""Fetching of rows from a writer's backlog, before the database is queried.

Theory of operation: a writer whose epoch is known speaks the extension. If its messages
say that it has a backlog, the rows are requested from the backlog first. The writer
serves only rows of that epoch, so that rows of different epochs are never mixed. If the
request fails, the rows are fetched from the stream's own source. If the writer does not
answer, or answers with an unexpected error, its backlog is not requested again for a
while. Otherwise, a hung process would delay each page of its readers' catch-ups.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import attrs

from synapse_replication.errors import HttpCatchUpError
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.events import BacklogRequested
from synapse_replication.handlers.interfaces import Clock
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.streams.stream import StreamUpdateResult

#: The time for which a writer's backlog is not requested after the writer did not
#: answer, or answered with an unexpected error, in s.
BACKLOG_PAUSE = 30.0
#: Statuses with which a working writer refuses a request: another epoch (409), or the
#: rows are not in its backlog (410).
_ORDERLY_REFUSALS = frozenset({409, 410})

#: ``(stream_name, instance_name, epoch, from_token, upto_token) -> rows``; fails with
#: :exc:`~synapse_replication.errors.HttpCatchUpError`.
RequestRows: TypeAlias = Callable[
    [str, str, str, int, int], Awaitable[StreamUpdateResult]
]


@attrs.define(eq=False, repr=False)
class PartialResync:
    """Client of the backlogs of all writers.

    :param epochs: the epochs of the peers that speak the extension.
    :param request_rows: requests rows from a writer once, with a short timeout.
    """

    _epochs: PeerEpochs
    _request_rows: RequestRows
    _clock: Clock
    _observer: ReplicationObserver
    _skipped_until: dict[str, float] = attrs.field(factory=dict, init=False)

    async def get_updates_since(
        self, stream_name: str, instance_name: str, from_token: int, upto_token: int
    ) -> StreamUpdateResult | None:
        """Fetch one page of a writer's rows in ``(from_token, upto_token]``.

        :return: the page; ``None`` if no request was made to the writer, or if the
            request failed or made no progress.
        """
        epoch = self._epochs.epoch_of(instance_name)
        now = self._clock.seconds()
        if epoch is None or not self._epochs.has_backlog(instance_name):
            return None
        if now < self._skipped_until.get(instance_name, now):
            return None
        try:
            result = await self._request_rows(
                stream_name, instance_name, epoch, from_token, upto_token
            )
        except HttpCatchUpError as error:
            if error.status not in _ORDERLY_REFUSALS:
                self._skip_for_a_while(instance_name)
            self._observer.observe(BacklogRequested(stream_name, instance_name, error))
            return None
        if result.upto_token <= from_token:
            # No progress: fall through to the stream's own source.
            return None
        self._observer.observe(BacklogRequested(stream_name, instance_name, None))
        return result

    def _skip_for_a_while(self, instance_name: str) -> None:
        now = self._clock.seconds()
        entries = self._skipped_until.items()
        self._skipped_until = {name: until for name, until in entries if until > now}
        self._skipped_until[instance_name] = now + BACKLOG_PAUSE

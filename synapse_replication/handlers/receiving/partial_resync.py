"""Asking a writer for what it still has in its backlog, before a database is asked.

Theory of operation: a writer whose epoch is known speaks our extension, and is asked
first. It answers only for that epoch, so that rows of another start are never mixed in.
Whatever else it says, the rows are fetched where they always are; one that does not
answer at all is left alone for a while, so that a process which hangs delays the
catch-up of its readers once and not page by page.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from synapse_replication.errors import HttpCatchUpError
from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.interfaces import Clock
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.streams.stream import StreamUpdateResult

__all__ = ["AskBacklog", "PartialResync"]

#: How long a writer that did not answer is left alone, in s.
LEAVE_ALONE_FOR = 30.0
#: It does not have the rows, or is of another epoch.
_ORDERLY_REFUSALS = frozenset({409, 410})

AskBacklog: TypeAlias = Callable[
    [str, str, str, int, int], Awaitable[StreamUpdateResult]
]
"""``(stream_name, instance_name, epoch, from_token, upto_token) -> rows``; fails with
:exc:`~synapse_replication.errors.HttpCatchUpError`."""


class PartialResync:
    """Fetches rows from the backlogs of writers.

    :param epochs: who speaks our extension, and with which epoch.
    :param ask: asks one writer, once, for a short time.
    """

    def __init__(
        self,
        epochs: PeerEpochs,
        ask: AskBacklog,
        clock: Clock,
        observer: ReplicationObserver,
    ) -> None:
        self._epochs = epochs
        self._ask = ask
        self._clock = clock
        self._observer = observer
        self._left_alone_until: dict[str, float] = {}

    async def get_updates_since(
        self, stream_name: str, instance_name: str, from_token: int, upto_token: int
    ) -> StreamUpdateResult | None:
        """Fetch a writer's rows in ``(from_token, upto_token]``, one page.

        :return: ``None`` if the writer cannot be asked or does not have them.
        """
        epoch = self._epochs.epoch_of(instance_name)
        now = self._clock.seconds()
        if epoch is None or not self._epochs.has_backlog(instance_name):
            return None
        if now < self._left_alone_until.get(instance_name, now):
            return None
        try:
            result = await self._ask(
                stream_name, instance_name, epoch, from_token, upto_token
            )
        except HttpCatchUpError as error:
            if error.status not in _ORDERLY_REFUSALS:
                self._leave_alone(instance_name)
            self._observer.backlog_asked(stream_name, instance_name, error)
            return None
        if result.upto_token <= from_token:
            # It would not bring us on.
            return None
        self._observer.backlog_asked(stream_name, instance_name, None)
        return result

    def _leave_alone(self, instance_name: str) -> None:
        now = self._clock.seconds()
        still = self._left_alone_until.items()
        self._left_alone_until = {name: until for name, until in still if until > now}
        self._left_alone_until[instance_name] = now + LEAVE_ALONE_FOR

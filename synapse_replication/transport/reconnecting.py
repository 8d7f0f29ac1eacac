"""A client factory that reconnects with this package's backoff."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IConnector
from twisted.internet.protocol import ReconnectingClientFactory
from typing_extensions import override

from synapse_replication.handlers.timer import Backoff


class BackoffClientFactory(ReconnectingClientFactory):
    """A ``ReconnectingClientFactory`` whose delays have a maximum that jitter respects.

    Twisted's own jitter is unbounded, and reads a random number of its own. The
    delays come from :class:`.Backoff`, with ``initialDelay`` and ``maxDelay``, in s,
    and ``factor`` of the factory; ``retries``, ``resetDelay`` and ``stopTrying`` are
    Twisted's.

    :ivar backoff_jitter: the jitter of :class:`.Backoff`.
    """

    noisy = False
    #: The longest delay, in s. Twisted declares an integer.
    maxDelay: float  # type: ignore[assignment]  # noqa: N815
    backoff_jitter: Callable[[], float]

    def call_later(
        self, delay: float, func: Callable[..., object], *args: object
    ) -> Any:
        """Schedule a call; return its ``IDelayedCall``. Subclasses implement it."""
        raise NotImplementedError

    def retry_scheduled(self, connector: IConnector, delay: float) -> None:
        """Notice that the next attempt was scheduled. Subclasses implement it.

        :param delay: the delay, in s.
        """
        raise NotImplementedError

    @override
    def retry(self, connector: IConnector | None = None) -> None:
        """Schedule the next attempt, unless the factory was stopped.

        :param connector: the connector that failed; ``None`` for the newest connector.
        """
        connector = connector or self.connector
        assert connector is not None, "no attempt to connect was ever started"
        if not self.continueTrying:
            return
        self.retries += 1
        backoff = Backoff(
            self.initialDelay, self.maxDelay, self.factor, self.backoff_jitter
        )
        self.delay = backoff.delay(self.retries)
        # Twisted's stopTrying() cancels the call in this attribute.
        self._callID = self.call_later(self.delay, self._attempt, connector)
        self.retry_scheduled(connector, self.delay)

    def _attempt(self, connector: IConnector) -> None:
        self._callID = None
        connector.connect()

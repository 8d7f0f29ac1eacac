"""Replacements for the streamer of a host, and for the notifier that starts it.

Theory of operation: the host notifies all its parts that follow the streams each time
that a stream may have advanced; most received rows of ``events`` make it notify twice.
Each part then compares its position with the positions of the streams. Most parts do so
in a background process of the host, and together these comparisons cost the main
process more than receiving the row. Nothing is missed if several notifications are
combined: a part reads all changes since it last ran.

So notifications are combined until the next turn of the reactor. Once replication runs,
only the streamer, which other processes wait for, is notified each time. The other
parts (the user directory, the statistics, the presence of users who joined, delayed
events, forgotten rooms) are notified in the next turn, too, but at most once in
:data:`NOTIFICATION_PAUSE`.

The notifier does not have a reactor at first: the constructor of this package's command
handler supplies the homeserver's. Before that, and with a stock command handler, the
notifier notifies all parts immediately.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from typing_extensions import override

from synapse_replication.dropin.homeserver import Homeserver
from synapse_replication.dropin.host_code import make_yieldable
from synapse_replication.dropin.host_streams import declared_writers, ids_are_ours
from synapse_replication.dropin.observer import observer_of
from synapse_replication.handlers.sending import streamer

#: The minimum time between two notifications of a part other than the streamer, in s.
NOTIFICATION_PAUSE = 0.1

#: The interval at which idle streams are checked, in s, if the streamer is notified of
#: each change of its positions: after writes of this process, and, if this package
#: supplies the ids, when it learns of those of others. A check takes 0.4 ms.
NOTIFIED_INTERVAL = 10.0


def with_combining(original: Any) -> Any:
    """Return a subclass of the host's notifier that combines notifications."""

    class ReplicationNotifier(original):  # type: ignore[misc]
        """The host's notifier, changed to combine notifications.

        After :meth:`combine`, it calls its callbacks at most once per reactor turn, and
        after :meth:`favour`, all but one of them about once in
        :data:`NOTIFICATION_PAUSE` at most.
        """

        _reactor: IReactorTime | None = None
        _is_due = False
        _favoured: Callable[[], object] | None = None
        # When all callbacks may be called again, in s, and the call that does so.
        _pause_ends = 0.0
        _postponed: IDelayedCall | None = None

        def combine(self, reactor: IReactorTime) -> None:
            """Begin to combine notifications. Call it in the reactor's thread."""
            self._reactor = reactor

        def favour(self, callback: Callable[[], object]) -> None:
            """Begin to call all callbacks but this one less often."""
            self._favoured = callback

        def notify_replication(self) -> None:
            """Notify all parts in the next turn of the reactor.

            If :meth:`combine` has not been called, notify them immediately.
            """
            if self._reactor is None:
                super().notify_replication()
            elif not self._is_due:
                self._is_due = True
                self._reactor.callLater(0, self._notify, self._reactor)

        def _notify(self, reactor: IReactorTime) -> None:
            # Reset the flag first: a callback may cause another notification.
            self._is_due = False
            wait = self._pause_ends - reactor.seconds()
            # The wait is longer than the pause if the clock was set back.
            if self._favoured is None or not 0 < wait <= NOTIFICATION_PAUSE:
                self._notify_all(reactor)
                return
            if self._postponed is None:
                self._postponed = reactor.callLater(wait, self._notify_all, reactor)
            self._favoured()

        def _notify_all(self, reactor: IReactorTime) -> None:
            postponed, self._postponed = self._postponed, None
            if postponed is not None and postponed.active():
                postponed.cancel()
            self._pause_ends = reactor.seconds() + NOTIFICATION_PAUSE
            super().notify_replication()

    return ReplicationNotifier


def combine_notifications(hs: Homeserver) -> None:
    """Let a homeserver's notifier combine notifications, if it has been replaced."""
    combine = getattr(hs.get_replication_notifier(), "combine", None)
    if combine is not None:
        combine(hs.get_reactor())


def favour_streamer(hs: Homeserver) -> None:
    """Let a homeserver's notifier, if it has been replaced, favour the streamer.

    Call this function when replication between processes starts.
    """
    favour = getattr(hs.get_replication_notifier(), "favour", None)
    if favour is not None:
        favour(hs.get_replication_streamer().on_notifier_poke)


class DropInStreamer(streamer.ReplicationStreamer):
    """Sends the rows that this process writes; starts in its constructor."""

    def __init__(self, hs: Homeserver) -> None:
        # That of this package: both belong to one part.
        handler: Any = hs.get_replication_command_handler()
        options = streamer.StreamerOptions(
            torture_level=getattr(hs.config.server, "replication_torture_level", 0) or 0
        )
        self._written = handler.host.streams.get_streams_to_replicate()
        writers = [
            declared_writers(hs.config.worker, stream.description.name)
            for stream in self._written
        ]
        if ids_are_ours() or max(map(len, writers), default=0) <= 1:
            options = attrs.evolve(options, announce_interval=NOTIFIED_INTERVAL)
        super().__init__(handler.host, handler.sender, observer_of(hs), options=options)
        self.start()

    @override
    async def stop(self) -> None:
        """Send the rows written so far, and stop the checks of idle streams.

        The caller resumes in its own log context.
        """
        await make_yieldable(Deferred.fromCoroutine(super().stop()))

    @override
    def on_notifier_poke(self) -> None:
        """Start sending new rows. The call is cheap, and may be made at any time."""
        super().on_notifier_poke()
        if any(stream.is_limited for stream in self._written):
            # A sequence must be read, or is being read.
            self.retry_soon()

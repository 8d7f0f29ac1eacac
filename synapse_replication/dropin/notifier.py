"""The replacement for ``synapse.notifier.ReplicationNotifier``.

Theory of operation: the host notifies all its parts that follow the streams each time
that a stream may have advanced; most received rows of ``events`` make it notify twice.
Each part then compares its position with the positions of the streams. Most parts do so
in a background process of the host, and together these comparisons cost the main
process more than receiving the row. Nothing is missed if several notifications are
combined: a part reads all changes since it last ran.

So notifications are combined until the next turn of the reactor. The notifier does not
have a reactor at first: the constructor of this package's command handler supplies the
homeserver's. Before that, and with a stock command handler, the notifier notifies all
parts immediately.
"""

from __future__ import annotations

from typing import Any

from twisted.internet.interfaces import IReactorTime


def with_combining(original: Any) -> Any:
    """Return a subclass of the host's notifier that combines notifications."""

    class ReplicationNotifier(original):  # type: ignore[misc]
        """The host's notifier, changed to combine notifications.

        After :meth:`combine`, it calls its callbacks at most once per reactor turn.
        """

        _reactor: IReactorTime | None = None
        _is_due = False

        def combine(self, reactor: IReactorTime) -> None:
            """Begin to combine notifications. Call it in the reactor's thread."""
            self._reactor = reactor

        def notify_replication(self) -> None:
            """Notify all parts in the next turn of the reactor.

            If :meth:`combine` has not been called, notify them immediately.
            """
            if self._reactor is None:
                super().notify_replication()
            elif not self._is_due:
                self._is_due = True
                self._reactor.callLater(0, self._notify)

        def _notify(self) -> None:
            # Reset the flag first: a callback may cause another notification.
            self._is_due = False
            super().notify_replication()

    return ReplicationNotifier


def combine_notifications(hs: Any) -> None:
    """Let a homeserver's notifier combine notifications, if it has been replaced."""
    combine = getattr(hs.get_replication_notifier(), "combine", None)
    if combine is not None:
        combine(hs.get_reactor())

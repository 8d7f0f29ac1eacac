"""Telling systemd how the process stands: ``Type=notify``.

Theory of operation: systemd puts the path of a Unix socket into ``NOTIFY_SOCKET`` and
reads one datagram of ``NAME=value`` lines for each piece of news. A
:class:`SystemdNotifier` looks at the status once a second, as hooks do, and tells what
is new: ``READY=1`` once all that is followed was caught up with, ``STATUS=`` as it
goes. The watchdog is fed from the reactor, twice as often as systemd asks for: a
reactor that hangs does not feed it, and systemd starts the process again.

The protocol is one datagram, so it is written here: what the registry has for it has
not been kept up since 2017 and swallows failures.

``man sd_notify``, ``man systemd.service``; docs/operators-guide.rst.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

from twisted.logger import Logger

from synapse_replication.errors import SupervisorError
from synapse_replication.handlers.interfaces import Clock, DelayedCall
from synapse_replication.instrumentation.logs import REPEAT_AFTER, RateLimit
from synapse_replication.instrumentation.status.model import (
    ProcessStatus,
    describe_process,
)

__all__ = ["NotifySocket", "SystemdNotifier", "open_notify_socket", "watchdog_interval"]

#: How often the status is looked at, in s.
LOOK_EVERY = 1.0
#: While the process starts: how much longer it may take, in s, and how often that is
#: told. Catching up may take hours; a reactor that hangs ceases to ask for more.
EXTEND_BY = 60.0
EXTEND_EVERY = 15.0


class NotifySocket:
    """Where systemd listens. What cannot be sent is logged, once a minute.

    :param address: a path, or ``@`` and the name of an abstract socket.
    """

    log = Logger()

    def __init__(
        self, address: str, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._shown = address
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._limit = RateLimit(REPEAT_AFTER, monotonic)
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
        )
        # Nothing waits for systemd, least of all the reactor.
        self._socket.setblocking(False)

    def send(self, *assignments: str) -> bool:
        """Send one message.

        :return: whether it was sent.
        """
        message = "\n".join(" ".join(each.splitlines()) for each in assignments)
        try:
            self._socket.sendto(message.encode("utf-8", "replace"), self._address)
        except OSError as error:
            if self._limit.admit("notify", error.errno) is not None:
                self.log.warn(
                    "Cannot tell systemd (NOTIFY_SOCKET={address}): {error}",
                    address=self._shown,
                    error=error,
                )
            return False
        return True

    def close(self) -> None:
        """Send nothing more."""
        self._socket.close()


def open_notify_socket(environ: Mapping[str, str]) -> NotifySocket | None:
    """Open what ``NOTIFY_SOCKET`` names.

    :return: ``None`` if it is not set: nobody listens.
    :raises SupervisorError: if it is of a kind that is not known here.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return None
    if address[0] not in "/@":
        raise SupervisorError(
            f"NOTIFY_SOCKET is {address!r}, which is neither the path of a socket nor "
            "an abstract one; unset it, or let systemd set it"
        )
    return NotifySocket(address)


def watchdog_interval(environ: Mapping[str, str], pid: int) -> float | None:
    """Return how often systemd's watchdog is to be fed.

    :return: half of ``WATCHDOG_USEC``, in s; ``None`` if it is not set, or meant for
        another process (``WATCHDOG_PID``).
    :raises SupervisorError: if it is no time.
    """
    text = environ.get("WATCHDOG_USEC", "")
    if not text or environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise SupervisorError(
            f"WATCHDOG_USEC is {text!r}, which is no number of microseconds; unset it, "
            "or let systemd set it by WatchdogSec="
        )
    return int(text) / 2_000_000


class SystemdNotifier:
    """Tells systemd what is new.

    :param send: sends one message, and says whether that went well.
    :param snapshot: gives the status of now.
    :param feed_every: how often to feed the watchdog, in s; ``None`` for never.
    :param reports_lifecycle: tell also when the process is ready, reloads and stops.
        ``False`` inside a host that does so itself.
    :param monotonic_usec: the monotonic clock that systemd has, in us.
    """

    def __init__(
        self,
        send: Callable[..., bool],
        clock: Clock,
        snapshot: Callable[[], ProcessStatus],
        feed_every: float | None = None,
        monotonic_usec: Callable[[], int] = lambda: time.monotonic_ns() // 1000,
        *,
        reports_lifecycle: bool = True,
    ) -> None:
        self._send = send
        self._reports_lifecycle = reports_lifecycle
        self._clock = clock
        self._snapshot = snapshot
        self._feed_every = feed_every
        self._monotonic_usec = monotonic_usec
        self._is_up = False
        self._is_ready = False
        self._is_reloading = False
        self._told = ""
        self._note = ""
        self._extended = float("-inf")
        self._calls: dict[str, DelayedCall] = {}

    def start(self) -> None:
        """Begin to tell: the process starts."""
        self._look()
        if self._feed_every is not None:
            self._feed()

    def up(self) -> None:
        """Record that the process has started; it may not be caught up yet."""
        self._is_up = True
        self._look()

    def reloading(self) -> None:
        """Tell that the configuration is read again."""
        if self._is_ready:
            self._is_reloading = self._send(
                "RELOADING=1", f"MONOTONIC_USEC={self._monotonic_usec()}"
            )

    def reloaded(self, note: str = "") -> None:
        """Tell that it was read.

        :param note: stands beside the status from now on, for people.
        """
        self._note = note
        self._look()

    def stopping(self) -> None:
        """Tell that the process stops, and nothing after that."""
        for call in self._calls.values():
            if call.active():
                call.cancel()
        self._calls.clear()
        lifecycle = ["STOPPING=1"] if self._reports_lifecycle else []
        self._send(*lifecycle, "STATUS=stopping")

    def _feed(self) -> None:
        if self._feed_every is not None:
            self._calls["feed"] = self._clock.call_later(self._feed_every, self._feed)
            self._send("WATCHDOG=1")

    def _look(self) -> None:
        # First, so that nothing that fails ends it.
        before = self._calls.get("look")
        if before is not None and before.active():
            before.cancel()
        self._calls["look"] = self._clock.call_later(LOOK_EVERY, self._look)
        status = self._snapshot()
        text = describe_process(status) if self._is_up else "starting"
        if self._note:
            text += f"; {self._note}"
        news = [f"STATUS={text}"] if text != self._told else []
        becomes_ready = False
        if self._reports_lifecycle:
            becomes_ready = not self._is_ready and self._is_up and not status.not_ready
            news += self._lifecycle_news(becomes_ready)
        # What is not sent is told again at the next look.
        if news and self._send(*news):
            self._told = text
            self._is_ready = self._is_ready or becomes_ready
            self._is_reloading = False

    def _lifecycle_news(self, becomes_ready: bool) -> list[str]:
        if becomes_ready or self._is_reloading:
            return ["READY=1"]
        now = self._clock.seconds()
        if self._is_ready or now - self._extended < EXTEND_EVERY:
            return []
        self._extended = now
        return [f"EXTEND_TIMEOUT_USEC={int(EXTEND_BY * 1_000_000)}"]

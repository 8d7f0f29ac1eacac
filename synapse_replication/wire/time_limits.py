"""The time limits of a line connection: :class:`TimeLimits`.

Theory of operation: a PING is sent when no line has been sent for 5 s, unless the
transport is paused. After the peer's first PING, the connection is closed when nothing
has arrived for 25 s. A client that never sends PING may be a person using a terminal,
so its server has no such limit; the limit of a server that has not sent PING yet is
30 s. A client waits 10 s for SERVER, so that connecting to a wrong port is reported; a
server waits 60 s for NAME.
"""

from __future__ import annotations

import math
from typing import Final

#: A PING is sent when no line has been sent for this time, in s.
PING_INTERVAL: Final = 5.0
#: After the peer's first PING, a connection is closed when nothing has arrived for this
#: time, in s. It is also the time limit of closing.
TIMEOUT: Final = 25.0
#: The time that a client waits for SERVER, in s.
SERVER_TIMEOUT: Final = 10.0
#: The time that a server waits for NAME, in s: enough for a person to type it.
NAME_TIMEOUT: Final = 60.0
#: The time in s after which a client closes a connection on which nothing has arrived,
#: not even the server's first PING, which follows SERVER.
FIRST_PING_TIMEOUT: Final = 30.0
#: The shortest delay until the next tick, in s, so that rounding cannot cause a busy
#: loop.
_SHORTEST_DELAY: Final = 0.001
#: If a tick is late by more than this time, in s, the process was suspended or busy, or
#: the system clock was set.
_LATE: Final = 1.0


class TimeLimits:
    """The time limits of one connection. All times are those of the host's clock, in s.

    :ivar last_sent: when a line was last sent.
    :ivar last_received: when any data last arrived.
    :ivar closing_since: when closing the connection began, if it did.
    :ivar peer_pings: whether the peer has ever sent PING.
    """

    def __init__(self, *, is_server: bool, now: float) -> None:
        self._is_server = is_server
        self._started = self.last_sent = self.last_received = now
        self.closing_since = now
        self._tick_due = math.inf
        self.peer_pings = False

    def close_hangs(self, now: float) -> bool:
        """Return whether closing has taken too long."""
        return now >= self.closing_since + TIMEOUT

    def forgive_late_tick(self, now: float) -> None:
        """If a tick is late by more than 1 s, extend the limits by its delay.

        Data that the peer sent in the meantime may not have been read yet.
        """
        late = now - self._tick_due
        if late > _LATE:
            self._started = min(now, self._started + late)
            self.last_received = min(now, self.last_received + late)
            self.closing_since = min(now, self.closing_since + late)

    def expired(self, now: float, *, is_connecting: bool) -> str | None:
        """Return which time limit of an open connection has expired.

        :return: text for display; ``None`` if no limit has expired.
        """
        if is_connecting and now >= self._handshake_ends:
            return (
                f"no NAME within {NAME_TIMEOUT:.0f} s; send NAME as the first command"
                if self._is_server
                else f"no SERVER within {SERVER_TIMEOUT:.0f} s: is this the port of "
                "a replication listener, and is TLS enabled at both ends or at neither?"
            )
        if now >= self.last_received + self._longest_silence:
            return f"ping timeout: nothing arrived for {self._longest_silence:.0f} s"
        return None

    def is_ping_due(self, now: float, *, is_paused: bool) -> bool:
        """Return whether no line has been sent for :data:`PING_INTERVAL`.

        :param is_paused: whether the transport is paused, in which case no PING is due.
        """
        return now >= self._ping_due(is_paused)

    def next_tick(
        self, now: float, *, is_open: bool, is_connecting: bool, is_paused: bool
    ) -> float:
        """Return the delay until the next tick, in s, and record its due time."""
        due = self.closing_since + TIMEOUT
        if is_open:
            silence_ends = self.last_received + self._longest_silence
            due = min(silence_ends, self._ping_due(is_paused))
            if is_connecting:
                due = min(due, self._handshake_ends)
        # Limit the delay: the peer's first PING, or resumed writing, may start a limit
        # that expires before ``due``.
        delay = min(PING_INTERVAL, max(_SHORTEST_DELAY, due - now))
        self._tick_due = now + delay
        return delay

    @property
    def _handshake_ends(self) -> float:
        return self._started + (NAME_TIMEOUT if self._is_server else SERVER_TIMEOUT)

    @property
    def _longest_silence(self) -> float:
        if self.peer_pings:
            return TIMEOUT
        return math.inf if self._is_server else FIRST_PING_TIMEOUT

    def _ping_due(self, is_paused: bool) -> float:
        # While the transport is paused, older lines are still being sent.
        return math.inf if is_paused else self.last_sent + PING_INTERVAL

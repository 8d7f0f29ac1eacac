"""The answers to REPLICATE: the positions of the streams that this process writes."""

from __future__ import annotations

import math

from synapse_replication.handlers.interfaces import (
    Clock,
    DelayedCall,
    ReplicationConnection,
)
from synapse_replication.handlers.sending.command_sender import CommandSender

#: The shortest interval between two answers on a connection to Redis, in s.
POSITIONS_INTERVAL = 0.5
#: How long after a hello its REPLICATE may arrive, in s.
REPLICATE_WITHIN = 1.0


class PositionAnswers:
    """Answers requests for positions, several of them together.

    Over Redis, an answer reaches all instances. It is sent immediately, unless one was
    sent a moment ago; then one answer serves all that ask until it is sent. So many
    instances may connect at once, and each writer announces its positions twice a
    second at most.

    An instance of this package states in its hello, which the extension answers, that
    it will ask. One request per such hello is not answered, from any sender; if fewer
    arrive, all positions are announced after all, so that no instance waits in vain.
    """

    def __init__(self, sender: CommandSender, clock: Clock) -> None:
        self._sender = sender
        self._clock = clock
        self._answered: dict[ReplicationConnection, float] = {}
        self._waiting: dict[ReplicationConnection, DelayedCall] = {}
        #: The number of requests that are left unanswered.
        self._to_skip: dict[ReplicationConnection, int] = {}
        self._skip_ends: dict[ReplicationConnection, DelayedCall] = {}

    def skip_next(self, connection: ReplicationConnection) -> None:
        """Leave the next request on a connection unanswered."""
        if connection not in self._skip_ends:
            self._skip_ends[connection] = self._clock.call_later(
                REPLICATE_WITHIN, self._end_skip, connection
            )
        self._to_skip[connection] = self._to_skip.get(connection, 0) + 1

    def skip(self, connection: ReplicationConnection) -> bool:
        """Skip a request if it needs no answer; return whether it is skipped."""
        left = self._to_skip.get(connection, 0)
        if left:
            self._to_skip[connection] = left - 1
        return left > 0

    def _end_skip(self, connection: ReplicationConnection) -> None:
        del self._skip_ends[connection]
        if self._to_skip.pop(connection, 0):
            self.answer(connection)

    def answer(self, connection: ReplicationConnection) -> None:
        """Announce all positions on a connection, now or in a moment."""
        if connection in self._waiting:
            return
        if connection.relays:
            # A direct link has only one peer.
            self._sender.announce_positions(connection)
            return
        now = self._clock.seconds()
        wait = self._answered.get(connection, -math.inf) + POSITIONS_INTERVAL - now
        if wait <= 0:
            self._announce(connection)
        else:
            self._waiting[connection] = self._clock.call_later(
                wait, self._announce, connection
            )

    def is_waiting(self) -> bool:
        """Return whether requests will be answered in a moment."""
        return bool(self._waiting)

    def announced(self) -> None:
        """Drop the answers that wait, because all positions are being announced."""
        for connection, waiting in self._waiting.items():
            waiting.cancel()
            self._answered[connection] = self._clock.seconds()
        self._waiting.clear()

    def forget(self, connection: ReplicationConnection) -> None:
        """Drop the answers that wait for a connection, which was lost."""
        self._answered.pop(connection, None)
        self._to_skip.pop(connection, None)
        for calls in (self._waiting, self._skip_ends):
            waiting = calls.pop(connection, None)
            if waiting is not None:
                waiting.cancel()

    def _announce(self, connection: ReplicationConnection) -> None:
        self._waiting.pop(connection, None)
        self._answered[connection] = self._clock.seconds()
        self._sender.announce_positions(connection)

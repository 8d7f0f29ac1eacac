"""Fencing: makes Redis close a lost connection before the next connection is used.

Theory of operation: after a connection is lost at this end, it may still be open in
Redis, with publishes that Redis has not read yet. Redis would deliver them after the
new announcement of positions: a batch without its end, or an outdated position.
Therefore the first command after authentication on a new connection makes Redis kill
the latest connection whose id and address are known. The new connection is reported as
established only afterwards.

A connection's id and address are requested from Redis after the first publish on it; a
connection without publishes needs no fencing. If a server disconnects clients that send
unknown commands, fencing is disabled after :data:`MAX_HANG_UPS` such disconnections.
Over a Unix socket there is no fencing: all clients have the same address, so after a
restart of Redis the id and the address might identify another client. A transport
without a socket needs no fencing, because it has no kernel buffer that could contain
publishes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import txredisapi
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from synapse_replication.handlers.events import FeatureUnavailable
from synapse_replication.handlers.observer import ReplicationObserver

#: Fencing is disabled after this many connections were lost while a fencing command was
#: unanswered: the command may be the reason. A loss is not counted if another reason is
#: known, or if the server has ever answered a fencing command.
MAX_HANG_UPS = 3

#: The id and address in Redis's answer to CLIENT INFO. The address of a Unix socket has
#: port 0 and does not match.
_CLIENT = re.compile(r"id=(\d+) addr=(\S+:[1-9]\d*) ")

_FEATURE = (
    "fencing of lost connections to Redis (CLIENT INFO and CLIENT KILL, since Redis "
    "6.2; permit client|info and client|kill in the user's ACL)"
)


class FencingState:
    """State of fencing that outlives the individual connections.

    :ivar previous: the id that Redis assigned to the newest connection whose identity
        is known, and the connection's address as seen by Redis, which may differ from
        the local address due to address translation. Both are needed, because Redis
        assigns the same ids again after a restart, and so may another Redis server.
    :ivar is_unavailable: whether fencing is disabled, because Redis rejects the
        commands, does not support them, or closes the connection on them.
    :ivar has_answered: whether the server has answered a fencing command at least once.
    """

    def __init__(self, observer: ReplicationObserver) -> None:
        self._observer = observer
        self._hang_ups = 0
        self.previous: tuple[str, str] | None = None
        self.is_unavailable = False
        self.has_answered = False

    def hung_up(self) -> None:
        """Record that the server closed a connection instead of answering."""
        self._hang_ups += 1
        if self._hang_ups >= MAX_HANG_UPS:
            self.refused("the server closes the connection on CLIENT INFO")

    def refused(self, why: str) -> None:
        """Disable fencing, and report the reason."""
        self.is_unavailable = True
        self._observer.observe(FeatureUnavailable(_FEATURE, why))

    def failed(self, why: str) -> None:
        """Report that fencing failed on one connection."""
        self._observer.observe(FeatureUnavailable(_FEATURE, why))


@attrs.define(eq=False, repr=False)
class ConnectionFence:
    """The fencing commands of one connection.

    :param execute: sends a command to Redis.
    :param is_possible: whether a connection of this kind can be fenced.
    :ivar identity_requested: whether :meth:`request_identity` was called.
    """

    _state: FencingState
    _execute: Callable[..., Deferred[Any]]
    _is_possible: bool = attrs.field(kw_only=True)
    _unanswered: int = attrs.field(default=0, init=False)
    identity_requested: bool = attrs.field(default=False, init=False)

    def kill_previous(self) -> None:
        """Make Redis close the latest connection whose identity is known, if any."""
        if self._is_available() and self._state.previous is not None:
            number, address = self._state.previous
            self._send("KILL", "ID", number, "ADDR", address)

    def request_identity(self) -> None:
        """Request this connection's id and address. Call it after the first publish."""
        self.identity_requested = True
        if self._is_available():
            self._send("INFO").addCallback(self._record_identity)

    def connection_lost(self, *, is_explained: bool) -> None:
        """Record that the connection was lost.

        :param is_explained: whether the loss has a known reason other than fencing.
        """
        if self._unanswered and not (is_explained or self._state.has_answered):
            self._state.hung_up()

    def _is_available(self) -> bool:
        return self._is_possible and not self._state.is_unavailable

    def _send(self, *args: str) -> Deferred[Any]:
        self._unanswered += 1
        return self._execute("CLIENT", *args).addCallbacks(self._answered, self._failed)

    def _answered(self, answer: Any) -> Any:
        self._unanswered -= 1
        self._state.has_answered = True
        return answer

    def _record_identity(self, info: Any) -> None:
        text = info.decode("utf-8", "replace") if isinstance(info, bytes) else info
        if isinstance(text, str) and (found := _CLIENT.match(text)) is not None:
            self._state.previous = found[1], found[2]

    def _failed(self, failure: Failure) -> None:
        error = failure.value
        # If the connection was lost, the next connection sends fencing commands anyway.
        # Without authentication, all commands fail with NOAUTH, so that error does not
        # show whether the server supports fencing.
        if (
            not isinstance(error, txredisapi.ResponseError)
            or str(error).startswith("NOAUTH")
            or self._state.is_unavailable
        ):
            return
        self._answered(None)
        # Only these errors would recur on the next connection.
        if str(error).startswith("NOPERM") or "unknown" in str(error).lower():
            self._state.refused(str(error))
        else:
            self._state.failed(str(error))

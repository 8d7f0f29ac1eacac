"""The answers to hellos: when heartbeats answer them, and who receives these.

Theory of operation: a writer answers a hello with a heartbeat, usually without delay,
so that a new instance knows its peers' epochs before their positions arrive. An answer
is sent only to the instance that asked, on its own channel. If most peers ask within a
moment, one heartbeat for all of them answers. A peer of an older version, which has no
channel of its own, is answered on the common channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from synapse_replication.handlers.epochs import PeerEpochs
from synapse_replication.handlers.extension.watches import FEW_PEERS
from synapse_replication.handlers.interfaces import Clock, ExtensionConnection
from synapse_replication.handlers.timer import Timer

#: The shortest interval between answers to hellos, in s. If this instance writes a
#: stream held in memory, a new epoch is answered at once.
HELLO_ANSWER_INTERVAL: Final = 0.2


class HelloAnswers:
    """The instances whose hellos are to be answered.

    :param epochs: the peers' epochs.
    :param send_to: called with the instances to answer, each with its link, in the
        order in which they asked.
    :param send_to_all: called instead to answer all peers by one heartbeat.
    """

    def __init__(
        self,
        clock: Clock,
        epochs: PeerEpochs,
        send_to: Callable[[list[tuple[ExtensionConnection, str]]], object],
        send_to_all: Callable[[], object],
    ) -> None:
        self._clock = clock
        self._epochs = epochs
        self._send_to = send_to
        self._send_to_all = send_to_all
        self._timer = Timer(clock)
        self._last_answer = -math.inf
        #: The instances that wait, each with its link, in the order in which they
        #: asked.
        self._waiting: dict[tuple[ExtensionConnection, str], None] = {}
        #: Whether an instance waits that has no channel of its own.
        self._is_common = False

    def answer(
        self,
        connection: ExtensionConnection,
        instance_name: str,
        *,
        is_private: bool,
        is_urgent: bool,
    ) -> None:
        """Answer a hello, now or in a moment.

        :param is_private: whether the answer may be sent to the instance alone.
        :param is_urgent: whether the answer must not be delayed.
        """
        if is_private:
            self._waiting[connection, instance_name] = None
        else:
            self._is_common = True
        wait = self._last_answer + HELLO_ANSWER_INTERVAL - self._clock.seconds()
        if wait <= 0 or is_urgent:
            self._send()
        elif not self._timer.is_running:
            self._timer.start(wait, self._send)

    def stop(self) -> None:
        """Answer no more."""
        self._timer.stop()

    def _send(self) -> None:
        self._timer.stop()
        self._last_answer = self._clock.seconds()
        waiting, self._waiting = list(self._waiting), {}
        is_common, self._is_common = self._is_common, False
        most_ask = 2 * len(waiting) > max(FEW_PEERS, len(self._epochs))
        if is_common or most_ask:
            self._send_to_all()
        else:
            self._send_to(waiting)

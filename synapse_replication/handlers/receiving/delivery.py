"""Rows of a stream on their way to the host's row sink.

Theory of operation: most hosts take rows at once, so nothing is made here that could be
waited for until the host wants to be waited for. What the host fails to take is fetched
again, with all that came behind it: none of it may be skipped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from synapse_replication.errors import RowDecodeError
from synapse_replication.handlers.interfaces import RowSink
from synapse_replication.handlers.observer import DiscardReason, ReplicationObserver
from synapse_replication.handlers.receiving.catch_up import CatchUpRunner
from synapse_replication.handlers.receiving.writer_state import Link, WriterState
from synapse_replication.streams.stream import Stream

__all__ = ["Delivery"]


class Delivery:
    """Makes typed rows of one stream, and delivers them.

    Used in the reactor's thread only.
    """

    def __init__(
        self,
        stream: Stream,
        sink: RowSink,
        observer: ReplicationObserver,
        catch_ups: CatchUpRunner,
    ) -> None:
        self._stream = stream
        self._name = stream.description.name
        self._codec = stream.description.codec
        self._sink = sink
        self._observer = observer
        self._catch_ups = catch_ups

    def decode(self, texts: Sequence[bytes]) -> list[Any] | None:
        """Make typed rows of texts; ``None`` if one of them is no row."""
        try:
            decoded = self._codec.decode(texts)
        except RowDecodeError as error:
            self._observer.failure(f"decoding rows of {self._name}", error)
            return None
        if decoded.with_extra_fields:
            self._observer.extra_fields(self._name, decoded.with_extra_fields)
        return decoded.rows

    def deliver(
        self,
        link: Link,
        instance_name: str,
        state: WriterState,
        batches: Iterable[tuple[int, list[Any]]],
    ) -> Awaitable[bool] | bool:
        """Return batches of one writer to the host.

        :return: whether the host took them all; to be waited for if the host is.
        """
        name, on_rdata = self._name, self._sink.on_rdata
        remaining = iter(batches)
        for token, rows in remaining:
            try:
                waiting = on_rdata(name, instance_name, token, rows)
            except Exception as error:  # noqa: BLE001 -- the observer is told
                left = [(token, rows), *remaining]
                self.failed(link, instance_name, state, left, error)
                return False
            if waiting is not None:
                left = [(token, rows), *remaining]
                return self._deliver_remaining(
                    link, instance_name, state, left, waiting
                )
        return True

    async def _deliver_remaining(
        self,
        link: Link,
        instance_name: str,
        state: WriterState,
        left: Sequence[tuple[int, list[Any]]],
        waiting: Awaitable[None] | None,
    ) -> bool:
        """Go on with a host that is waited for: it was given the first of them."""
        done = 0
        try:
            for done, (token, rows) in enumerate(left):
                if done:
                    waiting = self._sink.on_rdata(
                        self._name, instance_name, token, rows
                    )
                if waiting is not None:
                    await waiting
        except Exception as error:  # noqa: BLE001 -- the observer is told
            self.failed(link, instance_name, state, left[done:], error)
            return False
        return True

    def failed(
        self,
        link: Link,
        instance_name: str,
        state: WriterState,
        left: Sequence[tuple[int, list[Any]]],
        error: Exception,
    ) -> None:
        """Have fetched what the host failed to take, later.

        :param left: the batch that it failed to take, and those behind it.
        """
        lost = sum(len(rows) for _, rows in left)
        self._observer.discarded(
            self._name, instance_name, DiscardReason.HANDLER_FAILED, lost
        )
        tokens = [token for token, _ in left]
        # Late rows come in any order.
        from_token = min(self._stream.current_token(instance_name), min(tokens) - 1)
        self._catch_ups.schedule(link, instance_name, state, from_token, tokens, error)

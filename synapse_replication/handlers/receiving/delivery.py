"""Delivery of a stream's rows to the host's row sink.

Theory of operation: most hosts handle rows synchronously, so no coroutine is created
until the host returns an awaitable. If the host fails to handle a batch, that batch and
all later batches are fetched again, because no batch may be skipped.

See docs/failure-modes.rst: failure-unreadable-row, failure-invalidate-first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from synapse_replication.handlers.observer import DiscardReason
from synapse_replication.handlers.receiving.catch_up import CatchUpRunner
from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.writer_state import LinkedWriter

__all__ = ["Delivery"]


class Delivery:
    """Delivery of the typed rows of one stream.

    Use it in the reactor's thread only.
    """

    def __init__(self, context: StreamContext, catch_ups: CatchUpRunner) -> None:
        self._context = context
        self._catch_ups = catch_ups

    def deliver(
        self, writer: LinkedWriter, batches: Iterable[tuple[int, list[Any]]]
    ) -> Awaitable[None] | None:
        """Deliver batches of one writer, and report the resulting position.

        :return: an awaitable if the host returned one for a batch, else ``None``.
        """
        context, instance_name = self._context, writer.instance_name
        name, on_rdata = context.name, context.sink.on_rdata
        remaining = iter(batches)
        for token, rows in remaining:
            try:
                waiting = on_rdata(name, instance_name, token, rows)
            except Exception as error:  # noqa: BLE001 -- reported to the observer
                self.failed(writer, [(token, rows), *remaining], error)
                return None
            if waiting is not None:
                left = [(token, rows), *remaining]
                return self._deliver_remaining(writer, left, waiting)
        context.report_position(instance_name)
        return None

    async def _deliver_remaining(
        self,
        writer: LinkedWriter,
        left: Sequence[tuple[int, list[Any]]],
        waiting: Awaitable[None] | None,
    ) -> None:
        """Wait until the host has handled the first batch, then deliver the others.

        :param waiting: the host's awaitable for the first batch.
        """
        context, instance_name = self._context, writer.instance_name
        done = 0
        try:
            for done, (token, rows) in enumerate(left):
                if done:
                    waiting = context.sink.on_rdata(
                        context.name, instance_name, token, rows
                    )
                if waiting is not None:
                    await waiting
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            self.failed(writer, left[done:], error)
            return
        context.report_position(instance_name)

    def failed(
        self,
        writer: LinkedWriter,
        left: Sequence[tuple[int, list[Any]]],
        error: Exception,
    ) -> None:
        """Schedule a catch-up for the batches that the host failed to handle.

        :param left: the failed batch and those after it.
        """
        lost = sum(len(rows) for _, rows in left)
        reason = DiscardReason.HANDLER_FAILED
        self._context.discard(writer.instance_name, reason, lost)
        tokens = [token for token, _ in left]
        current = self._context.stream.current_token(writer.instance_name)
        # The tokens of late rows are in no particular order.
        from_token = min(current, min(tokens) - 1)
        self._catch_ups.schedule(writer, from_token, tokens, error)

"""Handling of received rows: delivers or discards them, and schedules catch-ups.

Theory of operation: rows are handled in slices. On the fast path, the rows of a slice
are decoded together and delivered; no coroutine is created unless the host returns an
awaitable. A slice takes the fast path if the writer is live, each row is a batch of its
own, the tokens are plausible, ascending and above the reader's position, and every row
can be decoded. The rows of any other slice are collected into batches. For each batch,
:mod:`~synapse_replication.handlers.receiving.batches` decides whether it is delivered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import partial
from operator import lt
from typing import Any

from synapse_replication.handlers.observer import DiscardReason
from synapse_replication.handlers.receiving.batches import BatchSorter
from synapse_replication.handlers.receiving.catch_up import CatchUpRunner
from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.decoding import RowDecoder
from synapse_replication.handlers.receiving.delivery import Delivery
from synapse_replication.handlers.receiving.writer_state import Link, LinkedWriter
from synapse_replication.wire.rdata import RdataRun

__all__ = ["SLICE", "RowHandler"]

#: The maximum number of rows in a slice. Before each further slice of the same rows,
#: the pacer decides whether a break is due.
SLICE = 100


class RowHandler:
    """Handler of the rows of one stream, from all its writers.

    Use it in the reactor's thread only.
    """

    def __init__(
        self,
        context: StreamContext,
        decoder: RowDecoder,
        catch_ups: CatchUpRunner,
        delivery: Delivery,
    ) -> None:
        self._context = context
        self._decoder = decoder
        self._catch_ups = catch_ups
        self._delivery = delivery

    @property
    def stream_name(self) -> str:
        """The name of the stream."""
        return self._context.name

    def handle(self, link: Link, run: RdataRun) -> Awaitable[None] | None:
        """Handle rows of one writer.

        :return: an awaitable if the rows are not handled completely yet; usually
            ``None``, so that no coroutine is created.
        """
        context = self._context
        writer = link.writers.get((context.name, run.instance_name))
        if writer is None:
            reason = DiscardReason.NOT_CONNECTED
            context.discard(run.instance_name, reason, len(run.rows))
            return None
        if len(run.rows) > SLICE:
            return self._handle_slices(writer, run)
        waiting = self.handle_slice(writer, run.tokens, run.rows)
        context.pacer.count(len(run.rows))
        return waiting

    async def _handle_slices(self, writer: LinkedWriter, run: RdataRun) -> None:
        pacer = self._context.pacer
        for start in range(0, len(run.rows), SLICE):
            if start and pacer.is_due():
                await pacer.take_break()
            tokens = run.tokens[start : start + SLICE]
            rows = run.rows[start : start + SLICE]
            waiting = self.handle_slice(writer, tokens, rows)
            if waiting is not None:
                await waiting
            pacer.count(len(rows))

    def handle_slice(
        self, writer: LinkedWriter, tokens: list[Any], rows: list[bytes]
    ) -> Awaitable[None] | None:
        """Handle a slice of one writer's rows.

        :param tokens: the token of each row; ``None`` if more rows of the same token
            follow.
        :return: an awaitable if the rows are not handled completely yet.
        """
        context = self._context
        position = context.stream.current_token(writer.instance_name)
        if (
            not self._is_fast_path(writer, tokens, position)
            or not context.is_plausible(writer.instance_name, tokens[-1])
            or (typed := self._decoder.decode(rows)) is None
        ):
            return self._handle_slow_path(writer, tokens, rows)
        batches = zip(tokens, [[row] for row in typed])  # noqa: B905 -- equal lengths
        return self._delivery.deliver(writer, batches)

    @staticmethod
    def _is_fast_path(
        writer: LinkedWriter, tokens: Sequence[Any], position: int
    ) -> bool:
        """Return whether the rows of a slice can take the fast path."""
        return (
            writer.is_live
            and None not in tokens
            and tokens[0] > position
            and (len(tokens) == 1 or all(map(lt, tokens, tokens[1:])))
        )

    async def _handle_slow_path(
        self, writer: LinkedWriter, tokens: list[Any], rows: list[bytes]
    ) -> None:
        """Handle rows that cannot take the fast path; see the module's docstring."""
        complete = writer.gather(tokens, rows)
        if complete:
            await self._handle_batches(writer, complete)
        if self._exceeds_bounds(writer.pending):
            # Drop the unfinished batch only after the complete batches were handled,
            # because drop_pending() marks the next batch as one with lost rows.
            self._context.discard(
                writer.instance_name, DiscardReason.CATCHING_UP, writer.drop_pending()
            )

    def _exceeds_bounds(self, pending: list[bytes]) -> bool:
        options = self._context.options
        return (
            len(pending) > options.max_batch_rows
            or sum(map(len, pending)) > options.max_queue_size
        )

    async def _handle_batches(
        self, writer: LinkedWriter, complete: list[tuple[int, list[bytes]]]
    ) -> None:
        """Deliver or discard each batch; schedule a catch-up if rows are missing."""
        instance_name, run = writer.instance_name, writer.catch_up
        reader = self._catch_ups.reader_position(instance_name)
        sorter = BatchSorter(
            self._context.description,
            partial(self._context.is_plausible, instance_name),
            self._decoder.decode,
            reader.current,
            reader.undelivered_from,
            has_lost_rows=writer.has_lost_rows,
        )
        if run is not None:
            sorter.fetch_from = sorter.position = max(reader.current, run.cursor)
        for token, texts in complete:
            reason = sorter.add(token, texts)
            if reason is not None:
                self._context.discard(instance_name, reason, len(texts))
        writer.has_lost_rows = sorter.has_lost_rows
        waiting = self._delivery.deliver(writer, sorter.deliverable)
        if waiting is not None:
            await waiting
        if sorter.missed:
            self._fetch_again(writer, reader.undelivered_from, sorter.missed)
        if sorter.fetch_from is not None:
            tokens = [token for token, _ in complete]
            self._catch_ups.schedule(writer, sorter.fetch_from, tokens)

    def _fetch_again(
        self, writer: LinkedWriter, undelivered_from: int, missed: list[int]
    ) -> None:
        """Schedule a catch-up for late rows that the position skipped."""
        current = self._context.stream.current_token(writer.instance_name)
        self._catch_ups.schedule(
            writer,
            undelivered_from,
            missed,
            restart_token=undelivered_from if undelivered_from < current else None,
        )

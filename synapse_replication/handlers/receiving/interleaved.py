"""Handling of the rows of several writers that were received together.

Theory of operation: rows are handled in slices. A slice is decoded as a whole if each
of its rows is a batch of its own, the greatest token is plausible, and all rows are
valid and without unknown fields. The rows of live writers are then delivered in order
of arrival; late rows and the rows of other writers are passed to the row handler one at
a time. Any other slice is split into runs of consecutive rows of one writer, and the
row handler handles each run.
"""

from __future__ import annotations

from typing import Any, cast

from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.decoding import RowDecoder
from synapse_replication.handlers.receiving.delivery import Delivery
from synapse_replication.handlers.receiving.rows import SLICE, RowHandler
from synapse_replication.handlers.receiving.writer_state import Link
from synapse_replication.wire.rdata import InterleavedRun, RdataRun

__all__ = ["InterleavedRowHandler"]


class InterleavedRowHandler:
    """Handler of the interleaved rows of one stream.

    Use it in the reactor's thread only.

    :param rows: handles the rows of one writer.
    """

    def __init__(
        self,
        context: StreamContext,
        decoder: RowDecoder,
        delivery: Delivery,
        rows: RowHandler,
    ) -> None:
        self._context = context
        self._decoder = decoder
        self._delivery = delivery
        self._rows = rows

    async def handle(self, link: Link, run: InterleavedRun) -> None:
        """Handle rows of several writers; decode each slice as a whole if possible."""
        # The positions to report later, not once per row: at the next break, before a
        # slice that is not decoded as a whole, or at the end.
        moved: dict[str, int] = {}
        pacer = self._context.pacer
        for start in range(0, len(run.rows), SLICE):
            if start and pacer.is_due():
                self._report_positions(moved)
                await pacer.take_break()
            part = run.part(start, start + SLICE)
            typed = None
            if None not in part.tokens and self._are_plausible(part):
                typed = self._decoder.decode_quietly(part.rows)
            if typed is None:
                self._report_positions(moved)
                for of_writer in part.runs():
                    if (waiting := self._rows.handle(link, of_writer)) is not None:
                        await waiting
            else:
                await self._handle_typed(link, part, typed, moved)
            pacer.count(len(part.rows))
        self._report_positions(moved)

    def _report_positions(self, moved: dict[str, int]) -> None:
        for instance_name in moved:
            self._context.report_position(instance_name)
        moved.clear()

    def _are_plausible(self, part: InterleavedRun) -> bool:
        tokens = cast(list[int], part.tokens)
        greatest = max(tokens)
        return self._context.is_plausible(
            part.instance_names[tokens.index(greatest)], greatest
        )

    async def _handle_typed(
        self,
        link: Link,
        part: InterleavedRun,
        typed: list[Any],
        moved: dict[str, int],
    ) -> None:
        """Deliver the rows of live writers; pass other rows to the row handler.

        :param part: the rows; each is a batch of its own.
        :param moved: updated with the positions of live writers, to be reported later.
        """
        name, stream = self._context.name, self._context.stream
        on_rdata = self._context.sink.on_rdata
        for index, (instance_name, token, row) in enumerate(
            # The caller has excluded rows without a token.
            zip(part.instance_names, cast(list[int], part.tokens), typed, strict=True)
        ):
            position = moved.get(instance_name)
            is_live = position is not None
            if position is None:
                position = stream.current_token(instance_name)
                writer = link.writers.get((name, instance_name))
                is_live = writer is not None and writer.is_live
            if not is_live or token <= position:
                moved.pop(instance_name, None)
                single = RdataRun(name, instance_name, [token], [part.rows[index]])
                if (waiting := self._rows.handle(link, single)) is not None:
                    await waiting
                continue
            try:
                waiting = on_rdata(name, instance_name, token, [row])
                if waiting is not None:
                    await waiting
                moved[instance_name] = token
            except Exception as error:  # noqa: BLE001 -- reported to the observer
                if moved.pop(instance_name, None) is not None:
                    self._context.report_position(instance_name)
                failed = link.writers[name, instance_name]
                self._delivery.failed(failed, [(token, [row])], error)

"""Handling of received rows: decodes and delivers them, or has them fetched.

Theory of operation: rows are handled in slices. On the fast path, the rows of a slice
are decoded together and delivered; no coroutine is created unless the host returns an
awaitable, and the writer's reader is not notified of the rows. A slice takes the fast
path if the writer is live on the link, each row is a batch of its own, the tokens are
plausible, ascending and above the reader's position, and every row can be decoded.
About each batch of any other slice, the reader decides.

The slices of rows of several writers are decoded as a whole, too.

While the sink handles rows, the queue may overflow, and later rows are given up. The
rest of the rows in progress is then given up, too: the beginning of its batch may have
been dropped with the later rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from operator import lt
from typing import Any, cast

import attrs

from synapse_replication.handlers.events import DiscardReason
from synapse_replication.handlers.interfaces import Link
from synapse_replication.handlers.receiving.catch_up import CatchUps
from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.decoding import RowDecoder
from synapse_replication.handlers.receiving.writers import Writer, Writers
from synapse_replication.streams.reader import Verdict
from synapse_replication.wire.rdata import InterleavedGroup, RdataGroup

#: The maximum number of rows in a slice. Before each further slice of the same rows,
#: the yielder decides whether a break is due.
SLICE = 100


@attrs.define(eq=False, repr=False)
class RowHandler:
    """Handler of the rows of one stream, from all its writers.

    Use it in the reactor's thread only.

    :param give_up: has rows fetched that are not handled.
    :ivar overflow_count: how often the items of a full queue were given up.
    """

    _context: StreamContext
    _writers: Writers
    _decoder: RowDecoder
    _catch_ups: CatchUps
    _give_up: Callable[[Link, RdataGroup], None]
    overflow_count: int = attrs.field(default=0, init=False)

    # -- one writer -------------------------------------------------------------------

    def handle(self, link: Link, group: RdataGroup) -> Awaitable[None] | None:
        """Handle rows of one writer.

        :return: an awaitable if the rows are not handled completely yet; usually
            ``None``, so that no coroutine is created.
        """
        writer = self._writers.get(group.instance_name)
        if writer.reader.request is not None:
            self._catch_ups.park(writer, link, group)
            return None
        if len(group.rows) > SLICE:
            return self._handle_slices(writer, link, group)
        waiting = self._handle_slice(writer, link, group.tokens, group.rows)
        self._context.yielder.count(len(group.rows))
        return waiting

    async def _handle_slices(
        self, writer: Writer, link: Link, group: RdataGroup
    ) -> None:
        yielder, overflows = self._context.yielder, self.overflow_count
        for start in range(0, len(group.rows), SLICE):
            if start and yielder.is_due():
                await yielder.take_break()
            tokens = group.tokens[start : start + SLICE]
            rows = group.rows[start : start + SLICE]
            if self.overflow_count != overflows or writer.reader.request is not None:
                rest = RdataGroup(
                    group.stream_name,
                    group.instance_name,
                    group.tokens[start:],
                    group.rows[start:],
                )
                waiting = self._handle_rest(link, rest, overflows)
                if waiting is not None:
                    await waiting
                return
            waiting = self._handle_slice(writer, link, tokens, rows)
            if waiting is not None:
                await waiting
            yielder.count(len(rows))

    def _handle_rest(
        self, link: Link, rest: RdataGroup, overflows: int
    ) -> Awaitable[None] | None:
        """Handle rows after others that arrived with them, or give them up.

        :param overflows: :attr:`overflow_count` before the others were handled.
        """
        if self.overflow_count == overflows:
            return self.handle(link, rest)
        writer = self._writers.get(rest.instance_name)
        has_lost_later = writer.reader.links[link].is_lossy
        self._give_up(link, rest)
        if has_lost_later:
            writer.reader.lost_rows(link)
        return self._catch_ups.proceed(writer)

    def _handle_slice(
        self, writer: Writer, link: Link, tokens: list[Any], rows: list[bytes]
    ) -> Awaitable[None] | None:
        context, reader = self._context, writer.reader
        position = context.stream.current_token(writer.name)
        if (
            not reader.is_live_on(link)
            or None in tokens
            or tokens[0] <= position
            or (len(tokens) > 1 and not all(map(lt, tokens, tokens[1:])))
            or not context.is_plausible(writer.name, tokens[-1])
            or (decoded := self._decoder.decode(rows)) is None
        ):
            return self._handle_slowly(writer, link, tokens, rows)
        reader.links[link].heard = tokens[-1]
        if writer.ledger is not None:
            writer.ledger.add(tokens)
        batches = zip(tokens, [[row] for row in decoded])  # noqa: B905 -- equal lengths
        return self._deliver(writer, batches)

    async def _handle_slowly(
        self, writer: Writer, link: Link, tokens: list[Any], rows: list[bytes]
    ) -> None:
        """Handle rows that cannot take the fast path, batch by batch."""
        context, name, reader = self._context, writer.name, writer.reader
        reader.position = context.stream.current_token(name)
        complete = reader.gather(link, tokens, rows)
        if complete is None:
            context.discard(name, DiscardReason.NOT_CONNECTED, len(rows))
            return
        state, has_lost_later = reader.links[link], False
        for token, texts in complete:
            reader.position = context.stream.current_token(name)
            verdict = reader.batch(link, token, len(texts))
            if verdict is not Verdict.DELIVER:
                context.discard(name, self._reason(writer, verdict), len(texts))
            elif (decoded := self._decoder.decode(texts)) is None:
                reader.unreadable(token)
                context.discard(name, DiscardReason.UNDECODABLE, len(texts))
            else:
                writer.record([token])
                waiting = self._deliver(writer, [(token, decoded)])
                if waiting is not None:
                    await waiting
                    # Later rows may have been given up meanwhile.
                    has_lost_later |= state.is_lossy
        if has_lost_later or self._exceeds_bounds(state.pending):
            lost = reader.lost_rows(link)
            context.discard(name, DiscardReason.CATCHING_UP, lost)
        await self._catch_ups.proceed(writer)

    @staticmethod
    def _reason(writer: Writer, verdict: Verdict) -> DiscardReason:
        if verdict is Verdict.FETCH:
            return DiscardReason.CATCHING_UP
        is_copy = len(writer.reader.links) > 1
        return DiscardReason.REPEATED if is_copy else DiscardReason.OLD_TOKEN

    def _exceeds_bounds(self, pending: list[bytes]) -> bool:
        options = self._context.options
        return (
            len(pending) > options.max_batch_rows
            or sum(map(len, pending)) > options.max_queue_size
        )

    # -- several writers --------------------------------------------------------------

    async def handle_interleaved(self, link: Link, group: InterleavedGroup) -> None:
        """Handle rows of several writers; decode each slice as a whole if possible."""
        # The positions to report later, not once per row: at the next break, before a
        # slice that is not decoded as a whole, or at the end.
        advanced: dict[str, int] = {}
        yielder, overflows = self._context.yielder, self.overflow_count
        for start in range(0, len(group.rows), SLICE):
            if start and yielder.is_due():
                self._report_positions(advanced)
                await yielder.take_break()
            part = group.part(start, start + SLICE)
            decoded = None
            if None not in part.tokens and self._are_plausible(part):
                decoded = self._decoder.decode_quietly(part.rows)
            if decoded is None:
                self._report_positions(advanced)
                for of_writer in part.groups():
                    waiting = self._handle_rest(link, of_writer, overflows)
                    if waiting is not None:
                        await waiting
            else:
                await self._deliver_decoded(link, part, decoded, advanced, overflows)
            yielder.count(len(part.rows))
        self._report_positions(advanced)

    def _report_positions(self, advanced: dict[str, int]) -> None:
        for instance_name in advanced:
            self._context.report_position(instance_name)
        advanced.clear()

    def _are_plausible(self, part: InterleavedGroup) -> bool:
        tokens = cast(list[int], part.tokens)
        greatest = max(tokens)
        return self._context.is_plausible(
            part.instance_names[tokens.index(greatest)], greatest
        )

    async def _deliver_decoded(
        self,
        link: Link,
        part: InterleavedGroup,
        decoded: list[Any],
        advanced: dict[str, int],
        overflows: int,
    ) -> None:
        """Deliver the rows of live writers; handle other rows one at a time.

        :param part: the rows; each is a batch of its own.
        :param advanced: updated with the positions of live writers, to report later.
        :param overflows: see :meth:`_handle_rest`.
        """
        name, on_rdata = self._context.name, self._context.sink.on_rdata
        get = self._writers.get
        ledgers = {
            each: ledger
            for each in set(part.instance_names)
            if (ledger := get(each).ledger) is not None
        }
        for index, (instance_name, token, row) in enumerate(
            # The caller has excluded rows without a token.
            zip(part.instance_names, cast(list[int], part.tokens), decoded, strict=True)
        ):
            position = advanced.get(instance_name)
            if position is None:
                writer = self._writers.refreshed(instance_name)
                if writer.reader.is_live_on(link):
                    position = writer.reader.position
            if position is None or token <= position:
                advanced.pop(instance_name, None)
                single = RdataGroup(name, instance_name, [token], [part.rows[index]])
                waiting = self._handle_rest(link, single, overflows)
                if waiting is not None:
                    await waiting
                continue
            if instance_name in ledgers:
                ledgers[instance_name].add([token])
            try:
                waiting = on_rdata(name, instance_name, token, [row])
                if waiting is not None:
                    await waiting
                advanced[instance_name] = token
            except Exception as error:  # noqa: BLE001 -- reported to the observer
                if advanced.pop(instance_name, None) is not None:
                    self._context.report_position(instance_name)
                failed = self._writers.refreshed(instance_name)
                self._catch_ups.delivery_failed(failed, [(token, [row])], error)
        for instance_name, token in advanced.items():
            self._writers.refreshed(instance_name).reader.links[link].heard = token

    # -- delivery ---------------------------------------------------------------------

    def _deliver(
        self, writer: Writer, batches: Iterable[tuple[int, list[Any]]]
    ) -> Awaitable[None] | None:
        """Deliver batches of one writer, and report the resulting position.

        :return: an awaitable if the host returned one for a batch, else ``None``.
        """
        context = self._context
        name, on_rdata = context.name, context.sink.on_rdata
        remaining = iter(batches)
        for token, rows in remaining:
            try:
                waiting = on_rdata(name, writer.name, token, rows)
            except Exception as error:  # noqa: BLE001 -- reported to the observer
                left = [(token, rows), *remaining]
                self._catch_ups.delivery_failed(writer, left, error)
                return None
            if waiting is not None:
                left = [(token, rows), *remaining]
                return self._deliver_remaining(writer, left, waiting)
        context.report_position(writer.name)
        return None

    async def _deliver_remaining(
        self,
        writer: Writer,
        left: Sequence[tuple[int, list[Any]]],
        waiting: Awaitable[None] | None,
    ) -> None:
        """Wait until the host has handled the first batch, then deliver the others.

        :param waiting: the host's awaitable for the first batch.
        """
        context = self._context
        done = 0
        try:
            for done, (token, rows) in enumerate(left):
                if done:
                    waiting = context.sink.on_rdata(
                        context.name, writer.name, token, rows
                    )
                if waiting is not None:
                    await waiting
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            self._catch_ups.delivery_failed(writer, left[done:], error)
            return
        context.report_position(writer.name)

"""Rows of one writer that were committed below its position, and did not arrive.

Theory of operation: while a writer is verified, the tokens of its delivered rows are
recorded. Those that its database has, and that were not delivered, are fetched and
delivered late, if the host's sink accepts that. The reader is not notified: one token
within a range that is said to be empty says nothing about the rest of the range. If
such a row arrives afterwards, the whole range is fetched, and the row is delivered
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from synapse_replication.handlers.events import LateRows, RowsUnannounced
from synapse_replication.handlers.interfaces import LateRowSink
from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.decoding import RowDecoder
from synapse_replication.streams.pages import to_page
from synapse_replication.streams.token_ledger import TokenLedger

#: The most rows of a writer that are delivered late at once, and the delay before a
#: failed attempt is repeated, in s.
MAX_LATE: Final = 100
LATE_RETRY: Final = 10.0


class LateRowDelivery:
    """The comparison of one writer's delivered tokens with the committed ones.

    Use it in the reactor's thread only.
    """

    def __init__(self, name: str, context: StreamContext, decoder: RowDecoder) -> None:
        self._name = name
        self._context = context
        self._decoder = decoder
        #: The delivered tokens that are to be verified; ``None`` for none.
        self._ledger: TokenLedger | None = None
        #: Committed tokens below the position that did not arrive.
        self._tokens: list[int] = []

    @property
    def is_recording(self) -> bool:
        """Whether delivered tokens are recorded, to be verified."""
        return self._ledger is not None

    @property
    def has_rows(self) -> bool:
        """Whether rows are to be delivered late."""
        return bool(self._tokens)

    def begin(self) -> None:
        """Record the tokens that are delivered from now on."""
        if self._ledger is None:
            position = self._context.stream.current_token(self._name)
            self._ledger = TokenLedger(position)

    def end(self) -> None:
        """Record nothing any more."""
        self._ledger = None

    def record(self, tokens: Sequence[int]) -> None:
        """Record tokens, before they are delivered.

        If there are too many, nothing is recorded until :meth:`begin` is called again.
        """
        if self._ledger is not None and not self._ledger.add(tokens):
            self._ledger = None

    def rewind(self, token: int) -> None:
        """Forget the tokens above ``token``: the position was rewound to it.

        The catch-up that follows fetches these rows, and delivers them in order.
        """
        self._tokens = [each for each in self._tokens if each <= token]
        if self._ledger is not None:
            self._ledger.rewind(token)

    def range_upto(self, upto: int) -> tuple[int, int] | None:
        """Return the range of tokens up to ``upto`` to verify, if there is one.

        While :data:`MAX_LATE` rows wait to be delivered late, there is none.

        :return: the range's exclusive lower and inclusive upper bound.
        """
        ledger = self._ledger
        if ledger is None or ledger.verified >= upto:
            return None
        if len(self._tokens) >= MAX_LATE:
            # The sink, or the source, has failed for a long time.
            return None
        return ledger.verified, upto

    def verify(self, committed: Sequence[int], upto: int) -> bool:
        """Compare delivered tokens with committed ones, and report what is missing.

        :param committed: all committed tokens from the lower bound that
            :meth:`range_upto` returned up to ``upto``.
        :return: whether rows are to be delivered late.
        """
        if self._ledger is None:
            return False
        context = self._context
        missing = self._ledger.verify(committed, upto, MAX_LATE)
        if not missing:
            return False
        context.observer.observe(
            RowsUnannounced(context.name, self._name, tuple(missing))
        )
        if not isinstance(context.sink, LateRowSink):
            return False
        self._tokens += missing
        return True

    async def deliver(self) -> bool:
        """Fetch and deliver the late rows.

        :return: whether all were delivered; otherwise, the failure was reported.
        """
        context, delivered = self._context, 0
        # Until they were delivered, they are a reason not to forget the writer.
        tokens = tuple(self._tokens)
        try:
            for token in tokens:
                await self._deliver(token)
                delivered += 1
        except Exception as error:  # noqa: BLE001 -- reported to the observer
            context.observer.failure(f"delivering late rows of {context.name}", error)
            # The sink may always fail to handle this row: try the others before it.
            self._tokens.append(self._tokens.pop(delivered))
        del self._tokens[:delivered]
        if delivered:
            context.observer.observe(
                LateRows(context.name, self._name, tokens[:delivered])
            )
        return delivered == len(tokens)

    async def _deliver(self, token: int) -> None:
        """Fetch the rows of one token that is below the position, and deliver them."""
        context, sink = self._context, self._context.sink
        assert isinstance(sink, LateRowSink)
        result = await context.stream.get_updates_since(self._name, token - 1, token)
        page = to_page(result, token - 1, token, allow_encoded=True)
        batches = self._decoder.decode_page(self._name, page, skips_invalid=True)
        for at, rows in batches:
            waiting = rows and sink.on_late_rdata(context.name, self._name, at, rows)
            if waiting:
                await waiting

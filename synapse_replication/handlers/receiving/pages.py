"""The source of a catch-up's pages, with read-ahead of one page.

Theory of operation: while a page is being delivered, the next page can be fetched, so
that the source and this process work at the same time. The caller decides whether to
read ahead, and at most one page is read ahead. The page is used if it begins at the
cursor, and dropped otherwise.
"""

from __future__ import annotations

from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.writer_state import CatchUpState, ReadAhead
from synapse_replication.streams.stream import StreamUpdateResult

__all__ = ["PageSource"]


class PageSource:
    """The source of pages for the catch-ups of one stream."""

    def __init__(self, context: StreamContext) -> None:
        self._context = context
        # The source of a stream that is held in memory already queries the writer.
        held_in_memory = context.description.held_in_memory
        self._partial = None if held_in_memory else context.partial

    async def next_page(
        self, instance_name: str, run: CatchUpState
    ) -> tuple[StreamUpdateResult, int, bool]:
        """Return the page above a catch-up's cursor, fetched now or read ahead.

        :return: the result, the upper bound of the request, and whether the result
            comes from the writer's backlog.
        """
        ahead, run.ahead = run.ahead, None
        if ahead is not None and ahead.from_token == run.cursor:
            result, is_partial = await self._result_of(ahead)
            return result, ahead.upto_token, is_partial
        upto_token = run.target
        result, is_partial = await self._fetch(
            instance_name, run, run.cursor, upto_token
        )
        return result, upto_token, is_partial

    def read_ahead(
        self, instance_name: str, run: CatchUpState, from_token: int
    ) -> None:
        """Begin to fetch the page above ``from_token`` in the background."""
        ahead = run.ahead = ReadAhead(from_token, run.target)

        async def fetch() -> None:
            try:
                ahead.answer = await self._fetch(
                    instance_name, run, from_token, ahead.upto_token
                )
            except Exception as error:  # noqa: BLE001 -- raised by next_page()
                ahead.error = error

        ahead.process = self._context.run_as_background_process(
            f"replication_read_ahead_{self._context.name}", fetch
        )

    async def _fetch(
        self, instance_name: str, run: CatchUpState, from_token: int, upto_token: int
    ) -> tuple[StreamUpdateResult, bool]:
        """Fetch a page; return it and whether it comes from the writer's backlog."""
        if self._partial is not None and not run.is_drain:
            result = await self._partial.get_updates_since(
                self._context.name, instance_name, from_token, upto_token
            )
            if result is not None:
                return result, True
        result = await self._context.stream.get_updates_since(
            instance_name, from_token, upto_token
        )
        return result, False

    async def _result_of(self, ahead: ReadAhead) -> tuple[StreamUpdateResult, bool]:
        assert ahead.process is not None
        await ahead.process
        if ahead.error is not None:
            raise ahead.error
        assert ahead.answer is not None
        return ahead.answer

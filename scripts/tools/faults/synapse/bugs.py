"""Deliberate bugs that the checker must find; processes under test load them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from synapse_replication.handlers.receiving.decoding import RowDecoder
from synapse_replication.streams.pages import Page


def drop_fetched_events() -> None:
    """Advance past events that were fetched, without delivering them.

    They are dropped at the last step, so everything before it counts them as delivered,
    and nothing fetches them again: neither a later row nor a stored position.
    """
    decode_page = RowDecoder.decode_page

    def drop(
        self: RowDecoder, instance_name: str, page: Page, *, skips_invalid: bool
    ) -> Iterable[tuple[int, list[Any] | None]]:
        pairs = decode_page(self, instance_name, page, skips_invalid=skips_invalid)
        if self._name != "events":
            return pairs
        return [(token, []) for token, _ in pairs]

    RowDecoder.decode_page = drop  # type: ignore[method-assign]

"""Decoding of received and fetched rows into typed rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from synapse_replication.errors import RowDecodeError
from synapse_replication.handlers.events import Discarded, DiscardReason, ExtraFields
from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.streams.pages import Page, gather_batches
from synapse_replication.streams.stream import JsonValue


class RowDecoder:
    """Decoder of one stream's rows, which reports invalid rows and unknown fields.

    In a fetched page that cannot be decoded in a single call, unknown fields are not
    reported.
    """

    def __init__(self, context: StreamContext) -> None:
        self._name = context.name
        self._description = context.description
        self._codec = context.description.codec
        self._observer = context.observer

    def decode(self, texts: Sequence[bytes]) -> list[Any] | None:
        """Return typed rows; ``None`` if one of the texts is not a valid row."""
        try:
            decoded = self._codec.decode(texts)
        except RowDecodeError as error:
            self._observer.failure(f"decoding rows of {self._name}", error)
            return None
        if decoded.with_extra_fields:
            self._report_extra_fields(decoded.with_extra_fields)
        return decoded.rows

    def decode_valid(self, texts: Sequence[bytes]) -> list[Any] | None:
        """Return typed rows as :meth:`decode` does, but do not report an invalid row.

        The caller decodes smaller parts of the texts then.
        """
        try:
            decoded = self._codec.decode(texts)
        except RowDecodeError:
            return None
        if decoded.with_extra_fields:
            self._report_extra_fields(decoded.with_extra_fields)
        return decoded.rows

    def decode_quietly(self, texts: Sequence[bytes]) -> list[Any] | None:
        """Return typed rows; ``None`` if :meth:`decode` would report anything."""
        try:
            decoded = self._codec.decode(texts)
        except RowDecodeError:
            return None
        return None if decoded.with_extra_fields else decoded.rows

    def _report_extra_fields(self, count: int) -> None:
        self._observer.observe(ExtraFields(self._name, count))

    def decode_page(
        self, instance_name: str, page: Page, *, skips_invalid: bool
    ) -> Iterable[tuple[int, list[Any] | None]]:
        """Decode a fetched page.

        If the page is JSON text and all its rows are valid, they are decoded in a
        single call. Otherwise, they are decoded one at a time.

        :param skips_invalid: whether to skip and report invalid rows. Rows from another
            source than the stream's own may be valid there.
        :return: pairs of a token and its typed rows; ``None`` in place of the rows if
            one of them is invalid and must not be skipped.
        """
        if page.is_encoded:
            try:
                decoded = self._codec.decode(page.values)
            except RowDecodeError:
                # Decode the rows one at a time below, to skip only invalid rows.
                pass
            else:
                if decoded.with_extra_fields:
                    self._report_extra_fields(decoded.with_extra_fields)
                return gather_batches(page.tokens, decoded.rows)
        return (
            (
                token,
                self._decode_each(
                    instance_name, token, values, page.is_encoded, skips_invalid
                ),
            )
            for token, values in page.batches()
        )

    def _decode_each(
        self,
        instance_name: str,
        token: int,
        values: Iterable[JsonValue],
        are_encoded: bool,
        skips_invalid: bool,
    ) -> list[Any] | None:
        """Decode fetched values one at a time.

        An invalid row of the stream's own source is skipped and reported. If it were
        retried, the stream would never advance past it.
        """
        rows: list[Any] = []
        for value in values:
            try:
                if are_encoded:
                    rows += self._codec.decode([value]).rows
                else:
                    rows.append(self._codec.from_json(value))
            except RowDecodeError as error:
                if not skips_invalid:
                    return None
                self._observer.observe(
                    Discarded(self._name, instance_name, DiscardReason.SKIPPED, 1)
                )
                where = self._description.describe_row(token)
                reason = f"{where} was skipped: {error.reason}"
                self._observer.failure(
                    f"decoding a row of {self._name}",
                    RowDecodeError(self._name, 0, reason),
                )
        return rows

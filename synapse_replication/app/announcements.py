"""The commands on passive links, for what compares them with the database."""

from __future__ import annotations

from collections.abc import Callable, Collection

import attrs

from synapse_replication.errors import UnparsableLineError
from synapse_replication.handlers.events import Discarded, DiscardReason
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.streams.rows import decode_json
from synapse_replication.wire.commands import Command, RdataCommand
from synapse_replication.wire.rdata import (
    InterleavedGroup,
    RdataGroup,
    RefusedLine,
    read_lines,
)


@attrs.frozen(eq=False, repr=False)
class AnnouncementReader:
    """Parses the lines of passive links, and reports each row that readers discard.

    The links themselves report a line that is not a valid command. If it has a row,
    that row is not announced. A row that is not JSON is: readers fetch it.

    :param streams: the names of the known streams.
    :param observer: notified of discarded rows.
    :param receive: called with each command. A row that is not JSON is ``None``.
    """

    _streams: Collection[str]
    _observer: ReplicationObserver
    _receive: Callable[[Command], object]

    def tap(self, channel: str, line: bytes) -> None:
        """Read a line; see :data:`.Tap`."""
        for item in read_lines([line]):
            if isinstance(item, RdataGroup):
                self._read_rows(item)
            elif isinstance(item, InterleavedGroup):
                raise AssertionError("one line has the row of one writer")
            elif not isinstance(item, RefusedLine):
                self._receive(item)
            elif item.stream_name is not None and item.instance_name is not None:
                self._discard(
                    item.stream_name, item.instance_name, DiscardReason.UNPARSABLE
                )

    def _read_rows(self, group: RdataGroup) -> None:
        stream_name, instance_name = group.stream_name, group.instance_name
        for token, text in zip(group.tokens, group.rows, strict=True):
            try:
                row = decode_json(text)
            except ValueError as error:
                row = None
                self._observer.failure(
                    f"decoding rows of {stream_name}",
                    UnparsableLineError("RDATA", str(error)),
                )
                self._discard(stream_name, instance_name, DiscardReason.UNDECODABLE)
            self._receive(RdataCommand(stream_name, instance_name, token, row))

    def _discard(
        self, stream_name: str, instance_name: str, reason: DiscardReason
    ) -> None:
        if stream_name not in self._streams:
            reason = DiscardReason.UNKNOWN_STREAM
        self._observer.observe(Discarded(stream_name, instance_name, reason, 1))

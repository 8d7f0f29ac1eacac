"""The writers of one received stream, and what waits for each of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct, field

from synapse_replication.handlers.events import Resync
from synapse_replication.handlers.interfaces import Link
from synapse_replication.handlers.receiving.context import StreamContext
from synapse_replication.handlers.receiving.queue import ROW_OVERHEAD
from synapse_replication.handlers.timer import Timer
from synapse_replication.streams.reader import Reader, ReaderPolicy
from synapse_replication.streams.token_ledger import TokenLedger
from synapse_replication.wire.commands import PositionCommand
from synapse_replication.wire.rdata import InterleavedGroup, RdataGroup


class LostRow(Struct, frozen=True):
    """A writer's row that could not be parsed."""

    instance_name: str


class ReportedPosition(Struct, frozen=True):
    """A writer's report that it has sent all rows up to ``token``.

    It has no rows in ``(prev_token, token]``.

    :ivar is_first: whether the writer has just started, so that this is its initial
        position. Missing rows up to it are fetched, but are not reported as a gap.
    """

    instance_name: str
    prev_token: int
    token: int
    is_first: bool


class ReportedEpoch(Struct, frozen=True):
    """The epoch of a writer that holds the stream in memory.

    :ivar token: the writer's position.
    :ivar has_restarted: whether this may be the first message of a process.
    """

    instance_name: str
    token: int
    epoch: str
    has_restarted: bool


Announcement: TypeAlias = PositionCommand | ReportedPosition | ReportedEpoch | LostRow
Received: TypeAlias = RdataGroup | InterleavedGroup | Announcement


def size_of(item: Received) -> int:
    """Return the approximate size of an item in memory, in bytes."""
    if isinstance(item, (RdataGroup, InterleavedGroup)):
        return sum(map(len, item.rows)) + len(item.rows) * ROW_OVERHEAD
    return ROW_OVERHEAD


class Writer(Struct, eq=False):
    """One writer of the stream.

    :ivar reader: what this process knows about the writer.
    :ivar timer: ends a pause.
    :ivar parked: what arrived from the writer, in order, while a page was fetched.
    :ivar parked_size: its size, in bytes.
    :ivar resync: where the pages of the catch-up came from; ``None`` before the first.
    :ivar drained_upto: the last token of a removed writer that was reported as drained.
    :ivar ledger: the delivered tokens that are to be verified; ``None`` for none.
    :ivar late: committed tokens below the position that did not arrive, to be delivered
        late.
    :ivar late_timer: ends the delay after a failure to deliver them.
    """

    name: str
    reader: Reader
    timer: Timer
    late_timer: Timer
    parked: deque[tuple[Link, RdataGroup | Announcement]] = field(default_factory=deque)
    parked_size: int = 0
    resync: Resync | None = None
    drained_upto: int | None = None
    ledger: TokenLedger | None = None
    late: list[int] = field(default_factory=list)

    def record(self, tokens: Sequence[int]) -> None:
        """Record delivered tokens, if they are to be verified."""
        if self.ledger is not None:
            self.ledger.add(tokens)


class Writers:
    """The writers of one stream, by name."""

    def __init__(self, context: StreamContext) -> None:
        description, options = context.description, context.options
        self._context = context
        self._policy = ReaderPolicy(
            resettable=description.resettable,
            idempotent=description.idempotent,
            held_in_memory=description.held_in_memory,
            reverts_positions=options.reverts_positions,
            tolerance=options.plausible_distance,
        )
        self._links: list[Link] = []
        self._writers: dict[str, Writer] = {}
        self._saved_epochs = context.saved_epochs()

    def get(self, instance_name: str) -> Writer:
        """Return a writer, whose reader may have an old position; add it if new."""
        return self._writers.get(instance_name) or self._add(instance_name)

    def refreshed(self, instance_name: str) -> Writer:
        """Return a writer, whose reader has the present position; add it if new."""
        writer = self.get(instance_name)
        writer.reader.position = self._context.stream.current_token(instance_name)
        return writer

    def _add(self, instance_name: str) -> Writer:
        context = self._context
        reader = Reader(
            self._policy,
            lambda token: context.is_plausible(instance_name, token),
            context.stream.current_token(instance_name),
            self._saved_epochs.get(instance_name),
            lambda error: context.observer.failure(
                f"reading {context.name} of {instance_name}", error
            ),
        )
        for link in self._links:
            reader.link_up(link)
        clock = context.clock
        writer = Writer(instance_name, reader, Timer(clock), Timer(clock))
        self._writers[instance_name] = writer
        options, description = context.options, context.description
        if options.position_check_seconds and not description.held_in_memory:
            writer.ledger = TokenLedger(reader.position)
        return writer

    def all(self) -> list[Writer]:
        """Return all writers, whose readers have the present positions."""
        return [self.refreshed(name) for name in self._writers]

    def readers(self) -> dict[str, Reader]:
        """Return the reader of each writer. Thread-safe: dict.copy() is atomic."""
        return {name: each.reader for name, each in self._writers.copy().items()}

    def has_links(self) -> bool:
        """Return whether any link is up."""
        return bool(self._links)

    def link_up(self, link: Link) -> None:
        """Add a link."""
        self._links.append(link)
        for writer in self.all():
            writer.reader.link_up(link)

    def link_lost(self, link: Link) -> list[Writer]:
        """Remove a link; return the writers, whose readers still have it."""
        self._links.remove(link)
        return self.all()

    def forget(self, instance_name: str) -> None:
        """Remove a writer, unless something is missing."""
        writer = self._writers.get(instance_name)
        if writer is None or writer.reader.catch_up or writer.parked or writer.late:
            return
        del self._writers[instance_name]

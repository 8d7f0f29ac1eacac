"""The state of a reader: what its links have shown, what is empty, what is missing.

No module but :mod:`~synapse_replication.streams.reader` reads or changes these objects:
a contract of ``lint-imports`` lets no other one import their classes, except one module
of the exploration, which turns them into values.
"""

from __future__ import annotations

import enum
from typing import Final

import attrs

#: The minimum time for which an empty range can be found to be false, in s, if no row
#: follows it. If older ranges were not forgotten, the check of a writer that was idle
#: for days would query the tokens of all these days.
EMPTY_RANGE_WINDOW: Final = 60.0
#: The shortest interval between two checks of an empty range, in s.
EMPTY_RANGE_CHECK_INTERVAL: Final = 1.0


class LinkPhase(enum.Enum):
    """How much of a writer's rows a link is known to carry."""

    WAITING = "waiting"  #: no POSITION was handled
    OPENING = "opening"  #: rows before its POSITION are being fetched
    COMPLETE = "complete"


class CatchUpPace(enum.Enum):
    """Whether the next fetch of a catch-up may begin."""

    NEW = "new"  #: after it is admitted by the limit of BURST and INTERVAL
    PAUSED = "paused"  #: when the timer is due
    ADMITTED = "admitted"


@attrs.define(eq=False)
class LinkState:
    """The state of one link, with regard to the writer.

    :ivar heard: the greatest token that the link has carried, or the reader's position
        when the link came up, unless another link carried it. A lower token contradicts
        what was heard.
    :ivar pending: the JSON texts of the rows of an unfinished batch.
    :ivar is_lossy: whether rows of the next batch, or rows before it, were lost.
    :ivar is_from_start: whether all rows delivered so far may have arrived on this
        link, from the writer's process that it has now.
    :ivar epoch: the epoch of the writer that was stated last on the link.
    :ivar lost_upto: the reader's position when another link was lost, if only that link
        had carried it.
    :ivar must_ask: whether the writer's position is to be requested on the link.
    """

    heard: int
    phase: LinkPhase = LinkPhase.WAITING
    pending: list[bytes] = attrs.field(factory=list)
    is_lossy: bool = False
    is_from_start: bool = False
    epoch: str | None = None
    lost_upto: int = 0
    must_ask: bool = False


@attrs.define(eq=False)
class EmptyRange:
    """The range over which the position advanced without rows, up to ``end``.

    It holds at least the moves of the last :data:`EMPTY_RANGE_WINDOW` seconds.
    """

    start: int
    end: int
    middle: int
    since: float
    check_from: float = 0.0

    def extend(self, end: int, now: float) -> None:
        """Move the end; forget moves that are older than the window."""
        if now - self.since > EMPTY_RANGE_WINDOW:
            self.start, self.middle, self.since = self.middle, self.end, now
        self.end = end

    def settle(self, upto: int) -> None:
        """Remove the tokens up to ``upto``, whose rows were delivered."""
        self.start = max(self.start, upto)
        self.middle = max(self.middle, upto)

    def begin_check(self, now: float) -> bool:
        """Begin a check, unless one began a short time ago; return whether it began."""
        if now < self.check_from:
            return False
        self.check_from = now + EMPTY_RANGE_CHECK_INTERVAL
        return True


@attrs.define(eq=False)
class CatchUpState:
    """A catch-up: what is missing, and how far it is.

    :ivar cursor: the rows up to it are not missing any more.
    :ivar target: the greatest plausible token that the writer is said to have reached.
    :ivar empty_upto: the end of the range above the cursor that is said to be empty. It
        is not fetched, unless rows above it are.
    :ivar doubt: the greatest implausible one, if any.
    :ivar has_more_doubts: whether there were others, of which one may be true.
    :ivar rewind_to: the position to rewind to first, if any.
    :ivar epoch: the epoch that begins, if any.
    :ivar unreadable_upto: the rows up to it must come from the stream's own source.
    :ivar drain_upto: the last token of the writer, if it was removed.
    :ivar attempts: the number of failures since the last progress.
    :ivar lacking: how many of them mean that the source lacks rows that are claimed.
    :ivar pace: whether the next fetch may begin.
    """

    cursor: int
    target: int
    empty_upto: int
    doubt: int | None = None
    has_more_doubts: bool = False
    rewind_to: int | None = None
    epoch: str | None = None
    unreadable_upto: int | None = None
    drain_upto: int | None = None
    attempts: int = 0
    lacking: int = 0
    pace: CatchUpPace = CatchUpPace.NEW

    @property
    def requested_upto(self) -> int:
        """The token up to which the next page is requested."""
        if self.doubt is None or self.settled_upto < self.target:
            return self.target
        return self.doubt

    @property
    def claimed_upto(self) -> int:
        """The greatest token that the writer is said to have reached."""
        return max(self.target, self.doubt or self.target)

    @property
    def is_fetched(self) -> bool:
        """Whether nothing remains to be fetched."""
        return self.settled_upto >= self.requested_upto

    @property
    def settled_upto(self) -> int:
        """The token up to which nothing remains to be fetched."""
        return max(self.cursor, self.empty_upto)

    def claim(self, token: int, *, is_plausible: bool) -> None:
        """Fetch up to at least ``token``, too."""
        if is_plausible:
            self.target = max(self.target, token)
        else:
            self.has_more_doubts |= self.doubt not in (None, token)
            self.doubt = max(token, self.doubt or token)

    def drop_claims(self, said: int, reached: int) -> None:
        """Fetch nothing above ``said``, except what a removed writer has written.

        :param reached: the target is not lowered below this token.
        """
        said = max(said, self.drain_upto or said)
        self.target = min(self.target, max(said, reached))
        if self.doubt is not None and self.doubt > said:
            self.doubt, self.has_more_doubts = None, False

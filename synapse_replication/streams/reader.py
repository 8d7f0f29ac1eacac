"""The scoreboard of one writer of a stream at its reader, and the next actions.

Theory of operation: a :class:`Reader` is a scoreboard of the writer's tokens, in the
spirit of TCP's selective acknowledgements (RFC 6675). In ascending order, the tokens
form these ranges:

- up to the *floor*: delivered. Rows that arrive with these tokens are old;
- from the floor to the *position*: empty, because the writer, or what seemed to be the
  writer, said so. Nobody can confirm that a range is empty for good: a row may still be
  committed in it if the claim was false. If a row of this range arrives, the claim was
  false, and the range is missing;
- from the *cursor* to the *target*: missing, so that these rows must be fetched. The
  cursor is at the floor, at the position or between the two when the catch-up begins.
  The target is the greatest token that the writer is said to have reached;
- up to the *doubt*: a token beyond the plausible distance of the stream, which the
  source has to confirm;
- above: unknown.

Whether rows can be delivered as they arrive depends on the link, too: a link is
*complete* if every row that the writer sent since its POSITION on this link has
arrived, or is marked as missing. State belongs to the writer; a link is only a source.
If a writer has several links, the first copy of a row is delivered, and its further
copies are old. The tokens of a link never descend unless its writer restarted, or
something it said was false. Only a link that contradicts itself is therefore evidence
that the position is false; a link that is merely slower than another is not.

The reader has no clock, no I/O and no awaitable. Its driver reports events by calling
the methods below, one at a time, and then takes the actions that :meth:`Reader.next`
returns. :data:`TABLE` lists, for each event and state, what happens and the states that
may follow. ``scripts/explore`` takes each entry, except those that it names a unit test
for, and no other. If another event happens, or another state follows, this package has
a defect: that is reported, and all rows above the floor are fetched. An event that was
not expected is then handled as in state ``DUE``. Four methods record something that
changes no state, so they are not checked: :meth:`Reader.gather`,
:meth:`Reader.passed_live`, :meth:`Reader.drop_unfinished` and :meth:`Reader.delivered`.

``reader_state.py`` has what a reader stores of links, of an empty range and of a
catch-up; ``reader_decisions.py`` has what it returns.

See docs/reader.rst, and docs/failure-modes.rst: failure-gap-per-writer,
failure-two-links.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import Concatenate, Final, ParamSpec, TypeVar

import attrs

from synapse_replication.errors import CatchUpError
from synapse_replication.streams.pages import Page, to_page
from synapse_replication.streams.reader_decisions import (
    Action,
    Advance,
    Ask,
    BeginEpoch,
    Connected,
    Fetch,
    Finding,
    Finished,
    Pause,
    Refuted,
    Rewind,
    Verdict,
)
from synapse_replication.streams.reader_state import (
    CatchUpPace,
    CatchUpState,
    EmptyRange,
    LinkPhase,
    LinkState,
)
from synapse_replication.streams.reader_table import TABLE, ReaderEvent, State
from synapse_replication.streams.stream import StreamUpdateResult

#: The number of catch-ups that can begin without delay in a burst, and the interval
#: between further ones, in s. A claim costs a query, so it must not occupy a reader for
#: long; and it must not delay a reader for longer than the interval, either.
BURST: Final = 20
INTERVAL: Final = 0.1
#: The number of tokens that are stored to check a page for them.
MAX_EXPECTED: Final = 1000


class UnexpectedEventError(Exception):
    """An event happened that the table does not expect: a defect of this package."""


@attrs.frozen
class ReaderPolicy:
    """The differences between streams and hosts.

    :ivar resettable: whether the writer may restart from a lower token.
    :ivar idempotent: whether rows may be delivered late or twice.
    :ivar held_in_memory: whether the rows exist only in the writer's memory. A restart
        then loses them, and the few rows of the new process are fetched from 0.
    :ivar reverts_positions: whether a position that proves false is reverted. False for
        a recording, whose writers cannot be queried.
    :ivar tolerance: the distance by which a claim may exceed the last token that the
        source knows without being refuted: after a failover to a standby, that token
        may be too low. Not used for streams held in memory.
    """

    resettable: bool = False
    idempotent: bool = False
    held_in_memory: bool = False
    reverts_positions: bool = True
    tolerance: int = 0


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


#: The events that are the result of an action, or of a timer. The reader knows what an
#: action has changed.
_RESULTS: Final = frozenset(
    {
        ReaderEvent.UNREADABLE,
        ReaderEvent.PAGE,
        ReaderEvent.PAGE_DELIVERED,
        ReaderEvent.REWOUND,
        ReaderEvent.EPOCH_BEGUN,
        ReaderEvent.ADVANCED,
        ReaderEvent.FAILED,
        ReaderEvent.BEHIND,
        ReaderEvent.TIMER,
    }
)


def _on(
    event: ReaderEvent,
) -> Callable[
    [Callable[Concatenate[Reader, _Arguments], _Result]],
    Callable[Concatenate[Reader, _Arguments], _Result],
]:
    """Check each call of a method against :data:`TABLE`.

    An event that is not expected is reported, and then handled as if all rows above the
    floor were missing.
    """
    reads_position = event not in _RESULTS

    def decorate(
        method: Callable[Concatenate[Reader, _Arguments], _Result],
    ) -> Callable[Concatenate[Reader, _Arguments], _Result]:
        @wraps(method)
        def checked(
            self: Reader, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
        ) -> _Result:
            if reads_position:
                self._position = self._host_position()
            before = self.state
            entry = TABLE[event].get(before)
            if entry is None:
                self._unexpected(f"{event.name} in state {before.name}")
            result = method(self, *args, **kwargs)
            after = self.state
            if entry is not None and after not in entry.next_states:
                self._unexpected(
                    f"{event.name} led from state {before.name} to {after.name}"
                )
            return result

        return checked

    return decorate


@attrs.define(eq=False, repr=False)
class Reader:
    """The scoreboard of one writer of one stream.

    What is private here is so for the whole package: others report events, take
    actions, and ask.

    :param is_plausible: returns whether a token is within the plausible distance of the
        stream's last known token.
    :param host_position: returns the reader's position, which the host owns. It is read
        before each event, except those that are the result of an action.
    :param epoch: the writer's epoch to which the delivered rows belong, if known.
    :param report: called with an :exc:`UnexpectedEventError`, after which all above the
        floor counts as missing; ``None`` to raise the error.
    """

    _policy: ReaderPolicy
    _is_plausible: Callable[[int], bool]
    _host_position: Callable[[], int]
    _epoch: str | None = None
    _report: Callable[[UnexpectedEventError], object] | None = None
    # The reader's position; see the module's docstring.
    _position: int = attrs.field(init=False)
    # What each link carries.
    _links: dict[Hashable, LinkState] = attrs.field(factory=dict, init=False)
    # The range that ends at the position and was said to be empty, if any.
    _empty: EmptyRange | None = attrs.field(default=None, init=False)
    # The catch-up; ``None`` if nothing is missing.
    _catch_up: CatchUpState | None = attrs.field(default=None, init=False)
    # The page that was requested last, unless it is not wanted any more.
    _request: Fetch | None = attrs.field(default=None, init=False)
    # The page that is being delivered, and the cursor after it.
    _page: Page | None = attrs.field(default=None, init=False)
    _page_cursor: int = attrs.field(default=0, init=False)
    # The tokens of rows that arrived since the page was requested, and that it should
    # contain; the lowest MAX_EXPECTED of them, in order.
    _expected: list[int] = attrs.field(factory=list, init=False)
    _reports: list[Action] = attrs.field(factory=list, init=False)
    # When a further fetch is within the limit of BURST and INTERVAL.
    _due: float = attrs.field(default=0.0, init=False)
    # When the catch-up may begin, if it was delayed.
    _start: float | None = attrs.field(default=None, init=False)

    @_position.default
    def _read_position(self) -> int:
        return self._host_position()

    # -- the scoreboard ---------------------------------------------------------------

    @property
    def state(self) -> State:
        """The state of the writer. Reading it is thread-safe."""
        catch_up = self._catch_up
        if catch_up is None:
            return State.LIVE if self._links_with_position else State.WAITING
        if self._page is not None:
            return State.DELIVERING
        if self._request is not None:
            return State.FETCHING
        return State.PAUSED if catch_up.pace is CatchUpPace.PAUSED else State.DUE

    @property
    def _links_with_position(self) -> list[LinkState]:
        links = list(self._links.values())  # another thread may change the dict
        return [state for state in links if state.phase is not LinkPhase.WAITING]

    @property
    def _from_start(self) -> list[LinkState]:
        return [state for state in self._links.values() if state.is_from_start]

    @property
    def position(self) -> int:
        """The reader's position at the last event."""
        return self._position

    @property
    def epoch(self) -> str | None:
        """The writer's epoch to which the delivered rows belong, if known."""
        return self._epoch

    @property
    def floor(self) -> int:
        """The token above which no row was delivered."""
        return self._floor_at(self._position)

    def _floor_at(self, position: int) -> int:
        empty = self._empty
        if empty is None or empty.end != position:
            return position
        return min(empty.start, position)

    @property
    def reached(self) -> int:
        """The token above which rows are new."""
        catch_up = self._catch_up
        if catch_up is None:
            return self._position
        if catch_up.rewind_to is not None:
            return catch_up.cursor
        return max(self._position, catch_up.cursor)

    def is_live_on(self, link: Hashable) -> bool:
        """Return whether the rows of a link can be delivered as they arrive."""
        state = self._links.get(link)
        return (
            self._catch_up is None
            and state is not None
            and state.phase is LinkPhase.COMPLETE
            and not state.pending
            and not state.is_lossy
            and self._is_of_epoch(state)
        )

    def _is_of_epoch(self, state: LinkState) -> bool:
        """Return whether what a link carries is of the epoch of the delivered rows.

        Until that is certain, rows are fetched: a page says of which epoch it is.
        """
        return self._epoch is None or state.epoch == self._epoch

    def follows(self, link: Hashable, token: int) -> bool:
        """Return whether a link that announces ``token`` would change nothing."""
        position = self._host_position()
        return token == position == self._floor_at(position) and self.is_live_on(link)

    def follows_epoch(self, link: Hashable, epoch: str) -> bool:
        """Return whether a link that states an epoch would change nothing."""
        state = self._links.get(link)
        return self._epoch == epoch and state is not None and state.epoch == epoch

    @property
    def is_catching_up(self) -> bool:
        """Whether anything is missing. Reading it is thread-safe."""
        return self._catch_up is not None

    @property
    def is_draining(self) -> bool:
        """Whether a removed writer's last rows are missing. Reading is thread-safe."""
        catch_up = self._catch_up
        return catch_up is not None and catch_up.drain_upto is not None

    @property
    def request(self) -> Fetch | None:
        """The page that was requested last, unless it is not wanted any more."""
        return self._request

    @property
    def page(self) -> Page | None:
        """The page that is being delivered, unless it is not wanted any more."""
        return self._page

    @property
    def has_more_to_fetch(self) -> bool:
        """Whether a page is still to be requested."""
        return self._catch_up is not None and not self._catch_up.is_fetched

    @property
    def missing_range(self) -> tuple[int, int]:
        """The exclusive lower and inclusive upper bound of what a catch-up lacks."""
        catch_up = self._ongoing_catch_up
        return catch_up.cursor, catch_up.requested_upto

    @property
    def claimed_upto(self) -> int:
        """The token up to which rows were delivered or are being fetched."""
        self._position = self._host_position()
        catch_up = self._catch_up
        return self.reached if catch_up is None else catch_up.requested_upto

    # -- links ------------------------------------------------------------------------

    @property
    def link_count(self) -> int:
        """The number of links."""
        return len(self._links)

    def has_lost_rows(self, link: Hashable) -> bool:
        """Return whether rows of a link's next batch, or before it, were lost."""
        return self._links[link].is_lossy

    def unfinished_size(self, link: Hashable) -> tuple[int, int]:
        """Return the number of rows in a link's unfinished batch, and their bytes."""
        pending = self._links[link].pending
        return len(pending), sum(map(len, pending))

    @_on(ReaderEvent.LINK_UP)
    def link_up(self, link: Hashable) -> None:
        """Add a link. What the writer sends on it is not older than what it said.

        The exception is what another link carries: the writer may have sent its first
        POSITION on this link before the rows that arrived on that link. If the epoch is
        known, another one is what is still to be fetched: it may be of an earlier
        process, and a page may be ahead of all links.
        """
        if not self._links:
            self._resume()
        catch_up = self._catch_up
        said = self._position
        if catch_up is not None:
            if catch_up.rewind_to is not None:
                said = catch_up.rewind_to
            if self._epoch is None:
                said = max(said, catch_up.target, catch_up.doubt or 0)
        is_carried = any(
            state.phase is not LinkPhase.WAITING and state.heard >= said
            for state in self._links.values()
        )
        self._links[link] = LinkState(0 if is_carried else said)

    @_on(ReaderEvent.LINK_LOST)
    def link_lost(self, link: Hashable) -> None:
        """Remove a link. What is missing remains missing, and waits for a link.

        If only this link carried the position, and no epoch is known, the writer may
        have restarted since: a lower POSITION on another link shows it.
        """
        del self._links[link]
        if self._policy.resettable and all(
            state.heard < self._position for state in self._links_with_position
        ):
            for state in self._links.values():
                state.lost_upto = self._position

    # -- rows -------------------------------------------------------------------------

    def gather(
        self, link: Hashable, tokens: Sequence[int | None], rows: Sequence[bytes]
    ) -> list[tuple[int, list[bytes]]] | None:
        """Add rows to a link's unfinished batch; return the batches that are complete.

        :return: ``None`` if no POSITION was handled on the link: the rows are dropped.
        """
        state = self._links[link]
        if state.phase is LinkPhase.WAITING:
            state.is_lossy = tokens[-1] is None
            return None
        complete = []
        pending = state.pending
        for token, row in zip(tokens, rows, strict=True):
            pending.append(row)
            if token is not None:
                complete.append((token, pending))
                pending = []
        state.pending = pending
        return complete

    def passed_live(self, link: Hashable, token: int) -> None:
        """Record that the rows of a live link up to ``token`` were not asked about.

        The driver delivered them as they arrived.
        """
        state = self._links[link]
        state.heard = max(state.heard, token)

    @_on(ReaderEvent.BATCH)
    def batch(self, link: Hashable, token: int, size: int) -> Verdict:
        """Decide about the rows of one token that arrived on a link.

        :param size: the number of the rows.
        """
        state, catch_up = self._links[link], self._catch_up
        is_plausible = self._is_plausible(token)
        # While the sink handles rows of a link, later ones may be given up.
        is_older = token <= state.heard and self._is_plausible(state.heard)
        state.heard = max(state.heard, token)
        is_late = token <= self.reached
        if is_late and not self._policy.idempotent:
            # Late rows do not reset a resettable stream: only a POSITION, a report or a
            # new epoch does.
            if token <= self.floor:
                return Verdict.OLD
            if catch_up is None or token <= catch_up.cursor:
                self._go_back_to(self.floor)
            self._claim_row(token)
            return Verdict.FETCH
        if state.is_lossy:
            # The lost rows are below this token.
            self._miss(min(token - 1, self.floor) if is_late else self.floor, token)
            # After a late, older or false token, lost rows may still be above it.
            state.is_lossy = is_late or is_older or not is_plausible
            return Verdict.FETCH
        if is_late:
            return Verdict.DELIVER
        if catch_up is not None or not is_plausible or not self._is_of_epoch(state):
            self._miss(self._position if catch_up is None else catch_up.cursor, token)
            # A false token may have ended its batch too early.
            state.is_lossy = not is_plausible and size > 1
            return Verdict.FETCH
        return Verdict.DELIVER

    @_on(ReaderEvent.LOST_ROWS)
    def lost_rows(self, link: Hashable) -> int:
        """Record that rows of the next batch were lost; return how many with them."""
        dropped = self.drop_unfinished(link)
        self._links[link].is_lossy = True
        return dropped

    def drop_unfinished(self, link: Hashable) -> int:
        """Drop an unfinished batch, and return the number of its rows.

        The batch is fetched when its last row arrives.
        """
        state = self._links[link]
        dropped, state.pending = len(state.pending), []
        state.is_lossy |= dropped > 0
        return dropped

    @_on(ReaderEvent.OVERFLOW)
    def overflow(self, token: int | None = None) -> None:
        """Deliver nothing that arrives before the next action; fetch it instead.

        :param token: the token of rows that could be delivered.
        """
        self._begin()
        if token is not None:
            self._miss(min(token - 1, self._position), token)

    @_on(ReaderEvent.UNREADABLE)
    def unreadable(self, token: int) -> None:
        """Fetch a row that cannot be decoded from the stream's own source."""
        if self._page is None:
            self._miss(min(token - 1, self._position), token)
        catch_up = self._ongoing_catch_up
        self._page = self._request = None
        catch_up.unreadable_upto = max(token, catch_up.unreadable_upto or token)

    @_on(ReaderEvent.DELIVERY_FAILED)
    def delivery_failed(self, tokens: Sequence[int]) -> int:
        """Fetch the rows that the sink rejected, after a pause.

        :param tokens: the tokens of these rows, in any order; at least one.
        :return: the number of failures since the last progress.
        """
        for token in tokens:
            self._miss(min(self._position, token - 1), token)
        return self._pause()

    # -- announcements ----------------------------------------------------------------

    @_on(ReaderEvent.POSITION)
    def announced(self, link: Hashable, prev: int, new: int, now: float) -> Finding:
        """Handle a POSITION: the writer has no rows in ``(prev, new]``.

        It also ends a pause: the writer may have come back.

        :param now: the time of the driver's clock, in s.
        """
        self._resume()
        return self._compare(link, prev, new, now)

    def _compare(self, link: Hashable, prev: int, new: int, now: float) -> Finding:
        state, catch_up, position = self._links[link], self._catch_up, self._position
        self.drop_unfinished(link)
        is_first = state.phase is LinkPhase.WAITING
        if is_first:
            if any(each.heard >= position for each in self._links_with_position):
                # Another link carries the position again.
                state.lost_upto = 0
            state.phase = LinkPhase.OPENING
            state.is_from_start = position == 0 and self._epoch is None
        contradicts = new < state.heard or (
            # An epoch would show whether the writer has restarted.
            self._epoch is None and state.epoch is None and new < state.lost_upto
        )
        state.heard = max(state.heard, new)
        # A stream in tables that is at or below ``new`` follows without a reset, which
        # would skip the rows up to ``new``.
        is_resettable = self._policy.held_in_memory or new < position
        if self._policy.resettable and contradicts and is_resettable:
            return self._reset(link, new)
        if catch_up is not None:
            # A removed writer has come back.
            catch_up.drain_upto = None
            self._claim(new)
            if contradicts:
                self._contradict(state, new)
            return Finding.EXPECTED
        if new < position:
            found = self._below(link, new, contradicts)
            if is_first:
                self._begin()
            return found
        if new == position:
            if prev > self.floor and self._begin_check(now):
                self._begin().empty_upto = self.floor
            elif is_first:
                self._begin()
            return Finding.EXPECTED if is_first else Finding.NOTHING
        return self._advance_to(prev, new)

    def _advance_to(self, prev: int, new: int) -> Finding:
        """Advance to ``new``, without a fetch if no rows up to ``prev`` are missing."""
        catch_up = self._begin()
        self._claim(new)
        if prev > self._position or not self._is_plausible(new):
            return Finding.GAP
        if self.floor < prev < self._position:
            # It is the last row, and only a false position is above it.
            return Finding.GAP
        catch_up.empty_upto = new
        return Finding.EXPECTED

    @_on(ReaderEvent.REPORT)
    def reported(self, link: Hashable, prev: int, token: int, now: float) -> Finding:
        """Handle a report that the writer has sent all rows up to ``token``.

        It has no rows in ``(prev, token]``.
        """
        state = self._links[link]
        if state.phase is LinkPhase.WAITING:
            # The position of an idempotent stream may be greater than the writer's own.
            # Only a POSITION lowers it.
            if token < self._position and (
                self._policy.resettable or not self._policy.idempotent
            ):
                return Finding.NOTHING
            self._compare(link, prev, token, now)
            return Finding.EXPECTED
        contradicts = token < state.heard
        state.heard = max(state.heard, token)
        if self._catch_up is not None:
            self._claim(token)
            if contradicts:
                self._contradict(state, token)
            return Finding.EXPECTED
        if token > self._position:
            return self._advance_to(prev, token)
        if token < self._position:
            return self._below(link, token, contradicts)
        if self.floor < prev < token and self._begin_check(now):
            self._begin().empty_upto = self.floor
        return Finding.NOTHING

    @_on(ReaderEvent.STORED)
    def stored(self, token: int) -> Finding:
        """Handle a position that the writer persisted and may not have announced.

        It is no evidence about any link, and never lowers the position.
        """
        catch_up = self._catch_up
        if token <= self.reached or (catch_up and token <= catch_up.requested_upto):
            return Finding.NOTHING
        self._claim(token)
        return Finding.GAP

    @_on(ReaderEvent.EPOCH)
    def epoch_reported(
        self, link: Hashable, token: int, epoch: str, *, has_restarted: bool
    ) -> Finding:
        """Handle the epoch of a writer that holds its rows in memory.

        The delivered rows are obsolete if they belong to another epoch. If their epoch
        is not known, they belong to this one only if they arrived on links on which it
        is stated, and the writer has not connected since.

        :param token: the writer's position.
        :param has_restarted: whether this may be the first message of a process.
        """
        state, catch_up = self._links[link], self._catch_up
        stated, state.epoch = state.epoch, epoch
        if has_restarted:
            self._forget_start(state, token)
        if has_restarted or stated not in (None, epoch):
            # An earlier process sent what the link has carried.
            state.heard = token
            self._drop_claims(max(each.heard for each in self._links.values()))
        if epoch in (self._epoch, None if catch_up is None else catch_up.epoch):
            return Finding.NOTHING
        state.heard = max(state.heard, token)
        # Before a rewind to 0, nothing that was delivered is valid.
        is_rewinding = catch_up is not None and catch_up.rewind_to == 0
        if (self._position > 0 and not is_rewinding) or self._page is not None:
            is_same = self._arrived_in(epoch)
            if is_same is None:
                return Finding.NOTHING
            if not is_same:
                self._reset(link, token)
                self._ongoing_catch_up.epoch = epoch
                return Finding.RESET
        else:
            for other in self._links:
                self.drop_unfinished(other)
            # The requested page may be of another epoch.
            self._request = None
            if is_rewinding or not self._arrived_in(epoch):
                # So may be a row that the sink is handling.
                self._begin().rewind_to = 0
        self._begin().epoch = epoch
        return Finding.EXPECTED

    def _contradict(self, state: LinkState, token: int) -> None:
        """Drop claims of a link that now says less, if the source lacks these rows.

        The tokens of a link never descend, so one of its statements is false. If it is
        this one, the writer's next row or statement, or its stored position, claims the
        rows again.
        """
        if self._ongoing_catch_up.lacking == 0:
            return
        if self._policy.idempotent or self._policy.held_in_memory:
            # Its tokens may descend, or the source is the writer itself.
            return
        state.heard = token
        # The next row shows whether there are rows below it.
        state.is_lossy = True
        self._drop_unsaid()

    def _drop_unsaid(self) -> None:
        """Drop the claims that no link makes any more, and report that."""
        catch_up = self._ongoing_catch_up
        claimed = catch_up.claimed_upto
        said = max((state.heard for state in self._links.values()), default=claimed)
        if said >= claimed:
            return
        if said < self._position and not self._policy.held_in_memory:
            self._go_back_to(self.floor)
        self._drop_claims(said)
        if said > self.reached:
            # It may be that of another link, and implausible, too.
            self._claim(said)
        if catch_up.claimed_upto < claimed:
            self._reports.append(Refuted(claimed, said))

    def _drop_claims(self, said: int) -> None:
        """Fetch no rows above ``said``: nobody says any more that they exist."""
        if self._catch_up is not None:
            self._catch_up.drop_claims(said, self.reached)

    def _forget_start(self, state: LinkState, token: int) -> None:
        """Record that a writer at ``token`` may have restarted before a link's message.

        If the link carried more, that is of an earlier process, and the other links may
        have carried less of it.
        """
        state.is_from_start = False
        if token < state.heard:
            for each in self._links.values():
                each.is_from_start = False

    def _arrived_in(self, epoch: str) -> bool | None:
        """Return whether the delivered rows belong to an epoch.

        :return: ``None`` if a later statement will show it.
        """
        from_start = self._from_start
        if self._epoch is not None or not from_start:
            return False
        # Rows may have arrived on other links first, and be of another process.
        stated = {state.epoch for state in self._links_with_position}
        if self._page is not None or None in stated:
            return None
        if stated != {epoch}:
            return False
        has_caught_up = any(s.heard >= self._position for s in from_start)
        return True if has_caught_up else None

    @_on(ReaderEvent.REMOVED)
    def removed(self, upto: int, *, is_deleted: bool) -> Finding:
        """Fetch the last rows of a writer that announces nothing any more.

        No row up to ``upto`` is committed any more. So the source now shows whether the
        range up to the position is empty, which a later row would have shown otherwise.

        :param is_deleted: whether its stored position was deleted, so that it cannot
            write.
        """
        if self._links_with_position and not is_deleted:
            # The writer announces its rows itself.
            return Finding.NOTHING
        if self._catch_up is None and upto <= self.floor:
            return Finding.EXPECTED
        catch_up = self._begin()
        if catch_up.drain_upto is None:
            catch_up.empty_upto = catch_up.cursor
            # The requested page may lack rows that were committed since then.
            self._request = None
        catch_up.target = max(upto, catch_up.target)
        catch_up.drain_upto = max(upto, catch_up.drain_upto or upto)
        return Finding.GAP

    # -- results of actions -----------------------------------------------------------

    @_on(ReaderEvent.PAGE)
    def page_fetched(self, fetch: Fetch, result: StreamUpdateResult) -> Page | None:
        """Return the rows to deliver now; ``None`` if the page is not wanted.

        :raises CatchUpError: if the page does not advance beyond the cursor, or has no
            row while the source does not have all that was announced.
        """
        if fetch is not self._request:
            return None
        catch_up, self._request = self._ongoing_catch_up, None
        if fetch.from_token != catch_up.cursor or not self._accepts_epoch(result):
            return None
        upto = fetch.upto_token
        if result.last_token is not None and result.last_token < upto:
            self._refute(result.last_token)
            upto = min(upto, catch_up.requested_upto)
            if catch_up.rewind_to is not None or upto <= catch_up.cursor:
                return None
        page = to_page(result, catch_up.cursor, upto, allow_encoded=True)
        is_behind = result.last_token is not None and page.upto_token < upto
        if is_behind and not page.tokens and upto == fetch.upto_token:
            # To ask for the same range again at once would have the same answer.
            raise CatchUpError(
                f"the source returned no row, and {result.last_token} as the last "
                f"token, but rows up to {upto} were announced: it does not have them "
                "yet"
            )
        complete_upto = self._complete_upto(page)
        if complete_upto <= catch_up.cursor:
            catch_up.pace = CatchUpPace.NEW
            return None
        if complete_upto < page.upto_token:
            page = page.cut(complete_upto)
        elif result.last_token is None and page.upto_token < fetch.upto_token:
            # More pages follow.
            self._page_cursor = page.upto_token
            self._page = page
            return page
        # The bound may be false. Later claims have the tokens above the last row
        # fetched again.
        self._page_cursor = page.tokens[-1] if page.tokens else catch_up.cursor
        self._page = page
        return page

    def _complete_upto(self, page: Page) -> int:
        """Return the token up to which a page has all rows.

        The bound of its request may have been false. Rows that arrived since then may
        have been committed after the source answered.
        """
        for token in self._expected:
            if token > page.upto_token:
                return page.upto_token
            index = bisect_left(page.tokens, token)
            if page.tokens[index : index + 1] != [token]:
                return token - 1
        if len(self._expected) == MAX_EXPECTED:
            return min(page.upto_token, self._expected[-1])
        return page.upto_token

    def delivered(self, token: int) -> None:
        """Record that the rows of a page up to ``token`` were delivered.

        The page may not be wanted any more.
        """
        catch_up = self._catch_up
        if catch_up is not None and catch_up.rewind_to is None:
            if token > catch_up.cursor:
                catch_up.cursor = token
            catch_up.attempts = catch_up.lacking = 0
        if self._empty is not None:
            self._empty.settle(token)

    @_on(ReaderEvent.PAGE_DELIVERED)
    def page_delivered(self) -> None:
        """Record that all rows of the page were delivered."""
        catch_up, page = self._ongoing_catch_up, self._page
        if page is None:
            # The event was not expected.
            return
        # The writer itself answers for a stream held in its memory: no row is committed
        # later below the end of the page.
        is_final = self._policy.held_in_memory
        cursor = page.upto_token if is_final else self._page_cursor
        catch_up.cursor = max(catch_up.cursor, cursor)
        catch_up.empty_upto = max(catch_up.empty_upto, page.upto_token)
        self._page = None

    @_on(ReaderEvent.REWOUND)
    def rewound(self, epoch: str | None = None) -> None:
        """Record that the position was rewound, and that an epoch began, if any."""
        catch_up = self._ongoing_catch_up
        assert catch_up.rewind_to is not None
        self._position = catch_up.cursor = catch_up.empty_upto = catch_up.rewind_to
        catch_up.rewind_to = None
        self._empty = None
        self._begin_epoch(epoch)

    @_on(ReaderEvent.EPOCH_BEGUN)
    def epoch_begun(self, epoch: str) -> None:
        """Record that an epoch began without a rewind."""
        self._begin_epoch(epoch)

    def _begin_epoch(self, epoch: str | None) -> None:
        """Record the epoch, unless another one was stated while it began."""
        catch_up = self._ongoing_catch_up
        if epoch is not None:
            self._epoch = epoch
            for state in self._links.values():
                if state.phase is LinkPhase.WAITING:
                    # The link has carried nothing, and what others carried when it came
                    # up may be of an earlier process.
                    state.heard = 0
        if catch_up.epoch == epoch:
            catch_up.epoch = None

    @_on(ReaderEvent.ADVANCED)
    def advanced(self, target: int, now: float) -> None:
        """Record that the position was advanced to ``target``.

        :param now: the time of the driver's clock, in s.
        """
        catch_up = self._ongoing_catch_up
        if self._policy.held_in_memory and catch_up.cursor >= target:
            # Later rows have replaced what a slow link may still carry.
            self._empty = None
        elif self._policy.reverts_positions and target > self._position:
            if self._empty is not None and self._empty.end == self._position:
                self._empty.extend(target, now)
            else:
                self._empty = EmptyRange(self._position, target, self._position, now)
        self._position = max(self._position, target)
        if (
            catch_up.is_fetched
            and catch_up.target <= target
            and catch_up.rewind_to is None
            and catch_up.epoch is None
        ):
            self._finish()

    @_on(ReaderEvent.FAILED)
    def failed(self) -> int:
        """Pause after a failed action; return the failures since the last progress."""
        return self._pause()

    @_on(ReaderEvent.BEHIND)
    def source_behind(self) -> int:
        """Pause because the source may lack rows that it will have soon.

        If they do not exist, it never has them, and only their writer knows that: it is
        asked for its position, less and less often.

        :return: the number of failures since the last progress.
        """
        catch_up = self._ongoing_catch_up
        attempts = self._pause()
        catch_up.lacking += 1
        self._drop_unsaid()
        if catch_up.lacking > 1 and catch_up.lacking.bit_count() == 1:
            for state in self._links.values():
                state.must_ask |= state.heard > catch_up.cursor
        return attempts

    @_on(ReaderEvent.TIMER)
    def timer_due(self) -> None:
        """End a pause."""
        if self._catch_up is not None and self._catch_up.pace is CatchUpPace.PAUSED:
            self._catch_up.pace = CatchUpPace.ADMITTED

    # -- actions ----------------------------------------------------------------------

    @_on(ReaderEvent.NEXT)
    def next(self, now: float) -> Action | None:
        """Return the next action; ``None`` if there is none until the next event.

        The driver executes it and reports its result. A :class:`Fetch` runs in the
        background. The result of :class:`Rewind`, :class:`BeginEpoch` and
        :class:`Advance` must be reported before the next call.

        :param now: the time of the driver's clock, in s.
        """
        if (report := self._next_report()) is not None:
            return report
        catch_up = self._catch_up
        if catch_up is None or catch_up.pace is CatchUpPace.PAUSED:
            return None
        if catch_up.rewind_to == self._position:
            catch_up.cursor = catch_up.empty_upto = self._position
            catch_up.rewind_to = self._empty = None
        if catch_up.epoch is not None and catch_up.rewind_to is None:
            return BeginEpoch(catch_up.epoch)
        if not self._links:
            return None
        if self._page is not None:
            return self._read_ahead(self._page)
        if self._request is not None:
            return None
        self._clamp()
        if catch_up.is_fetched and catch_up.rewind_to is None:
            is_opening = any(s.phase is LinkPhase.OPENING for s in self._links.values())
            if catch_up.target > self._position or (
                catch_up.target == self._position and is_opening
            ):
                return Advance(catch_up.target)
            self._finish()
            return self.next(now)
        if catch_up.pace is CatchUpPace.NEW and (wait := self._wait(now)) > 0:
            catch_up.pace = CatchUpPace.PAUSED
            return Pause(wait)
        catch_up.pace, self._start = CatchUpPace.ADMITTED, None
        if catch_up.rewind_to is not None:
            is_reset = catch_up.rewind_to < self.floor
            return Rewind(catch_up.rewind_to, catch_up.epoch, is_reset=is_reset)
        return self._fetch(catch_up.cursor)

    def _next_report(self) -> Action | None:
        if self._reports:
            return self._reports.pop(0)
        for link, state in self._links.items():
            if state.must_ask:
                state.must_ask = False
                return Ask(link)
        return None

    def _fetch(self, from_token: int) -> Fetch:
        catch_up = self._ongoing_catch_up
        from_source = catch_up.drain_upto is not None or (
            catch_up.unreadable_upto is not None
            and from_token < catch_up.unreadable_upto
        )
        self._expected = []
        self._request = Fetch(from_token, catch_up.requested_upto, from_source)
        return self._request

    def _read_ahead(self, page: Page) -> Fetch | None:
        """Request the page after ``page``, while that is being delivered.

        In an idempotent stream, further rows below its end may be committed meanwhile.
        """
        catch_up = self._ongoing_catch_up
        if (
            self._request is not None
            or self._policy.idempotent
            or page.upto_token >= catch_up.requested_upto
        ):
            return None
        return self._fetch(self._page_cursor)

    def _wait(self, now: float) -> float:
        """Return the delay, in s, before a fetch may begin: at most the interval.

        Rows that arrive meanwhile do not delay it once more.
        """
        if self._start is None:
            due = max(self._due, now) + INTERVAL
            self._due = min(due, now + (BURST + 1) * INTERVAL)
            self._start = max(now, self._due - BURST * INTERVAL)
        return self._start - now

    # -- changes of the scoreboard ----------------------------------------------------

    @property
    def _ongoing_catch_up(self) -> CatchUpState:
        """The catch-up, which has begun."""
        assert self._catch_up is not None
        return self._catch_up

    def _begin(self) -> CatchUpState:
        """Return the catch-up; begin it if nothing is missing yet."""
        if self._catch_up is None:
            self._catch_up = CatchUpState(self.floor, self._position, self._position)
        return self._catch_up

    def _miss(self, above: int, token: int) -> None:
        """Fetch the rows above ``above``, up to those of ``token``, which arrived."""
        if self._catch_up is None and self._policy.idempotent:
            self._catch_up = CatchUpState(above, above, above)
        catch_up = self._begin()
        catch_up.cursor = min(catch_up.cursor, above)
        self._claim_row(token)

    def _claim(self, token: int) -> None:
        """Fetch up to at least ``token``, too."""
        self._begin().claim(token, is_plausible=self._is_plausible(token))

    def _claim_row(self, token: int) -> None:
        """Fetch up to at least ``token``, of which a row arrived."""
        self._claim(token)
        catch_up = self._begin()
        if token <= catch_up.empty_upto:
            catch_up.empty_upto = catch_up.cursor
        request, page = self._request, self._page
        if request is not None and request.from_token < token <= request.upto_token:
            self._expect(token)
        if page is not None and catch_up.cursor < token <= page.upto_token:
            index = bisect_left(page.tokens, token)
            if page.tokens[index : index + 1] != [token]:
                # The row was committed after the source answered.
                self._page = self._request = None

    def _expect(self, token: int) -> None:
        index = bisect_left(self._expected, token)
        if self._expected[index : index + 1] != [token]:
            self._expected.insert(index, token)
            del self._expected[MAX_EXPECTED:]

    def _go_back_to(self, token: int) -> None:
        """Fetch the rows above ``token`` again: the position above it is false.

        The sink of a resettable stream forgets all rows when its position moves back.
        """
        catch_up = self._begin()
        if self._policy.resettable and token < self._position:
            token = min(0, token)
        catch_up.cursor = catch_up.empty_upto = min(catch_up.cursor, token)
        if catch_up.target <= self._position:
            catch_up.target = token
        if token < self._position:
            catch_up.rewind_to = token
        self._page = self._request = None

    def _below(self, link: Hashable, token: int, contradicts: bool) -> Finding:
        """Compare a token that is below the position with what the link said before."""
        if self._policy.idempotent or not contradicts:
            return Finding.NOTHING
        floor = self.floor
        if floor == self._position:
            # To rewind would deliver rows twice.
            return Finding.NOTHING if self._policy.held_in_memory else Finding.AHEAD
        if self._policy.held_in_memory:
            return self._reset(link, token)
        if self._links[link].heard <= floor:
            # Only other links carried the claim that the range above is empty.
            return Finding.NOTHING
        self._go_back_to(floor)
        self._claim(max(floor, token))
        self._links[link].heard = token
        return Finding.RESET

    def _reset(self, link: Hashable, token: int) -> Finding:
        """Begin anew: the writer has restarted, or may have.

        Until their next POSITION, the other links may carry rows from before. If they
        do not, the writer may have announced more on them than on this one.
        """
        restart = min(0, token) if self._policy.held_in_memory else token
        self._catch_up = CatchUpState(restart, token, restart, rewind_to=restart)
        self._page = self._request = None
        self._epoch = None
        for other, state in self._links.items():
            self.drop_unfinished(other)
            state.heard = token if other == link else min(state.heard, restart)
            state.lost_upto = 0
            state.is_from_start = other == link and state.phase is not LinkPhase.WAITING
            if other != link and state.phase is not LinkPhase.WAITING:
                state.phase = LinkPhase.WAITING
                state.must_ask |= state.epoch is None
        return Finding.RESET

    def _accepts_epoch(self, result: StreamUpdateResult) -> bool:
        """Return whether a page belongs to the epoch of the delivered rows."""
        catch_up, epoch = self._ongoing_catch_up, result.epoch
        if epoch is None or epoch in (self._epoch, catch_up.epoch):
            return True
        if self._epoch is None and self.floor > 0 and self._from_start:
            # It will be certain when the epoch is stated on that link.
            return True
        catch_up.epoch = epoch
        if self._epoch is None and self.floor == 0:
            return True
        catch_up.cursor = catch_up.empty_upto = catch_up.rewind_to = 0
        if result.last_token is not None:
            # The rows above it were those of an earlier process.
            self._drop_claims(result.last_token)
        return False

    def _refute(self, last_token: int) -> None:
        """Drop the claims that are too far above the last token that exists."""
        catch_up = self._ongoing_catch_up
        is_exact = self._policy.held_in_memory
        limit = last_token + (0 if is_exact else self._policy.tolerance)
        if catch_up.claimed_upto > limit:
            self._reports.append(Refuted(catch_up.claimed_upto, last_token))
        is_lossy = catch_up.has_more_doubts or catch_up.target > limit
        if catch_up.doubt is not None and catch_up.doubt > limit:
            catch_up.doubt, catch_up.has_more_doubts = None, False
        cursor = catch_up.cursor
        if catch_up.target > limit:
            # The writer itself is the source of a stream held in memory.
            catch_up.target = max(cursor, last_token if is_exact else cursor)
        for state in self._links.values():
            if state.phase is LinkPhase.OPENING and catch_up.requested_upto <= cursor:
                state.phase = LinkPhase.WAITING
            # A smaller claim may have been true; the next token shows it.
            state.is_lossy |= is_lossy
            state.heard = min(state.heard, max(limit, self._position))
        if is_exact and self.floor <= last_token < self._position:
            self._go_back_to(last_token)

    def _clamp(self) -> None:
        """Do not fetch rows again that were delivered since the catch-up began."""
        catch_up = self._ongoing_catch_up
        if catch_up.doubt is not None and (
            catch_up.doubt <= catch_up.settled_upto
            or self._is_plausible(catch_up.doubt)
        ):
            catch_up.target, catch_up.doubt = max(catch_up.target, catch_up.doubt), None
        is_reset = self._policy.resettable and catch_up.rewind_to is not None
        if self._policy.idempotent or is_reset:
            return
        catch_up.cursor = max(catch_up.cursor, self.floor)
        if catch_up.rewind_to is not None and catch_up.rewind_to < self.floor:
            catch_up.rewind_to = None if self.floor == self._position else self.floor

    def _begin_check(self, now: float) -> bool:
        """Begin a check of the empty range, if it is due; return whether it began."""
        empty = self._empty
        if empty is None or self.floor == self._position:
            return False
        return empty.begin_check(now)

    def _unexpected(self, what: str) -> None:
        """Report what the table does not list; count all above the floor as missing.

        :raises UnexpectedEventError: if there is nobody to report it to.
        """
        error = UnexpectedEventError(what)
        if self._report is None:
            raise error
        self._report(error)
        self._page = self._request = None
        catch_up = self._begin()
        catch_up.cursor = catch_up.empty_upto = min(catch_up.cursor, self.floor)
        self._resume()
        for link in self._links:
            self.lost_rows(link)

    def _pause(self) -> int:
        catch_up = self._ongoing_catch_up
        self._page = self._request = None
        catch_up.pace = CatchUpPace.PAUSED
        catch_up.attempts += 1
        return catch_up.attempts

    def _resume(self) -> None:
        if self._catch_up is not None and self._catch_up.pace is CatchUpPace.PAUSED:
            self._catch_up.pace = CatchUpPace.NEW

    def _finish(self) -> None:
        catch_up = self._ongoing_catch_up
        self._catch_up = None
        if catch_up.drain_upto is not None and self._empty is not None:
            self._empty.settle(min(catch_up.drain_upto, catch_up.settled_upto))
        self._reports.append(Finished(catch_up.drain_upto))
        for link, state in self._links.items():
            if catch_up.drain_upto is not None:
                # If the writer returns, it announces its position first.
                state.phase = LinkPhase.WAITING
            elif state.phase is LinkPhase.OPENING:
                state.phase = LinkPhase.COMPLETE
                self._reports.append(Connected(link))

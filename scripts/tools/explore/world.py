"""One writer, its links and a reader of it, in a world that is small enough to explore.

Theory of operation: the reader is the package's own
:class:`~synapse_replication.streams.reader.Reader`; all else is a model of what
surrounds it. An event is a tuple of its name and arguments. :meth:`World.events` lists
the events that can happen next, and :meth:`World.apply` applies one of them and raises
:exc:`ViolationError` if it breaks a promise. :meth:`World.freeze` returns the state as
a tuple of integers, in which the links, which are interchangeable, are sorted.

A writer sends the same messages on all links, so they are in one log, and a link has a
place in it. What a truthful heartbeat or POSITION says depends only on that place. The
messages after it are on their way; if the link breaks, they are lost. Items that wait
in the reader's queue are among them.

The driver is a model of ``handlers/receiving``: the same calls in the same order. What
it does in one go is one event, unless a fault can strike in between.

A stream's other writers are not modelled. Their readers share only faults, which are
events here as well, and their ids are ids that this writer never commits. So each run
of several writers is, for each of them, a run of this world.

Time stands still. An event lets all waiting end, or passes a part of it.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterator
from typing import Any, Final, TypeAlias

import attrs
from typing_extensions import Self

from scripts.tools.explore.reader_values import (
    Frozen,
    awaits_check,
    delay,
    elapse,
    end_check_interval,
    freeze,
    is_complete_on,
    is_waiting_on,
    thaw,
)
from synapse_replication.errors import CatchUpError
from synapse_replication.streams import reader as machine
from synapse_replication.streams.reader import Reader, ReaderPolicy
from synapse_replication.streams.reader_decisions import (
    Action,
    Advance,
    Ask,
    BeginEpoch,
    Fetch,
    Finished,
    Pause,
    Rewind,
    Verdict,
)
from synapse_replication.streams.stream import StreamUpdateResult

Event: TypeAlias = tuple[Any, ...]

#: The plausible distance of a token.
DISTANCE: Final = 1
#: How long an event ``moment`` lasts: half of the interval between fetches, in s.
MOMENT: Final = machine.INTERVAL / 2
#: The token whose rows arrive in two parts.
LARGE: Final = 2

PENDING, COMMITTED, ABORTED = 1, 2, 3


class ViolationError(Exception):
    """A promise that was broken."""


class Kind(enum.Enum):
    """The kind of the stream."""

    DATABASE = "database"
    STANDBY = "standby"  #: the source is a standby, which may lag behind
    CACHES = "caches"  #: rows may be delivered late or twice
    MEMORY = "memory"  #: the writer states its epoch
    HOST_MEMORY = "host memory"  #: so, too, but a page of its rows does not
    STOCK_MEMORY = "stock memory"  #: nobody states an epoch


@attrs.frozen
class Bounds:
    """How much may happen at most.

    :ivar ids: of the stream; tokens of rows.
    :ivar losses: messages that are lost silently or noticeably, or cannot be decoded.
    :ivar lies: whether someone may claim one false position, again and again.
    :ivar failures: of the sink or of the source.
    :ivar removals: how often the writer may be found to be removed.
    :ivar hellos: how often the writer may reconnect.
    :ivar stored: whether the reader's process reads the writer's stored position.
    :ivar total: how many of all these faults together, unless it is ``None``.
    :ivar burst: how many fetches may begin without delay; ``None`` if all may.
    :ivar faults: how many faults may happen together.
    :ivar all_faults: those that may happen, as bits in the order of :data:`FAULTS`.
    """

    ids: int = 3
    links: int = 1
    breaks: int = 0
    losses: int = 0
    overflows: int = 0
    lies: int = 0
    writer_crashes: int = 0
    reader_crashes: int = 0
    failures: int = 0
    removals: int = 0
    hellos: int = 0
    stored: bool = False
    total: int | None = None
    burst: int | None = None
    faults: int = attrs.field(init=False, repr=False)
    all_faults: int = attrs.field(init=False, repr=False)

    @faults.default
    def _faults(self) -> int:
        return sum(self.budgets) if self.total is None else self.total

    @all_faults.default
    def _all_faults(self) -> int:
        return sum(1 << fault for fault, count in enumerate(self.budgets) if count)

    @property
    def budgets(self) -> list[int]:
        """How much may happen of each fault, in the order of the names below."""
        return [getattr(self, name) for name in FAULTS]

    def spent(self, left: int) -> int:
        """Return how many faults happened, if those of the bits ``left`` did not."""
        return (self.all_faults ^ left).bit_count()


FAULTS: Final = (
    "breaks",
    "losses",
    "overflows",
    "lies",
    "writer_crashes",
    "reader_crashes",
    "failures",
    "removals",
    "hellos",
)
BREAK, LOSS, OVERFLOW, LIE, CRASH, DIE, FAIL, REMOVE, HELLO = range(len(FAULTS))


def policy_of(kind: Kind) -> ReaderPolicy:
    """Return the policy of the reader of a stream."""
    return _POLICIES[kind]


_POLICIES: Final = {
    Kind.DATABASE: ReaderPolicy(tolerance=DISTANCE),
    Kind.STANDBY: ReaderPolicy(tolerance=DISTANCE),
    Kind.CACHES: ReaderPolicy(idempotent=True, tolerance=DISTANCE),
    Kind.MEMORY: ReaderPolicy(resettable=True, held_in_memory=True),
    Kind.HOST_MEMORY: ReaderPolicy(resettable=True, held_in_memory=True),
    Kind.STOCK_MEMORY: ReaderPolicy(resettable=True, held_in_memory=True),
}


class WorldLink:
    """One link.

    :ivar at: how many messages of the log were handled.
    :ivar half: whether the first part of the next one was handled, too.
    :ivar token: the writer's position at this place of the log.
    :ivar life: the writer's process at this place.
    :ivar said: whether the epoch of this process was stated on this link.
    :ivar asked: whether a standby's reader has requested the position on it.
    :ivar hidden: the tokens of rows of which a silent loss deprived the link, as bits.
    :ivar carried: the tokens of rows that arrived on it, as bits.
    """

    __slots__ = (
        "asked", "at", "carried", "half", "hidden", "life", "said", "token", "up",
    )  # fmt: skip

    def __init__(
        self,
        up: bool = False,
        at: int = 0,
        half: bool = False,
        token: int = 0,
        life: int = 0,
        said: bool = False,
        asked: bool = False,
        hidden: int = 0,
        carried: int = 0,
    ) -> None:
        self.up = up
        self.at = at
        self.half = half
        self.token = token
        self.life = life
        self.said = said
        self.asked = asked
        self.hidden = hidden
        self.carried = carried


class World:
    """A state of the world. Create the first one with :meth:`begin`.

    :ivar ids: the status of each id, from 1 on.
    :ivar sent: the token up to which the writer has sent its rows.
    :ivar life: the number of restarts of the writer.
    :ivar removed: whether the writer was removed.
    :ivar log: what was sent: (prev token, new token, whether it is a row).
    :ivar position: of the host.
    :ivar known: the source's last token, as far as the reader's process knows it.
    :ivar lie: the false position; 0 if there is none yet.
    :ivar left: how much of each fault may still happen.
    :ivar total: how much of all faults may still happen.
    :ivar answer: what the source answered to the request: rows, upto token, last token,
        life, ids in flight below them.
    :ivar page_life: the writer's process to which the page belongs.
    :ivar page_holes: the ids that were in flight when the page was read, as bits.
    :ivar busy: what the driver is doing.
    :ivar given_up: whether the queue is full.
    :ivar timer: how long the timer still runs: 0 if there is none, -1 for an unknown
        time.
    :ivar timer_due: whether the end of a pause is in the queue.
    :ivar wait: how long a fetch may still be delayed; ``None`` if none is.
    :ivar delivered: the tokens of delivered rows of the present process, as bits.
    :ivar unsure: those of them whose epoch was not known when they were delivered.
    :ivar forgiven: the tokens of rows that nobody can know to be missing.
    :ivar last: the last token that was delivered.
    :ivar last_life: the writer's process to which it belongs.
    """

    __slots__ = (
        "answer", "bounds", "busy", "delivered", "fetch", "forgiven", "given_up", "ids",
        "kind", "known", "last", "last_life", "left", "lie", "life", "links", "log",
        "page_holes", "page_life", "position", "reader", "removed", "sent", "timer",
        "timer_due", "total", "trace", "unsure", "wait",
    )  # fmt: skip

    kind: Kind
    bounds: Bounds
    ids: list[int]
    sent: int
    life: int
    removed: int
    log: list[tuple[int, int, bool]]
    links: list[WorldLink]
    reader: Reader
    position: int
    known: int
    lie: int
    left: list[int]
    total: int
    fetch: Fetch | None
    answer: Frozen | None
    page_life: int
    page_holes: int
    busy: Frozen | None
    given_up: bool
    timer: float
    timer_due: bool
    wait: float | None
    delivered: int
    forgiven: int
    unsure: int
    last: int
    last_life: int
    trace: list[str] | None

    @classmethod
    def begin(cls, kind: Kind, bounds: Bounds) -> Self:
        """Return the first state: nothing was written, and no link is up."""
        self = cls()
        self.kind, self.bounds = kind, bounds
        self.ids = [0] * bounds.ids
        self.log = []
        self.links = [WorldLink() for _ in range(bounds.links)]
        self.sent = self.life = self.removed = self.position = self.known = 0
        self.lie = self.page_life = self.page_holes = self.delivered = self.forgiven = 0
        self.last = self.last_life = self.unsure = 0
        self.left = bounds.budgets
        self.total = bounds.faults
        self.fetch = self.answer = self.busy = self.wait = None
        self.given_up = self.timer_due = False
        self.timer = 0
        self.trace = None
        self._start_reader(None)
        return self

    def _start_reader(self, epoch: str | None) -> None:
        self.reader = Reader(
            _POLICIES[self.kind], self.is_plausible, self._host_position, epoch
        )

    def _host_position(self) -> int:
        return self.position

    @property
    def in_memory(self) -> bool:
        """Whether the rows exist only in the writer's memory."""
        return self.kind not in (Kind.DATABASE, Kind.STANDBY, Kind.CACHES)

    @property
    def is_in_order(self) -> bool:
        """Whether the rows are in tables, and neither late nor repeated."""
        return self.kind in (Kind.DATABASE, Kind.STANDBY)

    @property
    def states_epochs(self) -> bool:
        """Whether the writer states its epoch on links."""
        return self.kind in (Kind.MEMORY, Kind.HOST_MEMORY)

    def is_plausible(self, token: int) -> bool:
        """Return whether the reader's process regards a token as plausible."""
        return self.is_plausible_at(self.position, token)

    def is_plausible_at(self, position: int, token: int) -> bool:
        """Return the same, for a reader at ``position``."""
        known = position if self.in_memory else self.known
        return token <= known + DISTANCE

    # -- the state as a value ----------------------------------------------------------

    def freeze(self) -> tuple[Frozen, int, list[int]]:
        """Return the state as a value, the faults left, and the order of its links.

        The value has three parts: what the reader and its driver know, what they do not
        know, and a pair of the same for each link. The faults left are bits.
        """
        of_reader, of_links = freeze(
            self.reader,
            with_epochs=self.states_epochs,
            with_bursts=self.bounds.burst is not None,
        )
        links = []
        for number, link in enumerate(self.links):
            of_link = of_links.get(number, ())
            heard = link.token, link.life, link.said, link.asked, of_link
            place = link.up, link.at, link.half, link.hidden, link.carried
            links.append((heard, place, number))
        links.sort()
        known = (
            self.position, self.known, self.answer, self.page_life, self.page_holes,
            self.busy, self.given_up, round(self.timer, 3), self.timer_due,
            None if self.wait is None else round(self.wait, 3), of_reader,
        )  # fmt: skip
        unknown = (
            tuple(self.ids), self.sent, self.life, self.removed, tuple(self.log),
            self.lie, self.delivered, self.unsure, self.forgiven, self.last,
            self.last_life,
        )  # fmt: skip
        left = sum(1 << fault for fault, count in enumerate(self.left) if count)
        frozen = known, unknown, tuple((link[0], link[1]) for link in links)
        return frozen, left, [link[2] for link in links]

    @classmethod
    def thaw(cls, kind: Kind, bounds: Bounds, frozen: Frozen, left: int) -> World:
        """Return the world whose state was frozen."""
        self = cls()
        self.kind, self.bounds, self.trace = kind, bounds, None
        known, unknown, links = frozen
        (
            self.position, self.known, self.answer, self.page_life, self.page_holes,
            self.busy, self.given_up, self.timer, self.timer_due, self.wait, of_reader,
        ) = known  # fmt: skip
        (
            ids, self.sent, self.life, self.removed, log, self.lie, self.delivered,
            self.unsure, self.forgiven, self.last, self.last_life,
        ) = unknown  # fmt: skip
        self.ids, self.log = list(ids), list(log)
        self.left = [left >> fault & 1 for fault in range(len(FAULTS))]
        self.total = bounds.faults - bounds.spent(left)
        self.links = []
        of_links: dict[Hashable, Frozen] = {}
        for number, ((*heard, of_link), (up, at, half, *carried)) in enumerate(links):
            self.links.append(WorldLink(up, at, half, *heard, *carried))
            if of_link:
                of_links[number] = of_link
        self._start_reader(None)
        thaw(self.reader, of_reader, of_links)
        self.fetch = self.reader.request
        return self

    # -- what can happen ---------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        """Iterate over the events that can happen now."""
        if self.given_up:
            yield ("drained",)
            yield from self._arrivals()
        elif self.busy is not None:
            yield from self._interruptions(self.busy)
        else:
            if self._may(OVERFLOW):
                yield ("overflow",)
            yield from self._links_up()
            yield from self._arrivals()
            yield from self._answers()
            yield from self._pauses()
            if self.bounds.stored:
                yield ("stored",)
            if self.in_memory:
                yield from self._writing_in_memory()
            else:
                yield from self._writing()
                yield from self._removals()
            if self._may(DIE):
                yield ("reader crash",)
            for number, link in enumerate(self.links):
                if link.up and self._may(BREAK):
                    yield ("break", number)

    def may_be_interrupted(self) -> tuple[bool, bool]:
        """Return which faults can strike while the driver is busy."""
        return self._may(OVERFLOW) or self._may(FAIL), self._may(LOSS)

    def concerns_reader(self, event: Event) -> bool:
        """Return whether an event concerns only what the reader and its driver know.

        That is so unless the position or the floor changes.
        """
        name = event[0]
        if name in ("lie", "false report"):
            return bool(self.lie)
        if name == "done":
            return self.busy == ("resume",)
        return name in ("report", "position", "time", "timer", "second", "moment")

    def _interruptions(self, busy: Frozen) -> Iterator[Event]:
        """Iterate over what can happen while the driver is busy."""
        yield ("done",)
        if busy[0] == "resume":
            yield from self._arrivals()
            return
        if self._may(FAIL):
            yield ("fail",)
        if busy[0] == "page" and self._may(LOSS):
            yield ("unreadable",)
        if self._may(OVERFLOW):
            yield ("overflow",)
            yield from self._links_up()

    def _answers(self) -> Iterator[Event]:
        fetch = self.fetch
        if fetch is None:
            return
        if self.answer is not None:
            yield ("page",)
            return
        if self.kind is Kind.STANDBY:
            yield ("behind",)
            if self.sent <= fetch.from_token:
                return
        yield ("answer", False)
        if len(self.rows(fetch.from_token, fetch.upto_token)) > 1:
            yield ("answer", True)
        if not (self.in_memory or self.removed or fetch.from_source) and (
            fetch.from_token < self.sent < fetch.upto_token
        ):
            yield ("backlog",)
        if self._may(FAIL):
            yield ("no answer",)

    def _may(self, fault: int) -> bool:
        return self.left[fault] > 0 and self.total > 0

    def _spend(self, fault: int) -> None:
        self.left[fault] -= 1
        self.total -= 1

    def _pauses(self) -> Iterator[Event]:
        reader = self.reader
        if self.timer_due:
            yield ("timer",)
        if self.timer < 0:
            yield ("time",)
        if self.bounds.burst is not None and (delay(reader) > 0 or self.timer > 0):
            yield ("moment",)
        if awaits_check(reader):
            yield ("second",)

    def _links_up(self) -> Iterator[Event]:
        known = False
        for number, link in enumerate(self.links):
            # Links that are down are interchangeable.
            if not link.up and not known:
                known = True
                yield ("up", number)

    def _arrivals(self) -> Iterator[Event]:
        """Iterate over what arrives: handled, or given up if the reader is busy."""
        for number, link in enumerate(self.links):
            if not link.up:
                continue
            if link.at < len(self.log):
                yield from self._messages(number, link)
            if not (self.removed or link.half):
                yield from self._announcements(number, link)
            if self.lie or self._may(LIE):
                highest = self.bounds.ids + 1 + DISTANCE
                for token in (self.lie,) if self.lie else range(1, highest + 1):
                    yield ("lie", number, 0, token)
                    yield ("lie", number, token, token)
                    yield ("false report", number, token)

    def _messages(self, number: int, link: WorldLink) -> Iterator[Event]:
        yield ("message", number)
        if self._may(LOSS):
            if not link.half:
                yield ("lose", number)
            if self.log[link.at][2]:
                yield ("garble", number)
                if self.is_whole(link) and self.is_idle:
                    yield ("unreadable row", number)

    def _announcements(self, number: int, link: WorldLink) -> Iterator[Event]:
        if not self.states_epochs or link.said:
            yield ("report", number)
        yield ("position", number)
        if not self.in_memory and link.token not in self.rows(0, link.token):
            yield ("range", number, "announced")
            yield ("range", number, "reported")
        if self.states_epochs:
            yield ("epoch", number)
            # It is the first message of a process on a link that is up.
            if not (link.said or link.token):
                yield ("first hello", number)
            if self._may(HELLO) and link.life == self.life:
                yield ("hello", number)

    def is_whole(self, link: WorldLink) -> bool:
        return self._is_single(self.log[link.at][1]) or link.half

    def _is_single(self, token: int) -> bool:
        return token != LARGE or self.bounds.ids < LARGE

    def _writing_in_memory(self) -> Iterator[Event]:
        if 0 in self.ids and not self.removed:
            yield ("write",)
        if self.sent < self._written:
            yield ("send",)
        if self._may(CRASH) and not self.removed:
            yield ("writer crash", False)

    def _writing(self) -> Iterator[Event]:
        if self.removed:
            return
        if 0 in self.ids:
            yield ("allocate",)
        for index, status in enumerate(self.ids):
            if status == PENDING:
                yield ("commit", index + 1)
                yield ("roll back", index + 1)
        if self.sent < self.announceable():
            yield ("send",)
        if self._may(CRASH):
            yield ("writer crash", False)
            if self.own_last() != self._allocated():
                yield ("writer crash", True)

    def _removals(self) -> Iterator[Event]:
        if self._may(REMOVE):
            yield ("remove", True)
            if all(is_waiting_on(self.reader, each) for each in self._numbers_up()):
                yield ("remove", False)
        if self.removed == 1:
            yield ("return",)
        if self.removed:
            yield ("search",)

    @property
    def _written(self) -> int:
        """The writer's position in its memory. An id is the life of its row, plus 1."""
        return self.ids.count(self.life + 1)

    def _allocated(self) -> int:
        return len(self.ids) - self.ids.count(0)

    def own_last(self) -> int:
        committed = [i + 1 for i, s in enumerate(self.ids) if s == COMMITTED]
        return committed[-1] if committed else 0

    def announceable(self) -> int:
        for index, status in enumerate(self.ids):
            if status in (0, PENDING):
                return index
        return len(self.ids)

    def rows(self, from_token: int, upto_token: int) -> tuple[int, ...]:
        if self.in_memory:
            return tuple(range(from_token + 1, min(self._written, upto_token) + 1))
        ids = self.ids
        return tuple(
            token
            for token in range(from_token + 1, min(upto_token, len(ids)) + 1)
            if ids[token - 1] == COMMITTED
        )

    @property
    def is_idle(self) -> bool:
        """Whether an item that arrives is handled at once."""
        return self.busy is None and not self.given_up and self.fetch is None

    # -- events ------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Apply an event, and what the driver then does without interruption.

        :raises ViolationError: if a promise is broken.
        """
        name, *arguments = event
        _HANDLERS[name](self, *arguments)
        self._run()
        self._tidy()
        self._check()

    def note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(text)

    # The writer.

    def _on_write(self) -> None:
        self.ids[self.ids.index(0)] = self.life + 1

    def _on_allocate(self) -> None:
        self.ids[self.ids.index(0)] = PENDING

    def _on_commit(self, token: int) -> None:
        self.ids[token - 1] = COMMITTED

    def _on_roll_back(self, token: int) -> None:
        self.ids[token - 1] = ABORTED

    def _on_send(self) -> None:
        upto = self._written if self.in_memory else self.announceable()
        rows = self.rows(self.sent, upto)
        new = rows[0] if rows else upto
        self.log.append((self.sent, new, bool(rows)))
        self.sent = new

    def _on_writer_crash(self, to_own_row: bool) -> None:
        self._spend(CRASH)
        self.life += self.in_memory
        self.ids = [ABORTED if s == PENDING else s for s in self.ids]
        if self.in_memory:
            self.ids = [0] * len(self.ids)
            self.sent = 0
            self.delivered = self.forgiven = self.unsure = 0
        else:
            self.sent = self.own_last() if to_own_row else self._allocated()
        # The first message of the new process.
        self.log.append((self.sent, self.sent, False))

    def _on_remove(self, is_deleted: bool) -> None:
        self._spend(REMOVE)
        self.removed = 2 if is_deleted else 1
        self.ids = [ABORTED if s == PENDING else s for s in self.ids]
        self._find_removed(is_deleted)

    def _numbers_up(self) -> list[int]:
        return [number for number, link in enumerate(self.links) if link.up]

    def _find_removed(self, is_deleted: bool) -> None:
        upto = self.own_last()
        if upto <= self.position:
            if not is_deleted:
                # It is not searched for.
                return
            upto = self.position
        self.reader.removed(upto, is_deleted=is_deleted)
        self.note(f"reader.removed({upto}, is_deleted={is_deleted})")
        if self.busy is None and self.reader.request is None:
            self.busy = ("proceed",)

    def _on_search(self) -> None:
        """Let the reader's process, which may have restarted, search once more."""
        if self.removed > 2:
            self.removed -= 2
        self._find_removed(is_deleted=self.removed == 2)

    def _on_return(self) -> None:
        self.removed = 0

    def _on_stored(self) -> None:
        """Read the position that the writer stored with its last finished row."""
        token = min(self.own_last(), self.announceable())
        found = self.reader.stored(token)
        self.note(f"reader.stored({token}) -> {found}")
        if self.reader.request is None:
            self.busy = ("proceed",)

    # Links.

    def _on_up(self, number: int) -> None:
        reader = self.reader
        self.links[number] = WorldLink(
            True, len(self.log), token=self.sent, life=self.life
        )
        reader.link_up(number)
        self.note(f"reader.link_up({number})")
        if self.busy is None and not self.given_up:
            self.busy = ("proceed",)

    def _on_break(self, number: int) -> None:
        self._spend(BREAK)
        self.links[number] = WorldLink()
        self.reader.link_lost(number)
        self.note(f"reader.link_lost({number})")
        if not self.reader.link_count:
            self.timer = 0

    def _on_lose(self, number: int) -> None:
        self._spend(LOSS)
        link = self.links[number]
        _, new, is_row = self.log[link.at]
        hidden = self.rows(new - 1, new) if is_row else self.rows(0, new)
        for token in hidden:
            link.hidden |= 1 << token
        self._pass(link)

    def _on_garble(self, number: int) -> None:
        self._spend(LOSS)
        link = self.links[number]
        is_half = not self.is_whole(link)
        if not is_half:
            if self.bounds.lies and not is_waiting_on(self.reader, number):
                link.carried |= 1 << self.log[link.at][1]
            self._pass(link)
        link.half = is_half
        self._announce(number, "lost_rows", number)

    def _on_unreadable_row(self, number: int) -> None:
        self._spend(LOSS)
        self._on_message(number, is_readable=False)

    def _pass(self, link: WorldLink) -> None:
        prev, new, is_row = self.log[link.at]
        link.at += 1
        link.half = False
        link.token = new
        if prev == new and not is_row:
            link.life += self.in_memory
            link.said = False
            link.carried = 0 if self.in_memory else link.carried

    def _on_message(self, number: int, is_readable: bool = True) -> None:
        link = self.links[number]
        prev, new, is_row = self.log[link.at]
        if is_row:
            token = new if self.is_whole(link) else None
            if token is None:
                link.half = True
            else:
                self._pass(link)
            self._handle_row(number, token, is_readable)
        else:
            self._pass(link)
            if prev == new and self.states_epochs:
                self._announce_epoch(number, has_restarted=True)
            else:
                self._announce(number, "announced", number, prev, new, 0.0)

    def _on_position(self, number: int) -> None:
        self.links[number].asked = False
        token = self.links[number].token
        if not self.reader.follows(number, token):
            self._announce(number, "announced", number, token, token, 0.0)

    def _on_report(self, number: int) -> None:
        token = self.links[number].token
        if not self.reader.follows(number, token):
            self._announce(number, "reported", number, token, token, 0.0)

    def _on_range(self, number: int, method: str) -> None:
        token = self.links[number].token
        if not self.reader.follows(number, token):
            prev = max(self.rows(0, token), default=0)
            self._announce(number, method, number, prev, token, 0.0)

    def _on_epoch(self, number: int) -> None:
        self._announce_epoch(number, has_restarted=False)

    def _on_first_hello(self, number: int) -> None:
        self._announce_epoch(number, has_restarted=True)

    def _on_hello(self, number: int) -> None:
        self._spend(HELLO)
        self._announce_epoch(number, has_restarted=True)

    def _announce_epoch(self, number: int, *, has_restarted: bool) -> None:
        link = self.links[number]
        link.said = True
        epoch = str(link.life)
        if link.life < self.last_life:
            # The page of a new process overtook a message of the old one.
            self.unsure |= self.delivered
        if not self.reader.follows_epoch(number, epoch):
            self._announce(
                number,
                "epoch_reported",
                number,
                link.token,
                epoch,
                has_restarted=has_restarted,
            )

    def _on_lie(self, number: int, prev: int, token: int) -> None:
        self._lie(number, token)
        if not self.reader.follows(number, token):
            self._announce(number, "announced", number, prev, token, 0.0)

    def _on_false_report(self, number: int, token: int) -> None:
        self._lie(number, token)
        if not self.reader.follows(number, token):
            self._announce(number, "reported", number, token, token, 0.0)

    def _lie(self, number: int, token: int) -> None:
        if not self.lie:
            self._spend(LIE)
            self.lie = token
        link = self.links[number]
        if is_waiting_on(self.reader, number):
            # It seems to be the link's first POSITION, and hides what was sent before.
            for hidden in self.rows(token, link.token):
                link.hidden |= 1 << hidden

    def _announce(self, number: int, method: str, *args: Any, **kwargs: Any) -> None:
        """Notify the reader, as the driver does."""
        reader = self.reader
        is_idle = self.is_idle
        if not is_idle:
            reader.overflow()
            self.note("reader.overflow()")
        if method == "announced":
            reader.drop_unfinished(number)
        found = getattr(reader, method)(*args, **kwargs)
        if self.trace is not None:
            words = [repr(a) for a in args] + [f"{k}={v!r}" for k, v in kwargs.items()]
            self.note(f"reader.{method}({', '.join(words)}) -> {found}")
        if is_idle:
            self.busy = ("proceed",)

    # Rows.

    def _handle_row(self, number: int, token: int | None, is_readable: bool) -> None:
        reader = self.reader
        is_idle = self.is_idle
        if not is_idle:
            reader.overflow()
            self.note("reader.overflow()")
        fast = is_idle and reader.is_live_on(number)
        complete = reader.gather(number, [token], [b""])
        if self.bounds.lies and complete:
            self.links[number].carried |= 1 << complete[0][0]
        self.note(f"reader.gather({number}, [{token}], [b'']) -> {complete}")
        for new, texts in complete or ():
            verdict = reader.batch(number, new, len(texts))
            self.note(f"reader.batch({number}, {new}, {len(texts)}) -> {verdict}")
            if (
                fast
                and new > self.position
                and self.is_plausible(new)
                and verdict is not Verdict.DELIVER
            ):
                raise ViolationError("the fast path delivers what the machine does not")
            if verdict is Verdict.DELIVER:
                if not is_idle:
                    reader.overflow(new)
                    self.note(f"reader.overflow({new})")
                elif not is_readable:
                    reader.unreadable(new)
                    self.note(f"reader.unreadable({new})")
                elif len(texts) != (1 if self._is_single(new) else 2):
                    raise ViolationError(f"not all rows of token {new} are delivered")
                else:
                    link = self.links[number]
                    unknown = link.hidden
                    if self.lie:
                        # The false position hid it, and the link never carried it.
                        unknown |= ((2 << self.lie) - 1) & ~link.carried
                    self.busy = ("row", new, unknown, link.life)
                    return
        if not is_idle:
            reader.drop_unfinished(number)
        elif complete is not None:
            self.busy = ("proceed",)

    # The source.

    def _on_answer(self, is_limited: bool) -> None:
        fetch = self.fetch
        assert fetch is not None
        from_token, upto = fetch.from_token, fetch.upto_token
        last = None
        if self.in_memory:
            if self._written < upto:
                last = upto = self._written
        elif upto > self.known:
            self.known = self._allocated()
            if self.kind is Kind.STANDBY:
                # The writer stores what it has sent.
                upto = min(upto, self.sent)
            elif upto > self.known + DISTANCE:
                last = upto = self.known
        rows = self.rows(from_token, upto)
        if is_limited and len(rows) > 1:
            rows = rows[:1]
            upto = rows[0]
        # The ids that were in flight when later rows were read: only a false position
        # can lead to that, and nobody can deliver their rows in order any more.
        holes = 0
        if not self.in_memory:
            for token in range(from_token + 1, rows[-1] if rows else 0):
                holes |= (self.ids[token - 1] == PENDING) << token
        if holes and not self.lie:
            raise ViolationError("rows are fetched before earlier ones were committed")
        self.answer = (rows, upto, last, self.life, holes)

    def _on_backlog(self) -> None:
        """Answer from the writer's backlog, which ends at what was sent."""
        assert self.fetch is not None
        rows = self.rows(self.fetch.from_token, self.sent)
        self.answer = (rows, self.sent, None, self.life, 0)

    def _on_no_answer(self) -> None:
        self._spend(FAIL)
        self._fail()

    def _on_behind(self) -> None:
        """Answer from a snapshot that does not know the next rows."""
        self.reader.source_behind()
        self.note("reader.source_behind()")
        self._pause(-1)
        self.busy = ("resume",)

    def _on_page(self) -> None:
        fetch, reader = self.fetch, self.reader
        assert fetch is not None
        assert self.answer is not None
        rows, upto, last, life, holes = self.answer
        self.answer = self.fetch = None
        epoch = str(life) if self.kind is Kind.MEMORY else None
        updates: list[tuple[int, Any]] = [(token, None) for token in rows]
        result = StreamUpdateResult(updates, upto, False, last, epoch)
        try:
            page = reader.page_fetched(fetch, result)
        except CatchUpError:
            self.note(f"reader.page_fetched(..., {result}) -> error")
            self._fail()
            self.busy = ("resume",)
            return
        self.note(
            f"reader.page_fetched(..., {rows}, upto {upto}, last {last}, {epoch}) -> "
            f"{None if page is None else page.tokens}"
        )
        if page is None:
            self.busy = ("resume",)
            return
        self.page_life, self.page_holes = life, holes
        self._begin_page()

    def _begin_page(self) -> None:
        reader = self.reader
        self._proceed()
        if self.busy is None:
            page = reader.page
            self.busy = ("resume",) if page is None else ("page", 0, tuple(page.tokens))
        elif self.busy[0] != "begin":
            raise ViolationError(f"{self.busy[0]} while a page is delivered")

    # The driver.

    def _on_done(self) -> None:
        """Complete what the driver is doing."""
        busy, reader = self.busy, self.reader
        assert busy is not None
        self.busy = None
        kind = busy[0]
        if kind == "proceed":
            self._proceed()
        elif kind == "resume":
            self._resume()
        elif kind == "row":
            _, token, unknown, life = busy
            self._deliver(token, life)
            # Nobody can know that these rows exist.
            self.forgiven |= unknown & ((1 << token) - 1) & ~self.delivered
            self.busy = ("proceed",)
        elif kind == "page":
            self._deliver_of_page(busy[1], busy[2])
        elif kind == "rewind":
            _, token, epoch = busy
            self.position = token
            reader.rewound(epoch)
            self.note(f"reader.rewound() to {token}, epoch {epoch}")
            if self.in_memory:
                self.last, self.last_life = token, 0
            self.busy = ("proceed",)
        elif kind == "begin":
            reader.epoch_begun(busy[1])
            self.note("reader.epoch_begun()")
            if reader.page is None:
                self.busy = ("proceed",)
            else:
                self._begin_page()
        else:
            self.position = busy[1]
            reader.advanced(busy[1], 0.0)
            self.note(f"reader.advanced({busy[1]})")
            self.busy = ("proceed",)

    def _resume(self) -> None:
        """Continue after a page, a pause or an overflow."""
        self._proceed()

    def _deliver_of_page(self, index: int, tokens: tuple[int, ...]) -> None:
        reader = self.reader
        if index < len(tokens):
            token = tokens[index]
            self._deliver(token, self.page_life)
            self.forgiven |= self.page_holes & ((1 << token) - 1)
            reader.delivered(token)
            self.note(f"reader.delivered({token})")
            if reader.page is None:
                self.busy = ("resume",)
                return
            index += 1
        if index < len(tokens):
            self.busy = ("page", index, tokens)
            return
        reader.page_delivered()
        self.note("reader.page_delivered()")
        self.busy = ("resume",)

    def _on_fail(self) -> None:
        """Let the sink fail."""
        self._spend(FAIL)
        busy, reader = self.busy, self.reader
        assert busy is not None
        self.busy = ("proceed",)
        if busy[0] == "row":
            reader.delivery_failed([busy[1]])
            self.note(f"reader.delivery_failed([{busy[1]}])")
            self._pause(-1)
        elif busy[0] == "page":
            if reader.page is not None:
                self._fail()
            self.busy = ("resume",)
        else:
            self._fail()

    def _on_unreadable(self) -> None:
        """Find that the next row of the page cannot be decoded."""
        busy, reader = self.busy, self.reader
        assert busy is not None
        self._spend(LOSS)
        if busy[1] < len(busy[2]) and reader.page is not None:
            reader.unreadable(busy[2][busy[1]])
            self.note(f"reader.unreadable({busy[2][busy[1]]})")
            self.busy = ("resume",)

    def _fail(self) -> None:
        self.reader.failed()
        self.note("reader.failed()")
        self._pause(-1)

    def _pause(self, seconds: float) -> None:
        if self.reader.link_count:
            self.timer = seconds

    def _on_overflow(self) -> None:
        self._spend(OVERFLOW)
        self.given_up = True

    def _on_drained(self) -> None:
        self.given_up = False
        if self.busy is None:
            self.busy = ("resume",)

    def _on_time(self) -> None:
        self.timer = 0
        self.timer_due = True

    def _on_timer(self) -> None:
        self.timer_due = False
        self.reader.timer_due()
        self.note("reader.timer_due()")
        self.busy = ("resume",)

    def _on_second(self) -> None:
        end_check_interval(self.reader)

    def _on_moment(self) -> None:
        elapse(self.reader, MOMENT)
        if self.timer > 0:
            self.timer = round(self.timer - MOMENT, 3)
            if self.timer <= 0:
                self._on_time()
        if self.wait is not None:
            self.wait = max(0.0, round(self.wait - MOMENT, 3))

    def _on_reader_crash(self) -> None:
        self._spend(DIE)
        for token in range(1, self.position + 1):
            if not self.delivered & 1 << token:
                self.forgiven |= 1 << token
        self.links = [WorldLink() for _ in self.links]
        self.fetch = self.answer = self.busy = self.wait = None
        self.timer, self.timer_due = 0, False
        if self.removed:
            self.removed += 2
        self._start_reader(self.reader.epoch)

    def _run(self) -> None:
        """Do what nothing can interrupt."""
        may_stop, may_lose = self.may_be_interrupted()
        while self.busy is not None and not self.given_up:
            kind = self.busy[0]
            if kind == "resume":
                if self.reader.has_more_to_fetch and self._has_arrivals():
                    return
            elif self.busy[0:2] == ("page", 0) and not self.busy[2]:
                pass
            elif kind != "proceed" and (may_stop or (kind == "page" and may_lose)):
                return
            self._on_done()

    def _has_arrivals(self) -> bool:
        return any(link.up for link in self.links)

    def _proceed(self) -> None:
        """Take the reader's actions, up to one that the sink has to carry out."""
        reader = self.reader
        steps = 0
        while True:
            steps += 1
            if steps > 50:
                raise ViolationError("the reader's actions never end")
            action = reader.next(0.0)
            if action is None:
                return
            self.note(f"reader.next() -> {action}")
            self._execute(action)
            if self.busy is not None:
                return

    def _execute(self, action: Action) -> None:
        if isinstance(action, Fetch):
            self.fetch, self.answer, self.wait = action, None, None
            if action.from_token >= action.upto_token:
                raise ViolationError(f"{action} is empty")
        elif isinstance(action, Pause):
            if self.wait is not None and action.seconds > self.wait + 0.001:
                raise ViolationError("a fetch that waits is delayed once more")
            self.wait = self.timer = action.seconds
        elif isinstance(action, Rewind):
            if action.token > self.position:
                raise ViolationError(f"{action} raises the position")
            self.busy = ("rewind", action.token, action.epoch)
        elif isinstance(action, BeginEpoch):
            self.busy = ("begin", action.epoch)
        elif isinstance(action, Advance):
            if action.token < self.position:
                raise ViolationError(f"{action} lowers the position")
            self.busy = ("advance", action.token)
        elif isinstance(action, Finished):
            self.timer = 0
            self.wait = None
        elif isinstance(action, Ask):
            # Elsewhere, it makes no difference: a POSITION may arrive at any time.
            self.links[action.link].asked = self.kind is Kind.STANDBY

    def _deliver(self, token: int, life: int) -> None:
        self.note(f"delivered: row {token}" + (f" of process {life}" if life else ""))
        if self.in_memory:
            # Without epochs, a false position looks like a restart.
            is_guess = self.kind is not Kind.MEMORY and (self.lie or self.life)
            if life < self.last_life and self.reader.epoch and not is_guess:
                raise ViolationError(f"row {token} of an earlier process is delivered")
            if life > self.last_life:
                if self.last and sum(self._spent()) > 1:
                    # The restart went unnoticed; see _may_miss_a_restart().
                    self.forgiven |= ((1 << token) - 1) & ~self.delivered
                self.last = 0
            bit = 1 << token
            if token <= self.last and not is_guess:
                raise ViolationError(f"row {token} is delivered after row {self.last}")
            if life == self.life:
                if self.delivered & bit and not (
                    is_guess or self.lie or (self.unsure & bit and self._has_failed())
                ):
                    raise ViolationError(f"row {token} is delivered twice")
                self.delivered |= bit
                self.unsure &= ~bit
                # A page can be ahead of what arrived from a restarted writer, whose
                # position then seems to be lower; another fault can hide the restart.
                is_ahead = not all(
                    link.up and (link.life, link.token) >= (life, token)
                    for link in self.links
                )
                is_hidden = sum(self._spent()) > 1
                if self.reader.epoch != str(life) or (life and (is_ahead or is_hidden)):
                    self.unsure |= self.delivered
            self.last, self.last_life = token, life
            self.position = max(self.position, token)
            return
        if self.kind is not Kind.CACHES:
            if self.delivered & 1 << token:
                raise ViolationError(f"row {token} is delivered twice")
            if token <= self.last:
                raise ViolationError(f"row {token} is delivered after row {self.last}")
        self.delivered |= 1 << token
        self.last = max(self.last, token)
        self.position = max(self.position, token)

    def _has_failed(self) -> bool:
        return any(self._spent())

    def _spent(self) -> list[int]:
        budgets = self.bounds.budgets
        return [all_ - left for all_, left in zip(budgets, self.left, strict=True)]

    def _tidy(self) -> None:
        """Forget what has no effect any more."""
        reader = self.reader
        if self.fetch is not reader.request:
            self.fetch, self.answer = reader.request, None
        read = [link.at for link in self.links if link.up]
        least = min(read) if read else len(self.log)
        if least:
            del self.log[:least]
            for link in self.links:
                if link.up:
                    link.at -= least
        for link in self.links:
            link.hidden &= ~(self.delivered | self.forgiven)
        if reader.page is None and (self.busy is None or self.busy[0] != "page"):
            self.page_life = self.page_holes = 0
        if not self.bounds.lies and self.known >= len(self.ids) - DISTANCE:
            # All tokens are plausible, now and later.
            self.known = len(self.ids)
        if self.is_in_order:
            self._settle()

    def _settle(self) -> None:
        """Count ids that were rolled back as delivered, where nobody looks any more."""
        for token in range(1, min(self.reader.floor, self.sent, self.own_last()) + 1):
            if self.ids[token - 1] == ABORTED:
                self.ids[token - 1] = COMMITTED
                self.delivered |= 1 << token
                self.last = max(self.last, token)

    def _check(self) -> None:
        if self.in_memory or self.lie:
            return
        for token in range(1, min(self.position, len(self.ids)) + 1):
            bit = 1 << token
            if self.ids[token - 1] == COMMITTED and not (
                (self.delivered | self.forgiven) & bit
            ):
                raise ViolationError(
                    f"the position {self.position} passed row {token}, which was not "
                    "delivered"
                )

    # -- the way to rest ---------------------------------------------------------------

    def missing(self) -> str | None:
        """Return what is still missing before the world is at rest, if anything."""
        reader = self.reader
        upto = self._written if self.in_memory else len(self.ids)
        if self._may_miss_a_restart():
            upto = 0
        for token in self.rows(0, upto):
            if self.kind is Kind.CACHES and token <= self.lie:
                # Such a position cannot be detected, because rows may be late.
                continue
            if not (self.delivered | self.forgiven) & 1 << token:
                return f"row {token} was not delivered"
        if reader.is_catching_up or self.busy is not None or self.given_up:
            return "the reader is not at rest"
        if self.removed:
            return None
        if not all(is_complete_on(reader, each) for each in self._numbers_up()):
            return "a link is not complete"
        # A false position may remain if no row shows that it is false.
        may_differ = self.lie and (not self.is_in_order or self.forgiven)
        if self.position != self.sent and not may_differ:
            return f"the position is {self.position}, not {self.sent}"
        return None

    def _may_miss_a_restart(self) -> bool:
        """Return whether a restart during another fault went unnoticed.

        Nothing shows it if the writer states no epoch, or did not before it restarted:
        rows of the earlier process then seem to be of the present one.
        """
        if not self.life or sum(self._spent()) < 2:
            return False
        if not self.states_epochs:
            return True
        is_earlier = self.last > 0 and self.last_life < self.life
        return is_earlier and self.reader.epoch == str(self.life)

    def towards_rest(self) -> list[Event]:
        """Return events, of which the first one that changes anything leads to rest.

        :return: an empty list at rest.
        """
        event = self._next_of_driver() or self._next_of_world()
        if event is not None:
            return [event]
        return [] if self.missing() is None else self._round()

    def _next_of_driver(self) -> Event | None:
        if self.given_up:
            return ("drained",)
        if self.busy is not None:
            return ("done",)
        if self.fetch is not None:
            if self.answer is not None:
                return ("page",)
            is_behind = self.kind is Kind.STANDBY and self.sent <= self.fetch.from_token
            return ("behind",) if is_behind else ("answer", False)
        if self.timer_due:
            return ("timer",)
        for number, link in enumerate(self.links):
            if link.asked:
                is_next = link.at < len(self.log)
                return ("message" if is_next else "position", number)
        if self.timer:
            return ("moment",) if self.timer > 0 else ("time",)
        return None

    def _next_of_world(self) -> Event | None:
        for number, link in enumerate(self.links):
            if not link.up:
                return ("up", number)
            if link.at < len(self.log):
                return ("message", number)
        if self.removed:
            return ("search",) if self.removed > 2 else None
        if not self.in_memory and PENDING in self.ids:
            return ("commit", self.ids.index(PENDING) + 1)
        upto = self._written if self.in_memory else self.announceable()
        return ("send",) if self.sent < upto else None

    def _round(self) -> list[Event]:
        """Return the announcements that repeat, and the time between them."""
        if self.removed:
            return []
        numbers = range(len(self.links))
        found: list[Event] = []
        if self.states_epochs:
            found += [("epoch", number) for number in numbers]
        found += [("report", number) for number in numbers]
        if awaits_check(self.reader):
            found.append(("second",))
        found += [("position", number) for number in numbers]
        return found


_HANDLERS: Final = {
    name[len("_on_") :].replace("_", " "): method
    for name, method in vars(World).items()
    if name.startswith("_on_")
}
